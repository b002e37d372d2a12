"""Elements put, deleted and inserted: NumPy's functions that change an array in place give a new tensor here."""

from __future__ import annotations

import math
from typing import Any

from tapegrad.core.aval import Shape, normalize_axis
from tapegrad.device import CPU, dtypes
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.ops.create.creation import arange, asarray, zeros
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.ops.elementwise.arithmetic import maximum, minimum, remainder
from tapegrad.ops.elementwise.comparison import not_equal
from tapegrad.ops.elementwise.selection import nonzero
from tapegrad.ops.index.bounds import checked
from tapegrad.ops.index.getitem import At
from tapegrad.ops.index.indexing import take
from tapegrad.ops.shape.join import concat, tile
from tapegrad.ops.shape.shape import broadcast_to, flat_or_along, moveaxis, reshape, shape_of
from tapegrad.tensor import Tensor, TensorLike, identity_of

__all__ = ["append", "delete", "insert", "place", "put", "put_along_axis", "putmask", "resize", "scatter_add"]


def _repeated(values: Tensor, count: int) -> Tensor:
    """The flattened values over and over, ``count`` in all."""
    flat = reshape(values, (values.size,))
    if flat.size >= count:
        return flat[:count]
    return tile(flat, -(-count // flat.size))[:count]


def _with_flat(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``x`` with ``values`` at flat positions."""
    if not places.size:
        return identity_of(x)
    return reshape(At(reshape(x, (x.size,)))[places].set(values), x.shape)


def put(a: TensorLike, ind: TensorLike, v: TensorLike, mode: str = "raise") -> Tensor:
    """``a`` with elements at flat positions ``ind`` set to ``v``, repeated as needed: a new tensor.

    A position named twice gets the last value.  mode: positions out of range ``raise``, ``wrap`` or ``clip``.
    Gradients pass to ``a`` elsewhere and to ``v``.  Raises IndexingError.
    """
    x = tensor("put", a)
    places = tensor("put", ind, x)
    values = cast(tensor("put", v, x), x.dtype)
    if mode not in ("raise", "wrap", "clip"):
        raise TapegradError(f"put: mode {mode!r} is not one of raise, wrap, clip")
    if not dtypes.is_integer(places.dtype) and places.size:
        raise IndexingError(f"put: positions must be integers, got {places.dtype}")
    places = reshape(cast(places, dtypes.int64), (places.size,))
    if mode == "wrap" and x.size:
        places = remainder(places, x.size)
    elif mode == "clip":
        places = minimum(maximum(places, 0), x.size - 1)
    places = checked("put", places, x.size, x)
    return _with_flat(x, places, _repeated(values, places.size)) if values.size else identity_of(x)


def put_along_axis(arr: TensorLike, indices: TensorLike, values: TensorLike, axis: int | None) -> Tensor:
    """``arr`` with the elements that ``take_along_axis`` would take set to ``values``, which broadcast: a new tensor.

    axis None: of the flattened array.  Gradients pass to ``arr`` elsewhere and to ``values``.  Raises AxisError,
    IndexingError, ShapeError.
    """
    x = tensor("put_along_axis", arr)
    places = tensor("put_along_axis", indices, x)
    if axis is None:
        flat = put_along_axis(reshape(x, (x.size,)), places, values, 0)
        return reshape(flat, x.shape)
    a = normalize_axis("put_along_axis", axis, x.ndim)
    if places.ndim != x.ndim:
        raise ShapeError(f"put_along_axis: indices of shape {places.shape} for {x.shape}: as many dimensions")
    places = checked("put_along_axis", places, x.shape[a], x)
    shape = tuple(places.shape[i] if i == a else n for i, n in enumerate(x.shape))
    return At(x)[_grid(broadcast_to(places, shape), shape, a)].set(values)


def _grid(places: Tensor, shape: Shape, a: int) -> tuple[Tensor, ...]:
    """The index of an element for each of ``places`` (``shape``): ``places`` along axis ``a``, their own elsewhere."""
    return tuple(
        places if i == a else reshape(arange(n, device=places.device), (n,) + (1,) * (len(shape) - 1 - i))
        for i, n in enumerate(shape)
    )


def scatter_add(input: TensorLike, dim: int, index: TensorLike, src: TensorLike) -> Tensor:
    """``input`` with each element of ``src`` added where ``index`` says along ``dim`` (PyTorch's ``scatter_add``).

    index: of as many dimensions as ``input``, no longer than ``src`` in any; repeated ones accumulate.  Differentiable
    in ``input`` and ``src``.  Raises AxisError, IndexingError, ShapeError.
    """
    x, y = promote("scatter_add", (input, src))
    a = normalize_axis("scatter_add", dim, x.ndim)
    places = tensor("scatter_add", index, x)
    if places.ndim != x.ndim or y.ndim != x.ndim or any(m > n for m, n in zip(places.shape, y.shape, strict=True)):
        raise ShapeError(f"scatter_add: indices {places.shape} and source {y.shape} do not fit an array {x.shape}")
    places = checked("scatter_add", places, x.shape[a], x)
    return At(x)[_grid(places, places.shape, a)].add(y[tuple(slice(n) for n in places.shape)])


def _places(op: str, mask: TensorLike, x: Tensor) -> Tensor:
    """Flat positions where the mask of the size of ``x`` is not 0."""
    t = tensor(op, mask, x)
    if t.size != x.size:
        raise ShapeError(f"{op}: a mask of shape {t.shape} for an array of shape {x.shape}")
    t = t if t.dtype == dtypes.bool_ else not_equal(t, 0)
    return nonzero(reshape(t, (t.size,)))[0]


def place(arr: TensorLike, mask: TensorLike, vals: TensorLike) -> Tensor:
    """``arr`` with the elements where ``mask`` is not 0 set to the first of ``vals``, repeated as needed: a new tensor.

    The mask is evaluated.  Gradients pass to ``arr`` elsewhere and to ``vals``.  Raises ShapeError.
    """
    x = tensor("place", arr)
    places, values = _places("place", mask, x), cast(tensor("place", vals, x), x.dtype)
    if places.size and not values.size:
        raise ShapeError("place: no values to put where the mask is not 0")
    return _with_flat(x, places, _repeated(values, places.size))


def putmask(a: TensorLike, mask: TensorLike, values: TensorLike) -> Tensor:
    """``a`` with the elements where ``mask`` is not 0 set to those of ``values`` at the same position: a new tensor.

    values: repeated to the size of ``a``.  Gradients pass to ``a`` elsewhere and to ``values``.  Raises ShapeError.
    """
    x = tensor("putmask", a)
    places, v = _places("putmask", mask, x), cast(tensor("putmask", values, x), x.dtype)
    if not places.size or not v.size:
        return identity_of(x)
    return _with_flat(x, places, take(_repeated(v, x.size), places, axis=0))


def append(arr: TensorLike, values: TensorLike, axis: int | None = None) -> Tensor:
    """``values`` after ``arr`` along ``axis`` (None: both flattened first).  Raises ShapeError, AxisError."""
    return concat([arr, values], axis=axis)


def resize(a: TensorLike, new_shape: int | tuple[int, ...] | list[int]) -> Tensor:
    """The elements in C order, repeated or cut to fill ``new_shape``; zeros if there are none.  Raises ShapeError."""
    x = tensor("resize", a)
    shape = shape_of(new_shape)
    if any(n < 0 for n in shape):
        raise ShapeError(f"resize: negative lengths in {shape}")
    count = math.prod(shape)
    if not x.size or not count:
        return zeros(shape, dtype=x.dtype, device=x.device)
    return reshape(_repeated(x, count), shape)


def _host_indices(op: str, obj: Any, n: int) -> Any:
    """The positions that ``obj`` (slice, integer, integers, mask) names, on the host: lengths depend on them."""
    if isinstance(obj, slice):
        return CPU.xp.arange(*obj.indices(n))
    array = obj.numpy() if isinstance(obj, Tensor) or hasattr(obj, "ref") else CPU.xp.asarray(obj)
    if array.dtype.kind == "b":
        if array.shape != (n,):
            raise ShapeError(f"{op}: a mask of shape {array.shape} for an axis of length {n}")
        return array.nonzero()[0]
    if array.dtype.kind not in "iu" and array.size:
        raise IndexingError(f"{op}: positions must be integers, got {array.dtype}")
    return array.astype("int64")


def _in_range(op: str, places: Any, n: int, most: int) -> Any:
    for k in places.reshape(-1).tolist():
        if not -n <= k <= most:
            raise IndexingError(f"{op}: index {k} is out of range for an axis of length {n}")
    return places


def delete(arr: TensorLike, obj: object, axis: int | None = None) -> Tensor:
    """``arr`` without the slices that ``obj`` (slice, integer, integers, mask) names along ``axis`` (None: flattened).

    What is deleted has gradient 0.  Raises AxisError, IndexingError.
    """
    x, a = flat_or_along("delete", tensor("delete", arr), axis)
    n = x.shape[a]
    gone = _in_range("delete", _host_indices("delete", obj, n), n, n - 1)
    kept = CPU.xp.ones(n, bool)
    kept[gone.reshape(-1)] = False
    return take(x, asarray(kept.nonzero()[0], device=x.device), axis=a)


def insert(arr: TensorLike, obj: object, values: TensorLike, axis: int | None = None) -> Tensor:
    """``arr`` with ``values`` inserted before the positions ``obj`` (counted in ``arr``) along ``axis``.

    axis None: both flattened.  Differentiable in ``arr`` and ``values``, which are cast to the dtype of ``arr`` and
    broadcast.  Raises AxisError, IndexingError, ShapeError.
    """
    x, a = flat_or_along("insert", tensor("insert", arr), axis)
    n = x.shape[a]
    places = _in_range("insert", _host_indices("insert", obj, n), n, n)
    v = cast(tensor("insert", values, x), x.dtype)
    if places.size == 1 and not (isinstance(obj, slice) or places.ndim):  # as in NumPy, a lone number inserts all
        v = moveaxis(reshape(v, (1,) * (x.ndim - v.ndim) + v.shape) if v.ndim < x.ndim else v, 0, a)
    elif v.ndim < x.ndim:
        v = reshape(v, (1,) * (x.ndim - v.ndim) + v.shape)
    flat = places.reshape(-1)
    if flat.size == 1:
        flat = CPU.xp.repeat(flat, v.shape[a])
    flat = CPU.xp.where(flat < 0, flat + n, flat)
    shape = tuple(flat.size if i == a else m for i, m in enumerate(x.shape))
    v = broadcast_to(v, shape)
    new = flat[(order := CPU.xp.argsort(flat, kind="stable"))] + CPU.xp.arange(flat.size)
    source = CPU.xp.full(n + flat.size, -1)
    source[new] = n + order
    source[source < 0] = CPU.xp.arange(n)
    return take(concat([x, v], axis=a), asarray(source, device=x.device), axis=a)
