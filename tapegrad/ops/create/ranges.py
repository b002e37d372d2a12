"""Evenly spaced numbers whose ends may be tensors, and matrices and windows made of such numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import index
from typing import Any

from tapegrad.core.aval import broadcast_shapes, normalize_axis
from tapegrad.device import CPU, Device, asdevice, current_device, dtypes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.create import creation
from tapegrad.ops.create.creation import arange, asarray
from tapegrad.ops.dispatch import SCALARS, cast, promote, tensor, whole_in_float64
from tapegrad.ops.elementwise.arithmetic import divide, multiply, sign
from tapegrad.ops.elementwise.comparison import equal, less_equal
from tapegrad.ops.elementwise.exponential import log10, power
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.shape.join import concat, flip
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = [
    "bartlett", "blackman", "geomspace", "hamming", "hanning", "identity", "kaiser", "linspace", "logspace", "tri",
    "vander",
]  # fmt: skip


def _numbers(*xs: TensorLike) -> bool:
    return all(isinstance(x, SCALARS) and not hasattr(x, "dtype") for x in xs)


def linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, retstep: bool = False, dtype: DTypeLike | None = None,
    *, axis: int = 0, device: Device | str | None = None,
) -> Any:  # fmt: skip
    """``num`` evenly spaced numbers from ``start`` to ``stop``, along a new ``axis`` if those are arrays.

    Without ``endpoint`` ``stop`` itself is left out; retstep: the step, too.  Numbers have the default dtype unless
    ``dtype`` says otherwise.  Differentiable in arrays ``start`` and ``stop``.  Raises ShapeError for ``num < 0``.
    """
    count = index(num)
    if count < 0:
        raise ShapeError(f"linspace: num={count} is negative")
    parts = count - 1 if endpoint else count
    if _numbers(start, stop):
        if dtype is None and (isinstance(start, complex) or isinstance(stop, complex)):
            dtype = dtypes.of_python("c", dtypes.complex64)
        points = creation.spaced(start, stop, count, dtype, device, endpoint)
        return (points, (stop - start) / parts if parts > 0 else math.nan) if retstep else points
    first, last = promote("linspace", (start, stop), whole_in_float64)
    points, step = _spaced(first, last, count, endpoint)
    points = moveaxis(points, 0, normalize_axis("linspace", axis, points.ndim))
    if dtype is not None:
        points = cast(points, dtypes.asdtype(dtype))
    return (points, step) if retstep else points


def _spaced(first: Tensor, last: Tensor, count: int, endpoint: bool) -> tuple[Tensor, Tensor]:
    """The numbers along a new first axis, rounded as NumPy rounds, and the step."""
    gap, count = last - first, index(count)
    parts = count - 1 if endpoint else count
    wide = dtypes.real_of(gap.dtype)
    at = reshape(arange(count, dtype=wide, device=gap.device), (count,) + (1,) * gap.ndim)
    if parts <= 0:
        return broadcast_to(at * gap + first, (count, *gap.shape)), gap * float("nan")
    step = divide(gap, parts)
    points = where(equal(step, 0), at / parts * gap, at * step) + first
    if endpoint and count > 1:
        points = concat([points[:-1], expand_dims(broadcast_to(last, gap.shape), 0)], axis=0)
    return points, step


def logspace(
    start: TensorLike, stop: TensorLike, num: int = 50, endpoint: bool = True, base: TensorLike = 10.0,
    dtype: DTypeLike | None = None, *, axis: int = 0, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """``base ** linspace(start, stop, num)`` (NumPy's ``logspace``).

    Differentiable in arrays ``start``, ``stop`` and ``base``; numbers have the default dtype unless ``dtype`` says
    otherwise.  Raises ShapeError.
    """
    if _numbers(start, stop, base):
        dtype = dtypes.asdtype(dtype)
        start = asarray(start, dtype=dtypes.float64, device=device)
    elif not _numbers(base) and tensor("logspace", base).ndim:
        base = expand_dims(tensor("logspace", base), 0)
        start = asarray(start) if isinstance(start, SCALARS) else start
        x, y, b = promote("logspace", (start, stop, base), whole_in_float64)
        shape = broadcast_shapes("logspace", x.shape, y.shape, b.shape[1:])
        exponents, _ = _spaced(broadcast_to(x, shape), broadcast_to(y, shape), num, endpoint)
        points = moveaxis(power(b, exponents), 0, normalize_axis("logspace", axis, len(shape) + 1))
        return points if dtype is None else cast(points, dtypes.asdtype(dtype))
    exponents = linspace(start, stop, num, endpoint, axis=axis, device=device)
    points = power(base, exponents)
    return points if dtype is None else cast(points, dtypes.asdtype(dtype))


def geomspace(
    start: TensorLike, stop: TensorLike, num: int = 50, endpoint: bool = True, dtype: DTypeLike | None = None, *,
    axis: int = 0, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """``num`` numbers from ``start`` to ``stop``, each a fixed multiple of the one before (NumPy's ``geomspace``).

    Differentiable in arrays ``start`` and ``stop``; numbers have the default dtype unless ``dtype`` says otherwise.
    Raises ShapeError; TapegradError for a number that is 0.
    """
    if _numbers(start, stop):
        if not start or not stop:
            raise TapegradError("geomspace: a geometric sequence cannot contain 0")
        if not isinstance(start, complex) and not isinstance(stop, complex):
            dtype = dtypes.asdtype(dtype)
            start = asarray(start, dtype=dtypes.float64, device=device)
    first, last = promote("geomspace", (start, stop), whole_in_float64)
    first, last = broadcast_to(first, (first + last).shape), broadcast_to(last, (first + last).shape)
    turn = sign(first)
    x, y = first / turn, last / turn
    exponents, _ = _spaced(log10(x), log10(y), num, endpoint)
    points = power(10.0, exponents)
    ends = [expand_dims(x, 0), points[1:]] if num > 0 else [points]
    if num > 1 and endpoint:
        ends = [ends[0], points[1:-1], expand_dims(y, 0)]
    points = moveaxis(concat(ends, axis=0) * turn, 0, normalize_axis("geomspace", axis, first.ndim + 1))
    return points if dtype is None else cast(points, dtypes.asdtype(dtype))


def identity(n: int, dtype: DTypeLike | None = None, *, device: Device | str | None = None) -> Tensor:
    """The square matrix with ones on its main diagonal; dtype None: the default dtype."""
    return creation.eye(n, dtype=dtype, device=device)


def tri(
    N: int, M: int | None = None, k: int = 0, dtype: DTypeLike | None = None, *, device: Device | str | None = None
) -> Tensor:
    """Ones on and below diagonal ``k`` of an ``N x M`` matrix, zeros above; dtype None: the default dtype."""
    home = current_device() if device is None else asdevice(device)
    rows, columns = arange(index(N), device=home), arange(index(N if M is None else M), device=home)
    mask = less_equal(columns, reshape(rows, (rows.size, 1)) + k)
    return cast(mask, dtypes.asdtype(dtype))


def vander(x: TensorLike, N: int | None = None, increasing: bool = False) -> Tensor:
    """The matrix of powers of the vector ``x``: columns ``x**(N-1) .. x**0``, or rising (NumPy's ``vander``).

    The gradient is right at 0, too.  Raises ShapeError unless ``x`` is a vector.
    """
    v = tensor("vander", x)
    if v.ndim != 1:
        raise ShapeError(f"vander: needs a vector, got shape {v.shape}")
    if v.dtype.kind in "biu":  # as NumPy promotes them
        v = cast(v, dtypes.float64 if v.dtype == dtypes.uint64 else dtypes.int64)
    n = v.size if N is None else index(N)
    if n < 0:
        raise ShapeError(f"vander: N={n} is negative")
    ones = creation.ones((v.size, min(n, 1)), dtype=v.dtype, device=v.device)
    if n > 1:
        column = broadcast_to(reshape(v, (v.size, 1)), (v.size, n - 1))
        ones = concat([ones, multiply_up(column)], axis=1)
    return ones if increasing else flip(ones, axis=1)


def multiply_up(columns: Tensor) -> Tensor:
    """Products from the first column on, one after the other as NumPy multiplies them."""
    powers = [columns[:, :1]]
    for k in range(1, columns.shape[1]):
        powers.append(multiply(powers[-1], columns[:, k : k + 1]))
    return concat(powers, axis=1)


def kaiser(M: int, beta: float, *, dtype: DTypeLike | None = None, device: Device | str | None = None) -> Tensor:
    """Kaiser's window of ``M`` points with shape ``beta``; dtype None: the default dtype."""
    home: Device = current_device() if device is None else asdevice(device)
    return asarray(CPU.xp.kaiser(index(M), beta), dtype=dtypes.asdtype(dtype), device=home)


def _window(name: str, doc: str) -> Callable[..., Tensor]:
    def op(M: int, *, dtype: DTypeLike | None = None, device: Device | str | None = None) -> Tensor:
        home: Device = current_device() if device is None else asdevice(device)
        return asarray(getattr(CPU.xp, name)(index(M)), dtype=dtypes.asdtype(dtype), device=home)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{doc}; dtype None: the default dtype."
    return op


bartlett = _window("bartlett", "The triangular window of ``M`` points, 0 at both ends")
blackman = _window("blackman", "Blackman's window of ``M`` points, three terms of cosines")
hamming = _window("hamming", "Hamming's window of ``M`` points, a raised cosine")
hanning = _window("hanning", "Hann's window of ``M`` points, a raised cosine, 0 at both ends")
