"""Making tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import shaped
from tapegrad.core.buffer import in_room
from tapegrad.device import CPU, Device, asdevice, cuda_index, current_device, dtypes, phantom
from tapegrad.ops.dispatch import SCALARS, cast, own, tensor
from tapegrad.tensor import Tensor, convert, device_of, from_array
from tapegrad.variable import Variable

_MIB = 2**20


def asarray(x: Any, /, dtype: Any = None, *, device: Any = None, copy: bool | None = None) -> Tensor:
    """``x`` (tensor, variable, array, number, nested sequence) as a tensor.

    Arrays are copied unless ``copy=False``, and keep their dtype; Python floats become float32, integers int64.  A
    tensor that has the wanted dtype and device is returned as it is, unless ``copy=True``; of a variable each reading
    is a value of its own.  A sequence that holds tensors is stacked, with gradients.  Raises NotATensorError,
    DTypeError, DeviceError, and ValueError where ``copy=False`` cannot be kept (another dtype or device, numbers).

    An array that is shared (``copy=False``) must not change while the tensor is in use.  A budget that makes values
    again from it compares its checksum, and raises RecomputeError if it has changed.
    """
    wanted = None if dtype is None else dtypes.asdtype(dtype)
    if copy is False:
        _check_shareable(x, wanted, device)
    if isinstance(x, (Tensor, Variable)):
        given = found = convert(x)
        if device is not None and asdevice(device) is not found.device:
            found = found.to_device(device)
        if wanted is not None:
            found = cast(found, wanted)
        return own(found, given) if copy or given is not x else found
    if isinstance(x, (list, tuple)) and _holds_tensor(x):
        from tapegrad.ops.shape.join import stack

        found = stack([asarray(item, dtype=dtype, device=device) for item in x])
        return found if wanted is None else cast(found, wanted)
    where = device_of(x) if device is None else asdevice(device)
    return from_array(where.array(x, wanted, copy=copy is not False), where, shared=copy is False)


def _check_shareable(x: Any, dtype: Any, device: Any) -> None:
    """Raises ValueError where ``x`` cannot become a tensor of ``dtype`` on ``device`` without a copy."""
    ours = isinstance(x, (Tensor, Variable))
    has = None if isinstance(x, SCALARS) else getattr(x, "dtype", None)
    if has is None:
        why = f"{type(x).__name__} is no array"
    elif dtype is not None and has != dtype:
        why = f"it is of dtype {has}, not {dtype}"
    else:
        lies = x.device if ours else _home(x)
        target = asdevice(device) if device is not None else lies if ours else current_device()
        why = "" if target is lies or (device is None and lies is not CPU) else f"it lies on {lies}, not on {target}"
    if why:
        raise ValueError(f"asarray: this takes a copy ({why}); leave out copy=False")


def _home(x: Any) -> Device:
    """Where an array that is no tensor lies."""
    index = cuda_index(x)
    return CPU if index is None else asdevice(f"cuda:{index}")


def constant(x: Any, dtype: Any = None) -> Tensor:
    """A tensor of ``x``'s value (TensorFlow's ``constant``); see :func:`asarray`."""
    return asarray(x, dtype=dtype)


def _holds_tensor(x: Sequence[Any]) -> bool:
    return any(
        isinstance(item, (Tensor, Variable)) or (isinstance(item, (list, tuple)) and _holds_tensor(item)) for item in x
    )


def _made(array: Any, device: Device) -> Tensor:
    return from_array(array, device)


def full(shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, device: Any = None) -> Tensor:
    """A tensor filled with one number, or with a tensor or array broadcast to ``shape``, which gets its gradient.

    Raises ShapeError.
    """
    if isinstance(fill_value, Tensor) or bool(getattr(fill_value, "ndim", False)) or hasattr(fill_value, "ref"):
        from tapegrad.ops.shape.shape import broadcast_to  # built on this file

        value = asarray(fill_value, dtype=dtype, device=device)
        lengths: Any = shape if isinstance(shape, (tuple, list)) else (shape,)
        return broadcast_to(value, tuple(lengths))
    where = current_device() if device is None else asdevice(device)
    wanted = where.array(fill_value).dtype if dtype is None else dtypes.asdtype(dtype)
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    aval = shaped(lengths, wanted, where)

    def make() -> Tensor:
        out = where.empty(lengths, wanted)
        if phantom.mode.dry:
            return _made(out, where)
        with where.active():
            out[...] = fill_value
        return _made(out, where)

    return in_room((aval,), ("full",), make) if aval.nbytes >= _MIB else make()  # less is made room for when counted


def zeros(shape: int | Sequence[int], dtype: Any = None, *, device: Any = None) -> Tensor:
    """Zeros; float32 unless said otherwise."""
    return full(shape, 0, dtype=dtypes.float32 if dtype is None else dtype, device=device)


def ones(shape: int | Sequence[int], dtype: Any = None, *, device: Any = None) -> Tensor:
    """Ones; float32 unless said otherwise."""
    return full(shape, 1, dtype=dtypes.float32 if dtype is None else dtype, device=device)


def empty(shape: int | Sequence[int], dtype: Any = None, *, device: Any = None) -> Tensor:
    """A tensor to be ignored: zeros, since a tensor's value never changes and must not be garbage."""
    return zeros(shape, dtype=dtype, device=device)


def empty_like(x: Any, /, dtype: Any = None, *, device: Any = None, shape: Any = None) -> Tensor:
    """A tensor of the shape and dtype of ``x``, to be ignored: zeros; see :func:`empty`."""
    return zeros_like(x, dtype=dtype, device=device, shape=shape)


def full_like(x: Any, /, fill_value: Any, dtype: Any = None, *, device: Any = None, shape: Any = None) -> Tensor:
    """A tensor of the shape (but for ``shape``) and dtype (but for ``dtype``) of ``x`` filled with one number."""
    x = tensor("full_like", x)
    lengths = x.shape if shape is None else shape
    return full(lengths, fill_value, dtype=x.dtype if dtype is None else dtype, device=device or x.device)


def zeros_like(x: Any, /, dtype: Any = None, *, device: Any = None, shape: Any = None) -> Tensor:
    """Zeros of the shape and dtype of ``x``; see :func:`full_like`."""
    return full_like(x, 0, dtype=dtype, device=device, shape=shape)


def ones_like(x: Any, /, dtype: Any = None, *, device: Any = None, shape: Any = None) -> Tensor:
    """Ones of the shape and dtype of ``x``; see :func:`full_like`."""
    return full_like(x, 1, dtype=dtype, device=device, shape=shape)


def arange(start: Any, /, stop: Any = None, step: Any = 1, dtype: Any = None, *, device: Any = None) -> Tensor:
    """Evenly spaced numbers from ``start`` (or 0) up to, not including, ``stop``."""
    where = current_device() if device is None else asdevice(device)
    if stop is None:
        start, stop = 0, start
    if phantom.mode.dry:
        kind = CPU.array([start, stop, step]).dtype.kind
        wanted = dtypes.of_python(kind, None) if dtype is None else dtypes.asdtype(dtype)
        return _made(where.empty((max(0, math.ceil((stop - start) / step)),), wanted), where)
    with where.active():
        array = where.xp.arange(start, stop, step, dtype=None if dtype is None else dtypes.asdtype(dtype))
        if dtype is None:
            array = array.astype(dtypes.of_python(array.dtype.kind, array.dtype))
    return _made(array, where)


def spaced(start: Any, stop: Any, num: int, dtype: Any, device: Any, endpoint: bool) -> Tensor:
    """``num`` evenly spaced numbers from the number ``start`` to ``stop``; float32 unless said otherwise."""
    where = current_device() if device is None else asdevice(device)
    wanted = dtypes.float32 if dtype is None else dtypes.asdtype(dtype)
    if phantom.mode.dry:
        return _made(where.empty((num,), wanted), where)
    with where.active():
        return _made(where.xp.linspace(start, stop, num, endpoint=endpoint, dtype=wanted), where)


def eye(n_rows: int, n_cols: int | None = None, /, k: int = 0, dtype: Any = None, *, device: Any = None) -> Tensor:
    """Ones on diagonal ``k`` (positive: above the main one), zeros elsewhere."""
    where = current_device() if device is None else asdevice(device)
    wanted = dtypes.float32 if dtype is None else dtypes.asdtype(dtype)
    if phantom.mode.dry:
        return _made(where.empty((n_rows, n_rows if n_cols is None else n_cols), wanted), where)
    with where.active():
        return _made(where.xp.eye(n_rows, n_cols, k=k, dtype=wanted), where)


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """``x`` in another dtype, on ``device`` if given; the gradient is cast back to that of ``x``.

    copy: accepted for the standard's sake; whether a tensor is another one cannot be told, since none changes.  Raises
    DTypeError for a complex ``x`` and a real ``dtype``, DeviceError.
    """
    given = tensor("astype", x)
    found = own(cast(given, dtypes.asdtype(dtype)), given)
    return found if device is None else found.to_device(device)


__all__ = [
    "arange", "asarray", "astype", "constant", "empty", "empty_like", "eye", "full", "full_like",
    "ones", "ones_like", "zeros", "zeros_like",
]  # fmt: skip
