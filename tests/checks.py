"""What several tests of the engine share: float64 values, gradients by tape, run counts, and a look for garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import tapegrad as tg


def c64(value: Any) -> tg.Tensor:
    """A float64 tensor."""
    return tg.asarray(np.asarray(value, dtype=np.float64))


def var64(value: Any, **options: Any) -> tg.Variable:
    """A float64 variable."""
    return tg.Variable(np.asarray(value, dtype=np.float64), **options)


def values(tree: Any) -> Any:
    """Tensors and variables of a list, tuple or dict as NumPy arrays; anything else as it is."""
    return tg.nest.map_leaves(lambda x: x.numpy() if hasattr(x, "numpy") else x, tree)


def gradients(f: Callable, sources: Any, *args: Any, **options: Any) -> Any:
    """Gradients of ``f(*args)`` (or of ``f(*sources)``) in ``sources``, watched, by a plain tape, as arrays."""
    with tg.GradientTape() as tape:
        tape.watch(sources)
        y = f(*(args or sources))
    return values(tape.gradient(y, sources, **options))


def same(got: Any, wanted: Any, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    """Both have the same structure, None in the same places, and the same numbers, shapes and dtypes."""
    got, wanted = values(got), values(wanted)
    assert tg.nest.structure(got) == tg.nest.structure(wanted), (got, wanted)
    for g, w in zip(tg.nest.leaves(got), tg.nest.leaves(wanted), strict=True):
        assert (g is None) == (w is None), (got, wanted)
        if g is not None:
            assert np.shape(g) == np.shape(w), (got, wanted)
            np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)


def bits_equal(got: Any, wanted: Any) -> bool:
    """Whether all leaves are equal to the last bit, NaN included, and of one dtype."""
    pairs = zip(tg.nest.leaves(values(got)), tg.nest.leaves(values(wanted)), strict=True)
    return all((g is None) == (w is None) and (g is None or _same_bits(g, w)) for g, w in pairs)


def _same_bits(g: np.ndarray, w: np.ndarray) -> bool:
    return g.dtype == w.dtype and g.shape == w.shape and g.tobytes() == w.tobytes()


class Counted:
    """A function that counts its runs in ``runs``."""

    def __init__(self, f: Callable) -> None:
        functools.update_wrapper(self, f)
        self.f, self.runs = f, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.f(*args, **kwargs)

    def take(self) -> int:
        """How often it ran since the last time."""
        runs, self.runs = self.runs, 0
        return runs


@contextmanager
def no_garbage() -> Iterator[None]:
    """The block leaves no reference cycles: with the collector off, everything it drops is freed at once."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        found = gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    assert not found, f"{found} unreachable objects were left to the garbage collector"
