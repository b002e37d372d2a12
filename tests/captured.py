"""A program run as it is and with its functions captured: the same bits, and what ``.stats`` must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest


def bits(tree: Any) -> list[Any]:
    """All leaves, arrays by dtype, shape and bytes; anything else by type and text."""
    found = []
    for x in nest.flatten(tree):
        if isinstance(x, (tg.Tensor, tg.Variable)):
            x = x.numpy()
        if isinstance(x, np.ndarray):
            found.append((str(x.dtype), x.shape, np.ascontiguousarray(x).tobytes()))
        else:
            found.append((type(x).__name__, repr(x)))
    return found


def alike(program: Callable[[Callable[..., Any]], Any], *stats: tuple[int, int] | tuple[int, int, int]) -> list[Any]:
    """Run ``program(function)`` with ``function`` doing nothing, and with ``tg.function``: the bits must agree.

    ``stats``: of each captured function, in the order in which they are made, traces, replays and fallbacks (0 if not
    given).  Returns the functions.
    """
    made: list[Any] = []

    def function(f: Any = None, **options: Any) -> Any:
        if f is None:
            return lambda f: function(f, **options)
        made.append(tg.function(f, **options))
        return made[-1]

    tg.random.seed(7)
    wanted = bits(program(lambda f=None, **_: f if f is not None else (lambda f: f)))
    tg.random.seed(7)
    got = bits(program(function))
    assert len(got) == len(wanted)
    wrong = [i for i, (g, w) in enumerate(zip(got, wanted, strict=True)) if g != w]
    assert not wrong, f"leaves {wrong} of {len(got)} differ; {[f.stats for f in made]}"
    for f, (traces, replays, *fallbacks) in zip(made, stats, strict=bool(stats)):
        found = (f.stats.traces, f.stats.replays, sum(f.stats.fallbacks.values()))
        assert found == (traces, replays, *(fallbacks or [0])), f.stats
    return made
