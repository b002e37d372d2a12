"""Making tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index

from tapegrad.core.aval import Shape, shaped
from tapegrad.core.state import thread
from tapegrad.device import CPU, Device, asdevice, current_device, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.engine.lowering import Function
from tapegrad.errors import DomainError, ShapeError
from tapegrad.ops.dispatch import asarray, cast, own, tensor
from tapegrad.ops.shape.blocks import reshaped
from tapegrad.ops.shape.shape import broadcast_to, shape_of
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


def constant(
    value: TensorLike, dtype: DTypeLike | None = None, shape: Sequence[int] | int | None = None, name: str | None = None
) -> Tensor:
    """A tensor of ``value`` (TensorFlow's ``constant``); see :func:`asarray`.

    shape: that of the result, if not that of ``value``, which has as many elements, or one for all.  ``name``: ignored,
    as in TensorFlow's eager mode.  Raises ShapeError.
    """
    t = asarray(value, dtype=dtype)
    if shape is None:
        return t
    lengths = shape_of(shape)
    if t.size not in (1, math.prod(lengths)):
        raise ShapeError(f"constant: a value of shape {t.shape} has {t.size} elements, too few or many for {lengths}")
    return own(reshaped(t, lengths) if t.size == math.prod(lengths) else broadcast_to(reshaped(t, ()), lengths), t)


def tensor_of(
    data: TensorLike, dtype: DTypeLike | None = None, *, device: Device | str | None = None
) -> Tensor:  # fmt: skip
    """A new tensor of the value of ``data`` (tensor, variable, array, number, nested sequence); see :func:`asarray`.

    The public name is ``tensor``, as PyTorch's; where that cuts the gradient from ``data``, this passes it.  Raises
    NotATensorError, DTypeError, DeviceError.
    """
    return asarray(data, dtype=dtype, device=device, copy=True)


def _made(
    name: str, shape: Shape, dtype: DType, device: Device, call: Callable[..., object], given: bool = True,
    reads: Sequence[Array] = (),
) -> Tensor:  # fmt: skip
    """The tensor that ``call`` writes into an array (``given``), or returns; ``reads`` are its other arguments."""
    task = Function(name, [shaped(shape, dtype, device)], call, reads, given=given, is_kernel=False)
    return Tensor(thread.executor.values(task)[0])


def full(
    shape: int | Sequence[int], fill_value: TensorLike, dtype: DTypeLike | None = None, *,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """A tensor filled with one number, or with a tensor or array broadcast to ``shape``, which gets its gradient.

    Raises ShapeError.
    """
    lengths = shape_of(shape)
    if isinstance(fill_value, Tensor) or bool(getattr(fill_value, "ndim", False)) or hasattr(fill_value, "ref"):
        value = asarray(fill_value, dtype=dtype, device=device)
        return broadcast_to(value, lengths)
    where = current_device() if device is None else asdevice(device)
    out_dtype = where.array(fill_value).dtype if dtype is None else dtypes.asdtype(dtype)
    if where.lazy:
        return _made("full", lengths, out_dtype, where, lambda out: out.__setitem__(..., fill_value))
    number = where.empty((), out_dtype)
    number[...] = fill_value
    return _made("full", lengths, out_dtype, where, where.xp.copyto, reads=(number,))


def zeros(shape: int | Sequence[int], dtype: DTypeLike | None = None, *, device: Device | str | None = None) -> Tensor:
    """Zeros; dtype None: the default dtype."""
    return full(shape, 0, dtype=dtypes.asdtype(dtype), device=device)


def ones(shape: int | Sequence[int], dtype: DTypeLike | None = None, *, device: Device | str | None = None) -> Tensor:
    """Ones; dtype None: the default dtype."""
    return full(shape, 1, dtype=dtypes.asdtype(dtype), device=device)


def empty(shape: int | Sequence[int], dtype: DTypeLike | None = None, *, device: Device | str | None = None) -> Tensor:
    """A tensor whose values do not matter: zeros, since a tensor never changes."""
    return zeros(shape, dtype=dtype, device=device)


def empty_like(
    x: TensorLike, dtype: DTypeLike | None = None, *, device: Device | str | None = None,
    shape: int | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """A tensor of the shape and dtype of ``x`` whose values do not matter: zeros; see :func:`empty`."""
    return zeros_like(x, dtype=dtype, device=device, shape=shape)


def full_like(
    a: TensorLike, fill_value: TensorLike, dtype: DTypeLike | None = None, *, device: Device | str | None = None,
    shape: int | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """A tensor of the shape (but for ``shape``) and dtype (but for ``dtype``) of ``a`` filled with one number."""
    a = tensor("full_like", a)
    lengths = a.shape if shape is None else shape
    return full(lengths, fill_value, dtype=a.dtype if dtype is None else dtype, device=device or a.device)


def zeros_like(
    a: TensorLike, dtype: DTypeLike | None = None, *, device: Device | str | None = None,
    shape: int | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Zeros of the shape and dtype of ``a``; see :func:`full_like`."""
    return full_like(a, 0, dtype=dtype, device=device, shape=shape)


def ones_like(
    a: TensorLike, dtype: DTypeLike | None = None, *, device: Device | str | None = None,
    shape: int | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Ones of the shape and dtype of ``a``; see :func:`full_like`."""
    return full_like(a, 1, dtype=dtype, device=device, shape=shape)


def arange(
    start: float, stop: float | None = None, step: float = 1, dtype: DTypeLike | None = None, *,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """Return evenly spaced numbers from ``start`` (or 0) up to, not including, ``stop``.  Raises DomainError."""
    where = current_device() if device is None else asdevice(device)
    if stop is None:
        start, stop = 0, start
    if dtype is None:
        kind = CPU.array([start, stop, step]).dtype
        out_dtype = dtypes.of_python(kind.kind, kind)
    else:
        out_dtype = dtypes.asdtype(dtype)
    if not step:
        raise DomainError(f"arange: a step of 0 from {start} to {stop}; give one of another size")
    count = max(0, math.ceil((stop - start) / step))

    def make() -> list[Array]:
        array = where.xp.arange(start, stop, step, dtype=None if dtype is None else out_dtype)
        return [array.astype(out_dtype, copy=False)]

    return _made("arange", (count,), out_dtype, where, make, given=False)


def spaced(
    start: TensorLike, stop: TensorLike, num: int, dtype: DTypeLike | None, device: Device | str | None, endpoint: bool
) -> Tensor:
    """``num`` evenly spaced numbers from the number ``start`` to ``stop``; dtype None: the default dtype."""
    where = current_device() if device is None else asdevice(device)
    out_dtype = dtypes.asdtype(dtype)
    make = lambda: [where.xp.linspace(start, stop, num, endpoint=endpoint, dtype=out_dtype)]
    return _made("linspace", (num,), out_dtype, where, make, given=False)


def eye(
    N: int, M: int | None = None, k: int = 0, dtype: DTypeLike | None = None, *,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """Ones on diagonal ``k`` (positive: above the main one), zeros elsewhere."""
    where = current_device() if device is None else asdevice(device)
    out_dtype = dtypes.asdtype(dtype)
    rows, columns, k = index(N), index(N if M is None else M), index(k)

    def write(out: Array) -> None:
        out.fill(0)
        first = k if k >= 0 else -k * columns
        count = min(rows, columns - k) if k >= 0 else min(rows + k, columns)
        if count > 0:
            out.reshape(-1)[first : first + (count - 1) * (columns + 1) + 1 : columns + 1] = 1

    return _made("eye", (rows, columns), out_dtype, where, write)


def astype(x: TensorLike, dtype: DTypeLike, *, copy: bool = True, device: Device | str | None = None) -> Tensor:
    """``x`` in another dtype, on ``device`` if given; the gradient is cast back to that of ``x``.

    copy: accepted for the array API standard, and ignored, since tensors never change.  Raises
    DTypeError for a complex ``x`` and a real ``dtype``, DeviceError.
    """
    source = tensor("astype", x)
    out = own(cast(source, dtypes.asdtype(dtype)), source)
    return out if device is None else out.to_device(device)


__all__ = [
    "arange", "asarray", "astype", "constant", "empty", "empty_like", "eye", "full", "full_like",
    "ones", "ones_like", "zeros", "zeros_like",
]  # fmt: skip
