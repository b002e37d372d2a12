"""Entries of a table: calls of ufuncs, copies and sums, each with the nest of loops that NumPy would run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tapegrad.device import CPU, cuda_types
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.numerics.elements import convert, select
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native.group import Entry, meet
from tapegrad.engine.cpu.native.loops import (
    OF_ELEMENTS,
    Core,
    Loop,
    core_strides,
    loop_of,
    merged,
    product_of,
    sum_of,
)
from tapegrad.engine.cpu.native.ops import is_exact
from tapegrad.engine.task import Call, Silenced

_XP = CPU.xp
_ARRAYS = (_XP.ndarray, AbstractArray)
_MOST_AXES = 4
_NAMES = {select: "where", convert: "cast"}
"""What kernels call functions that are no ufuncs."""


def entry_of(call: Call) -> Entry | None:
    """Return the call as an entry; None if it must stay a Python call."""
    f: Any
    f, arrays = call
    if type(f) is partial and not f.args and list(f.keywords) == ["out"]:
        f, arrays = f.func, (*arrays, f.keywords["out"])
    silenced = type(f) is Silenced
    if silenced:
        f = f.ufunc
    name = getattr(f, "__name__", "")
    if f is _XP.copyto and len(arrays) == 2:
        arrays = arrays[::-1]
    elif f in _NAMES:
        name, (_, out, *reads) = _NAMES[f], arrays
        arrays = *reads, out
    elif name == "reduce" and getattr(f, "__self__", None) is _XP.add and len(arrays) == 5:
        return _sum(*arrays)
    elif f is _XP.matmul and len(arrays) == 3:
        return _product(*arrays)
    elif type(f) is not _XP.ufunc or len(arrays) != f.nin + 1:
        return None
    if not all(type(x) in _ARRAYS and x.flags.aligned for x in arrays) or not arrays[-1].size:
        return None
    dtypes = tuple(x.dtype for x in arrays)
    loop = OF_ELEMENTS[name](dtypes) if name in OF_ELEMENTS else loop_of(f, dtypes)
    if loop is None:
        return None
    return entry_on(tuple(arrays), name, is_exact(name, dtypes), loop, silenced)


def entry_on(arrays: tuple[Array, ...], name: str, exact: bool, loop: Loop, silenced: bool) -> Entry | None:
    """Return the entry that calls ``loop`` on ``arrays``; None if it must stay a Python call."""
    spans = tuple(map(_span, arrays))
    loops = _one_loop(arrays) or (_nest(arrays) if exact or name in OF_ELEMENTS else None)
    if loops is None or _overlaps(arrays, spans):
        return None
    return Entry(name, exact, loop, arrays, *loops, spans, silenced)


def _product(x: Array, y: Array, out: Array) -> Entry | None:
    """The product of two matrices as an entry."""
    arrays = x, y, out
    if not all(type(a) in _ARRAYS and a.flags.aligned and a.ndim == 2 and a.size for a in arrays):
        return None
    spans = tuple(map(_span, arrays))
    if not x.dtype == y.dtype == out.dtype or any(meet(span, spans[-1]) for span in spans[:-1]):
        return None
    loop, core = product_of(out.dtype), ((*x.shape, y.shape[1]), tuple(s for a in arrays for s in core_strides(a)))
    return None if loop is None else Entry("matmul", False, loop, arrays, (1,), ((0,),) * 3, spans, core=core)


def _sum(x: Array, axes: tuple[int, ...], dtype: Any, out: Array, keepdims: bool) -> Entry | None:
    """The sums of an array without gaps over its last axes, its first ones or all of them as an entry."""
    if not all(type(a) in _ARRAYS and a.flags.aligned and a.flags.c_contiguous for a in (x, out)):
        return None
    if type(axes) is not tuple or not x.size or not x.dtype == out.dtype == dtype or (x.ndim and not axes):
        return None
    kept, item = out.size, x.itemsize
    summed = x.size // kept
    loop = sum_of(dtype)
    core: Core = ((), ())
    loops: Loops = (summed,), ((item,), (0,))
    if kept > 1 and sorted(axes) == [*range(x.ndim - len(axes), x.ndim)]:
        loops = (kept, summed), ((summed * item, item), (item, 0))
    elif kept > 1 and sorted(axes) == [*range(len(axes))]:
        loops, core = ((kept,), ((item,), (item,))), ((summed,), (kept * item,))
    elif kept > 1:
        return None
    spans = _span(x), _span(out)
    return None if loop is None or meet(*spans) else Entry("reduce", False, loop, (x, out), *loops, spans, core=core)


Loops = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Sizes of nested loops, outermost first, and the strides of each array."""


def _one_loop(arrays: Sequence[Array]) -> Loops | None:
    """The one flat loop that NumPy would run over all arrays; None if there are several."""
    out = arrays[-1]
    strides = []
    for x in arrays:
        if not x.ndim and x is not out:
            strides.append(0)
        elif x.shape != out.shape or (x.ndim > 1 and not x.flags.c_contiguous):
            return None
        else:
            strides.append(x.strides[0] if x.ndim == 1 else x.itemsize)
    return (out.size,), tuple((s,) for s in strides)


def _nest(arrays: Sequence[Array]) -> Loops | None:
    """The fewest nested loops over all arrays, the innermost along the result's smallest stride; None: too many."""
    out = arrays[-1]
    every = [CPU.xp.broadcast_to(x, out.shape).strides for x in arrays]
    axes = sorted((a for a, n in enumerate(out.shape) if n > 1), key=lambda a: -abs(out.strides[a]))
    sizes, strides = merged([(out.shape[a], [s[a] for s in every]) for a in axes])
    return (tuple(sizes), tuple(zip(*strides, strict=True))) if 0 < len(sizes) <= _MOST_AXES else None


def _overlaps(arrays: Sequence[Array], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the result overlaps an operand but in the very same elements: then NumPy copies the operand."""
    out, (low, high) = arrays[-1], spans[-1]
    layout = lambda x: () if x.size == 1 else (x.strides, x.shape)
    return any(
        first < high and low < end and (first, layout(x)) != (low, layout(out))
        for x, (first, end) in zip(arrays[:-1], spans, strict=False)
    )


def _span(x: Array) -> tuple[int, int]:
    """The addresses of the first byte of an array and of the one behind its last."""
    at = cuda_types.address(x)
    if x.flags.c_contiguous:
        return at, at + x.nbytes
    reach = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return at + sum(r for r in reach if r < 0), at + sum(r for r in reach if r > 0) + x.itemsize
