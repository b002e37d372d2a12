"""What several tests of the engine share: float64 values, gradients by tape, run counts, and a look for garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest


def c64(value: Any) -> tg.Tensor:
    """A float64 tensor."""
    return tg.asarray(np.asarray(value, dtype=np.float64))


def var64(value: Any, **options: Any) -> tg.Variable:
    """A float64 variable."""
    return tg.Variable(np.asarray(value, dtype=np.float64), **options)


def values(tree: Any) -> Any:
    """Tensors and variables of a list, tuple or dict as NumPy arrays of their own; anything else as it is."""
    return nest.map_leaves(lambda x: np.array(x.numpy()) if hasattr(x, "numpy") else x, tree)


def gradients(f: Callable, sources: Any, *args: Any, **options: Any) -> Any:
    """Gradients of ``f(*args)`` (or of ``f(*sources)``) in ``sources``, watched, by a plain tape, as arrays."""
    with tg.GradientTape() as tape:
        tape.watch(sources)
        y = f(*(args or sources))
    return values(tape.gradient(y, sources, **options))


def same(got: Any, wanted: Any, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    """``got`` has the structure of ``wanted``, None in the same places, and its numbers (an array may be a list)."""
    if isinstance(got, dict):
        assert isinstance(wanted, dict) and list(got) == list(wanted), (got, wanted)
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(got, (list, tuple)):
        assert type(got) is type(wanted) and len(got) == len(wanted), (got, wanted)
        for g, w in zip(got, wanted, strict=True):
            same(g, w, rtol, atol)
        return
    assert (got is None) == (wanted is None), (got, wanted)
    if got is not None:
        g, w = np.asarray(values(got)), np.asarray(values(wanted))
        assert g.shape == w.shape, (g, w)
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)


def bits_equal(got: Any, wanted: Any) -> bool:
    """Whether all leaves have the same dtype, shape and bits (but for signs of zeros: adding a zero may lose one)."""
    pairs = zip(nest.leaves(values(got)), nest.leaves(values(wanted)), strict=True)
    return all((g is None) == (w is None) and (g is None or _same_bits(g, w)) for g, w in pairs)


def _same_bits(g: np.ndarray, w: np.ndarray) -> bool:
    return g.dtype == w.dtype and np.array_equal(g, w, equal_nan=True)


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


def laid(x: np.ndarray, how: str) -> np.ndarray:
    """The same matrix: by rows, by columns, with gaps between rows, with gaps everywhere."""
    if how == "rows":
        return x.copy()
    if how == "columns":
        return np.asfortranarray(x)
    step = (2, 1) if how == "gaps" else (2, 3)
    wide = np.zeros((x.shape[0] * step[0], x.shape[1] * step[1]), x.dtype)
    view = wide[:: step[0], :: step[1]]
    view[...] = x
    return view
