"""Transforms along one axis: linear primitives, whose transposes are transforms again.

The transposes are those of the inner product ``Re(conj(a) * b)``, so a complex cotangent is conjugated on neither side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive, Sample, linear
from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops import arange, conj, equal, logical_or, pad, reshape, where
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["fft", "hfft", "ifft", "ihfft", "irfft", "rfft"]

_SWAPPED = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _complex_dtype(dtype: DType) -> DType:
    """The dtype of a result: single precision of single or half, else double."""
    narrow = dtype.kind in "fc" and dtypes.real_of(dtype).itemsize <= 4
    return dtypes.complex64 if narrow else dtypes.complex128


def _sized(x: ShapedArray, axis: int, n: int, dtype: DType) -> ShapedArray:
    return x.with_shape((*x.shape[:axis], n, *x.shape[axis + 1 :])).with_dtype(dtype)


def fitted(x: Tensor, n: int, axis: int) -> Tensor:
    """``x`` cut, or filled up with zeros, to length ``n``, as a transform of that length does first."""
    have = x.shape[axis]
    if have >= n:
        return x[(slice(None),) * axis + (slice(n),)]
    return pad(x, [(0, n - have if a == axis else 0) for a in range(x.ndim)])


def _weighted(x: Tensor, n: int, axis: int, inside: float) -> Tensor:
    """Half a spectrum times ``inside``, except the points without a mirror image."""
    at = arange(x.shape[axis], device=x.device)
    ends = equal(at, 0) if n % 2 else logical_or(equal(at, 0), equal(at, n // 2))
    return x * reshape(cast(where(ends, 1.0, inside), dtypes.real_of(x.dtype)), (-1,) + (1,) * (x.ndim - 1 - axis))


def _flops(x: ShapedArray, *, n: int, axis: int, **params: object) -> int:
    return 5 * (x.size // max(x.shape[axis], 1)) * n * max(n.bit_length(), 1)


def _again(name: str, ct: Tensor, n: int, axis: int, norm: str) -> Tensor:
    """What the transpose of a transform does: the transform called ``name``, scaled as the opposite direction."""
    return barrier(_PRIMS[name], ct, n=n, axis=axis, norm=_SWAPPED[norm])


def _declare(
    name: str, length: Callable[[int], int], dtype: Callable[[DType], DType], pull: Callable[..., Tensor],
    samples: Sequence[Sample],
) -> None:  # fmt: skip
    """``pull(ct, n, axis, norm)``: the cotangent of an operand of the transform's own length."""
    _PRIMS[name] = linear(
        name,
        impl=lambda xp, x, *, n, axis, norm: getattr(xp.fft, name)(x, n, axis, norm),
        infer=lambda x, *, n, axis, norm: _sized(x, axis, length(n), dtype(x.dtype)),
        transpose=lambda ct, x, *, n, axis, norm: fitted(pull(ct, n, axis, norm), x.shape[axis], axis),
        lift=lift_axis,
        flops=_flops,
        planned=True,
        samples=samples,
    )


_PRIMS: dict[str, Primitive] = {}
_LENGTHS = [
    Sample((2, 3), n=3, axis=1, norm="backward"), Sample((2, 3), n=4, axis=0, norm="forward"),
    Sample((3,), n=2, axis=0, norm="ortho"),
]  # fmt: skip
_declare("fft", lambda n: n, _complex_dtype, lambda ct, *how: _again("ifft", ct, *how), _LENGTHS)
_declare("ifft", lambda n: n, _complex_dtype, lambda ct, *how: _again("fft", ct, *how), _LENGTHS)
_declare(
    "rfft", lambda n: n // 2 + 1, _complex_dtype,
    lambda ct, n, axis, norm: _again("irfft", _weighted(ct, n, axis, 0.5), n, axis, norm), _LENGTHS,
)  # fmt: skip
_declare(
    "irfft", lambda n: n, lambda dtype: dtypes.real_of(dtype) if dtype.kind in "fc" else dtypes.float64,
    lambda ct, n, axis, norm: _weighted(_again("rfft", ct, n, axis, norm), n, axis, 2.0),
    [
        Sample((2, 3), n=4, axis=1, norm="backward"), Sample((2, 3), n=3, axis=0, norm="forward"),
        Sample((4,), n=4, axis=0, norm="ortho"), Sample((3,), n=7, axis=0, norm="backward"),
    ],
)  # fmt: skip


def check_norm(op: str, norm: str | None) -> str:
    """The name of a way of scaling.  Raises ShapeError."""
    if norm is not None and norm not in _SWAPPED:
        raise ShapeError(f"{op}: norm={norm!r}; give 'backward', 'ortho' or 'forward'")
    return norm or "backward"


def swapped(op: str, norm: str | None) -> str:
    """The scaling of the opposite direction."""
    return _SWAPPED[check_norm(op, norm)]


def operand(op: str, x: TensorLike) -> Tensor:
    """``x`` in a dtype that can be transformed: floats that NumPy does not have become float32."""
    x = tensor(op, x)
    return cast(x, dtypes.float32) if dtypes.is_extended(x.dtype) else x


def transform(name: str, op: str, x: Tensor, n: int | None, axis: int, norm: str | None) -> Tensor:
    """Primitive ``name`` for the function ``op``.  Raises ShapeError, AxisError."""
    axis = normalize_axis(op, axis, x.ndim)
    if n is None:
        n = 2 * (x.shape[axis] - 1) if name == "irfft" else x.shape[axis]
    n = index(n)
    if n < 1:
        raise ShapeError(f"{op}: a transform of {n} points along axis {axis} of shape {x.shape}; give n=1 or more")
    return barrier(_PRIMS[name], x, n=n, axis=axis, norm=check_norm(op, norm))


def fft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The discrete Fourier transform along ``axis``, complex (NumPy's ``fft.fft``).

    n: ``a`` is cut or filled up with zeros to so many points; norm: which direction is scaled by ``1 / n``, "backward"
    (the default) or "forward", or "ortho" for both by its root.  Raises ShapeError for ``n < 1``, AxisError.
    """
    return transform("fft", "fft", operand("fft", a), n, axis, norm)


def ifft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of :func:`fft`; parameters as there.  Raises ShapeError, AxisError."""
    return transform("ifft", "ifft", operand("ifft", a), n, axis, norm)


def rfft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The first half, ``n // 2 + 1`` points, of the Fourier transform of real numbers; parameters as of :func:`fft`.

    Raises ShapeError, also for complex numbers, and AxisError.
    """
    return transform("rfft", "rfft", check_real("rfft", operand("rfft", a)), n, axis, norm)


def check_real(op: str, x: Tensor) -> Tensor:
    """``x`` itself.  Raises DTypeError if it is complex."""
    if x.dtype.kind == "c":
        raise DTypeError(f"{op}: not defined for complex numbers; use {op.replace('r', '', 1)}, or take real first")
    return x


def irfft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of :func:`rfft`: ``n`` real numbers (None: ``2 * (m - 1)`` for ``m`` points).

    The imaginary parts of the first point, and for even ``n`` of the last one, are not read and get gradient 0.  Raises
    ShapeError, AxisError.
    """
    return transform("irfft", "irfft", operand("irfft", a), n, axis, norm)


def hfft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The Fourier transform, real, of a sequence given by its first half, the rest being its conjugate mirror image.

    n: how many points come out (None: ``2 * (m - 1)``); norm as of :func:`fft`.  Raises ShapeError, AxisError.
    """
    return transform("irfft", "hfft", conj(operand("hfft", a)), n, axis, swapped("hfft", norm))


def ihfft(a: TensorLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """The inverse of :func:`hfft`: ``n // 2 + 1`` points of real numbers.  Raises ShapeError, DTypeError, AxisError."""
    a = check_real("ihfft", operand("ihfft", a))
    return conj(transform("rfft", "ihfft", a, n, axis, swapped("ihfft", norm)))
