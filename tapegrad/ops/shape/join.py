"""Joining, splitting, padding and rearranging along axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from operator import index
from typing import Any

from tapegrad.core.aval import normalize_axes, normalize_axis
from tapegrad.device import CPU, dtypes
from tapegrad.errors import DTypeError, IndexingError, ShapeError, TapegradError
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import barrier, cast, own, several, tensor
from tapegrad.ops.dispatch import stack as stack  # beside ``concat``
from tapegrad.ops.elementwise.arithmetic import clip, minimum, remainder
from tapegrad.ops.index.indexing import put_slice_p, take, take_p
from tapegrad.ops.shape.blocks import concat_p, slice_p, stretch, unslice_p
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, flat_or_along, reshape, shape_of
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, identity_of, upload
from tapegrad.variable import Variable


def concat(arrays: Sequence[TensorLike], axis: int | None = 0, *, dtype: DTypeLike | None = None) -> Tensor:
    """Tensors one after the other along ``axis`` (None: flattened first), in ``dtype`` if it is given.

    Raises ShapeError, AxisError.
    """
    parts = several("concat", arrays, dtype)
    if axis is None:
        parts, axis = tuple(reshape(x, (x.size,)) for x in parts), 0
    a = normalize_axis("concat", axis, parts[0].ndim)
    return barrier(concat_p, *parts, axis=a)


def unstack(x: TensorLike, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices of ``x`` along ``axis``, without it.  Raises AxisError."""
    x = tensor("unstack", x)
    return tuple(slices(x, normalize_axis("unstack", axis, x.ndim)))


_MOST_SLICES = 8


def slices(x: Tensor, axis: int = 0, backwards: bool = False) -> Iterator[Tensor]:
    """The slices of ``x`` along an axis, the first or (``backwards``) the last one first, cut from ever shorter parts.

    So their gradient, a sum of arrays that are zero but for a slice, takes ``n log n`` steps in place of ``n ** 2``.
    """
    n = x.shape[axis]
    whole = [(0, length, 1) for length in x.shape]
    before, after = whole[:axis], whole[axis + 1 :]
    if n <= _MOST_SLICES:
        for i in reversed(range(n)) if backwards else range(n):
            yield barrier(slice_p, x, index=(*before, i, *after))
        return
    part = _part(n)
    starts = range(0, n, part)
    for start in reversed(starts) if backwards else starts:
        piece = barrier(slice_p, x, index=(*before, (start, min(part, n - start), 1), *after))
        yield from slices(piece, axis, backwards)


def _part(n: int) -> int:
    """Return the largest power of ``_MOST_SLICES`` below ``n``."""
    part = _MOST_SLICES
    while part * _MOST_SLICES < n:
        part *= _MOST_SLICES
    return part


def _sections(x: Tensor, axis: int, bounds: list[int]) -> Iterator[Tensor]:
    """Yield the sections of ``x`` between adjacent ``bounds``, cut from ever shorter parts as in :func:`slices`."""
    n = len(bounds) - 1
    if n <= _MOST_SLICES or bounds != sorted(bounds):
        for p, q in pairwise(bounds):
            yield stretch(x, axis, p, max(0, q - p))
        return
    part = _part(n)
    for start in range(0, n, part):
        first, *rest = bounds[start : start + part + 1]
        piece = stretch(x, axis, first, rest[-1] - first)
        yield from _sections(piece, axis, [0, *(bound - first for bound in rest)])


def split(ary: TensorLike, indices_or_sections: object, axis: int = 0) -> tuple[Tensor, ...]:
    """``ary`` cut along ``axis`` into equal sections, or before each of the given positions (NumPy's ``split``).

    Raises AxisError, and ShapeError if equal sections do not come out even.
    """
    ary, cuts = tensor("split", ary), _cuts(indices_or_sections)
    a = normalize_axis("split", axis, ary.ndim)
    if isinstance(cuts, int) and (cuts < 1 or ary.shape[a] % cuts):
        raise ShapeError(f"split: axis {a} of {ary.shape} does not divide into {cuts} equal parts; use array_split")
    return array_split(ary, cuts, axis=a)


def _cuts(given: Any) -> int | list[int]:
    """Return a number of sections, or the positions at which to cut."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(map(index, given)) if isinstance(given, Iterable) else index(given)


def array_split(ary: TensorLike, indices_or_sections: Any, axis: int = 0) -> tuple[Tensor, ...]:
    """As :func:`split`, but sections may be unequal: the first ones are longer by 1.  Raises AxisError, ShapeError."""
    ary, cuts = tensor("array_split", ary), _cuts(indices_or_sections)
    a = normalize_axis("array_split", axis, ary.ndim)
    n = ary.shape[a]
    if isinstance(cuts, int):
        if cuts < 1:
            raise ShapeError(f"array_split: {cuts} sections; needs at least 1")
        each, more = divmod(n, cuts)
        bounds = [i * each + min(i, more) for i in range(cuts + 1)]
    else:
        bounds = [0, *(slice(i).indices(n)[1] for i in cuts), n]
    return tuple(own(section, ary) for section in _sections(ary, a, bounds))


def flip(m: TensorLike, axis: int | Sequence[int] | None = None) -> Tensor:
    """The order along ``axis`` (None: all) reversed: a view.  Raises AxisError."""
    m = tensor("flip", m)
    axes = normalize_axes("flip", axis, m.ndim)
    index = tuple((n - 1, n, -1) if i in axes and n > 1 else (0, n, 1) for i, n in enumerate(m.shape))
    return barrier(slice_p, m, index=index) if axes else identity_of(m)


def roll(a: TensorLike, shift: TensorLike | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Return ``a`` with its elements moved by ``shift`` places along ``axis``, around the end.

    shift, axis: a number or several, which broadcast; shifts of an axis that is named twice add up.  axis None: in the
    flattened array, by one shift.  A shift may be a tensor of integers: its value is not read, so ``vmap`` may map it.
    Raises AxisError, DTypeError, and ShapeError if the numbers of shifts and axes differ.
    """
    a = source = tensor("roll", a)
    if axis is None:
        return reshape(roll(reshape(a, (a.size,)), shift, axis=(0,)), source.shape)
    axes = [normalize_axis("roll", dim, a.ndim) for dim in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    shifts = _shifts(shift)
    if len(shifts) != len(axes):
        if 1 not in (len(shifts), len(axes)):
            raise ShapeError(f"roll: {len(shifts)} shifts for {len(axes)} axes")
        shifts, axes = shifts * len(axes), axes * len(shifts)
    for s, dim in zip(shifts, axes, strict=True):
        n = a.shape[dim]
        if not n:
            continue
        if isinstance(s, Tensor):
            a = barrier(take_p, a, remainder(arange(n, device=a.device) - s, n), axis=dim)
        elif by := s % n:
            a = barrier(concat_p, stretch(a, dim, n - by, by), stretch(a, dim, 0, n - by), axis=dim)
    return own(a, source)


def _shifts(shift: TensorLike | Sequence[int]) -> list[int | Tensor]:
    """Return each shift: an int, or a tensor where its value is not known to the host."""
    if isinstance(shift, (tuple, list)):
        return [one for s in shift for one in _shifts(s)]
    if isinstance(shift, Integral):
        return [int(shift)]
    values = tensor("roll", shift)
    if values.dtype.kind not in "iu":
        raise DTypeError(f"roll: shifts must be integers, got {values.dtype}")
    if values.ndim > 1:
        raise ShapeError(f"roll: shifts of shape {values.shape}; give a number or one for each axis")
    if not isinstance(shift, (Tensor, Variable)):
        return [int(s) for s in values.numpy().ravel()]
    return [values] if not values.ndim else [values[i] for i in range(values.shape[0])]


def tile(A: TensorLike, reps: Any) -> Tensor:
    """``A`` laid side by side ``reps`` times along each dimension (missing ones in front are 1)."""
    A = tensor("tile", A)
    times = shape_of(reps)
    ndim = max(A.ndim, len(times))
    times = (1,) * (ndim - len(times)) + times
    shape = (1,) * (ndim - A.ndim) + A.shape
    if any(t < 0 for t in times):
        raise ShapeError(f"tile: negative repetitions {times}")
    apart = reshape(A, tuple(m for n in shape for m in (1, n)))
    wide = broadcast_to(apart, tuple(m for t, n in zip(times, shape, strict=True) for m in (t, n)))
    return reshape(wide, tuple(t * n for t, n in zip(times, shape, strict=True)))


def repeat(a: TensorLike, repeats: Any, axis: int | None = None) -> Tensor:
    """Each element ``repeats`` times in a row along ``axis`` (None: of the flattened array).

    repeats: one integer, or one for each position.  Raises AxisError, IndexingError, ShapeError.
    """
    a = tensor("repeat", a)
    a, dim = flat_or_along("repeat", a, axis)
    n = a.shape[dim]
    if isinstance(repeats, Integral):
        times = int(repeats)
        if times < 0:
            raise ShapeError(f"repeat: negative number of repeats {times}")
        apart = expand_dims(a, dim + 1)
        wide = broadcast_to(apart, (*apart.shape[: dim + 1], times, *apart.shape[dim + 2 :]))
        return reshape(wide, (*a.shape[:dim], n * times, *a.shape[dim + 1 :]))
    counts = tensor("repeat", repeats)
    if not dtypes.is_integer(counts.dtype):
        raise IndexingError(f"repeat: repeats must be integers, got {counts.dtype}")
    numbers = counts.numpy()  # their sum is the result's length, so they are needed on the host
    if counts.size not in (1, n) or counts.ndim > 1 or (counts.size and int(numbers.min()) < 0):
        raise ShapeError(f"repeat: repeats of shape {counts.shape} must be {n} numbers, none negative, for {a.shape}")
    places = CPU.xp.repeat(CPU.xp.arange(n), CPU.xp.broadcast_to(numbers, (n,)))
    return take(a, upload(places, a.device, copy=False), axis=dim)


def padded(
    x: Tensor, widths: Sequence[tuple[int, int]], mode: str = "constant", constant_values: TensorLike = 0
) -> Tensor:
    """``x`` with elements around it: one number, or (``edge``, ``reflect``, ``symmetric``, ``wrap``) its own again.

    widths: before and after, for each dimension.  Raises ShapeError.
    """
    if mode != "constant":
        return _pad_from_inside(x, widths, mode)
    if not any(map(any, widths)):
        return identity_of(x)
    shape = tuple(b + n + e for (b, e), n in zip(widths, x.shape, strict=True))
    index = tuple((b, n, 1) for (b, _), n in zip(widths, x.shape, strict=True))
    if isinstance(constant_values, (int, float, complex)) and constant_values == 0:
        return barrier(unslice_p, x, shape=shape, index=index)
    around = cast(tensor("pad", constant_values), x.dtype)
    if around.size != 1:
        raise ShapeError(f"pad: constant_values must be one number, got shape {around.shape}")
    return barrier(put_slice_p, broadcast_to(reshape(around, ()), shape), x, index=index)


def _pad_from_inside(x: Tensor, widths: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Each padded dimension read again at places inside it."""
    source = x
    for a, (before, after) in enumerate(widths):
        n = x.shape[a]
        if not before and not after:
            continue
        if n == 0:
            raise ShapeError(f"pad: axis {a} of {x.shape} is empty: mode {mode!r} has nothing to repeat")
        x = take(x, _places(arange(-before, n + after, device=x.device), n, mode), axis=a)
    return own(x, source)


def _places(at: Tensor, n: int, mode: str) -> Tensor:
    """Which of ``n`` positions stands at position ``at`` of the padded axis."""
    if mode == "edge":
        return clip(at, 0, n - 1)
    if mode == "wrap":
        return at % n
    if mode == "symmetric":
        return minimum(at % (2 * n), 2 * n - 1 - at % (2 * n))
    if mode == "reflect":
        period = max(1, 2 * n - 2)
        return minimum(at % period, period - at % period)
    raise TapegradError(f"pad: mode {mode!r} is not one of constant, edge, reflect, symmetric, wrap")
