"""How a region's arrays lie under a CUDA kernel's loop, and the loop's dimensions: what decides a kernel's form.

A kernel walks linear indices of the loop's shape, ``VEC`` neighbours at a time (a *pack*).  Whether packs may be used,
and how each leaf is read, is settled here, from shapes, strides and addresses; the text depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tapegrad.core.aval import Shape
from tapegrad.device import cuda_types

VALUE, ONE, PACK, EACH, ROW, LINE, SAME, STRIDED = "value", "one", "pack", "each", "row", "line", "same", "strided"
RESULT = "result"
"""How a leaf is read.  VALUE: it is a kernel argument; ONE: all elements are one place in memory; PACK: contiguous and
aligned, one 16-byte load; EACH: contiguous at an odd address; with the index taken apart into dimensions: ROW: a pack
lies in one row whose elements are neighbours and aligned (one load), LINE: in one row of any stride, SAME: all of a
pack is one element, STRIDED: none of these, each element finds its own place.  RESULT: only what follows a reduction
reads it, at the place of the result."""
BY_DIMS = (ROW, LINE, SAME, STRIDED)
"""The kinds whose dimensions and strides are arguments."""

WIDE_INDEX = 2**30  # the loop variable may run a whole grid past the end


@dataclass(frozen=True)
class Loop:
    """The loop of one kernel.

    ``kept`` and ``reduced``: lengths and linear strides of the merged dimensions that stay or are reduced, outermost
    first; ``dims`` and ``strides``: the merged dimensions by which leaves read by strides find their places, and for
    each such leaf (by its number) its strides.
    """

    size: int
    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    dims: Shape
    strides: dict[int, tuple[int, ...]]
    vec: int
    wide: bool

    @property
    def reads(self) -> int:
        """How many elements each result is made of."""
        return prod(n for n, _ in self.reduced)

    @property
    def writes(self) -> int:
        """How many results there are."""
        return prod(n for n, _ in self.kept)

    @property
    def by_columns(self) -> bool:
        """Whether neighbours in memory belong to different results."""
        return bool(self.kept) and (not self.reduced or self.kept[-1][1] < self.reduced[-1][1])


def loop_of(
    shape: Shape, axes: tuple[int, ...] | None, leaves: list[Any], outputs: list[Any], by_four: bool = False
) -> tuple[Loop, list[str]]:
    """The loop over ``shape`` reducing ``axes`` (None: nothing), and how each leaf is read.

    ``outputs``: those of full size; ``by_four``: packs have four elements whatever their size.
    """
    size = prod(shape)
    kinds = [_kind(x, shape) for x in leaves]
    numbers = [i for i, kind in enumerate(kinds) if kind == STRIDED]
    dims, strides = _merge(shape, {i: _strides(leaves[i], shape) for i in numbers})
    kept, reduced = _split(shape, axes or ())
    vec = 4 if by_four and axes is None else _vec(leaves, outputs, kinds, None if axes is None else (*kept, *reduced))
    inner = dims[-1] if dims else 1
    for i in numbers:
        kinds[i] = _by_dims(leaves[i], strides[i], inner, vec)
    contiguous = [i for i, kind in enumerate(kinds) if kind == PACK]
    for i in contiguous:
        kinds[i] = PACK if _aligned(leaves[i], vec) else EACH
    reach = max([size, *(sum(abs(s) * (n - 1) for s, n in zip(strides[i], dims)) for i in numbers)])
    return Loop(size, kept, reduced, dims, strides, vec, reach >= WIDE_INDEX), kinds


def kind_of_late(x: Any) -> str:
    """How a leaf is read that only what follows a reduction reads."""
    if cuda_types.is_argument(x):
        return VALUE
    return ONE if x.size == 1 else RESULT


def _kind(x: Any, shape: Shape) -> str:
    if cuda_types.is_argument(x):
        return VALUE
    if x.size == 1 or not any(x.strides):
        return ONE
    return PACK if x.shape == shape and x.flags.c_contiguous else STRIDED


def _strides(x: Any, shape: Shape) -> list[int]:
    """Strides in elements under the loop's shape, 0 where the leaf is broadcast."""
    missing = len(shape) - x.ndim
    own = [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides)]
    return [0] * missing + own


def _merge(shape: Shape, strides: dict[int, list[int]]) -> tuple[Shape, dict[int, tuple[int, ...]]]:
    """Neighbouring dimensions as one where every leaf allows it; those of length 1 vanish."""
    dims: list[int] = []
    merged: dict[int, list[int]] = {i: [] for i in strides}
    for d, n in enumerate(shape):
        if n == 1:
            continue
        if dims and all(merged[i][-1] == s[d] * n for i, s in strides.items()):
            dims[-1] *= n
            for i, s in strides.items():
                merged[i][-1] = s[d]
        else:
            dims.append(n)
            for i, s in strides.items():
                merged[i].append(s[d])
    return tuple(dims), {i: tuple(s) for i, s in merged.items()}


def _split(shape: Shape, axes: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Kept and reduced dimensions with their linear strides, neighbours of one fate merged."""
    kept: list[tuple[int, int]] = []
    reduced: list[tuple[int, int]] = []
    stride, before = prod(shape), None
    for d, n in enumerate(shape):
        stride //= max(n, 1)
        if n == 1:
            continue
        fate = reduced if d in axes else kept
        if fate is before:
            fate[-1] = (fate[-1][0] * n, stride)
        else:
            fate.append((n, stride))
        before = fate
    return tuple(kept), tuple(reduced)


def _vec(leaves: list[Any], outputs: list[Any], kinds: list[str], reducing: tuple[Any, ...] | None) -> int:
    """Elements of a pack: 16 bytes of the widest array.  In a reduction always 4, so that order depends on shape alone.

    A reduction whose runs of neighbours are no multiple of 4, or whose outputs are not aligned, goes one by one.
    """
    arrays = [x for x, kind in zip(leaves, kinds) if kind not in (VALUE, ONE)] + outputs
    if reducing is None:
        return 16 // max([x.itemsize for x in arrays], default=4)
    run = min((n for n, stride in reducing if stride == 1), default=1)
    return 4 if run % 4 == 0 and all(_aligned(x, 4) for x in outputs) else 1


def _aligned(x: Any, vec: int) -> bool:
    return cuda_types.address(x) % min(16, vec * x.itemsize) == 0


def _by_dims(x: Any, strides: tuple[int, ...], inner: int, vec: int) -> str:
    if inner % vec or vec == 1:
        return STRIDED
    if strides[-1] == 1 and all(s % vec == 0 for s in strides[:-1]) and _aligned(x, vec):
        return ROW
    return LINE if strides[-1] else SAME
