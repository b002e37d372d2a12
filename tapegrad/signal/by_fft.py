"""Convolution by way of Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad import fft
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops.dispatch import cast
from tapegrad.ops.elementwise.comparison import round
from tapegrad.ops.shape.shape import reshape
from tapegrad.signal.modes import axes_of, centred, pair, swapped
from tapegrad.signal.spectral import along_last, real_float, restored
from tapegrad.tensor import Tensor, TensorLike


def fast_length(n: int) -> int:
    """The least length of at least ``n`` that has no prime factor above 5: an FFT of it is quick."""
    best, five = 1 << max(n - 1, 0).bit_length(), 1
    while five < best:
        three = five
        while three < best:
            two = three << max(-(-n // three) - 1, 0).bit_length()
            if n <= two < best:
                best = two
            three *= 3
        five *= 5
    return best


def fftconvolve(
    in1: TensorLike, in2: TensorLike, mode: str = "full", axes: int | Sequence[int] | None = None
) -> Tensor:
    """The convolution of two arrays along ``axes`` (None: all), by Fourier transforms (scipy.signal.fftconvolve).

    Other axes broadcast; modes as in :func:`convolve`.  Raises ShapeError, AxisError, and TapegradError for a mode.
    """
    x, y = pair("fftconvolve", in1, in2, mode)
    if not x.ndim:
        return x * y
    along = axes_of("fftconvolve", axes, x.ndim)
    if any(x.shape[a] != y.shape[a] and 1 not in (x.shape[a], y.shape[a]) for a in range(x.ndim) if a not in along):
        raise ShapeError(f"fftconvolve: operands {x.shape} and {y.shape} do not broadcast outside the axes {along}")
    one, two = (tuple(t.shape[a] for a in along) for t in (x, y))
    if swapped("fftconvolve", one, two, mode):
        x, y = y, x
    if not x.size or not y.size:
        return reshape(x, (-1,))[:0] * reshape(y, (-1,))[:0]
    long = tuple(a for a in along if 1 not in (x.shape[a], y.shape[a]))
    result = _product(x, y, long)
    if not dtypes.is_inexact(x.dtype):
        result = cast(round(result), x.dtype)
    if mode == "same":
        return centred(result, x.shape)
    if mode == "valid":
        shape = tuple(x.shape[a] - y.shape[a] + 1 if a in along else n for a, n in enumerate(result.shape))
        return centred(result, shape)
    return result


def _product(x: Tensor, y: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The full convolution along ``axes``."""
    if not axes:
        return x * y
    wanted = [x.shape[a] + y.shape[a] - 1 for a in axes]
    sizes = tuple(map(fast_length, wanted))
    forward, back = (fft.fftn, fft.ifftn) if x.dtype.kind == "c" else (fft.rfftn, fft.irfftn)
    product = back(forward(x, s=sizes, axes=axes) * forward(y, s=sizes, axes=axes), s=sizes, axes=axes)
    part = [slice(None)] * x.ndim
    for a, n in zip(axes, wanted, strict=True):
        part[a] = slice(n)
    return product[tuple(part)]


def hilbert(x: TensorLike, N: int | None = None, axis: int = -1) -> Tensor:
    """The analytic signal of a real ``x`` (scipy.signal.hilbert): ``x`` plus i times its Hilbert transform.

    N: the length of the transform (default: that of ``x`` along ``axis``).  Raises DTypeError, AxisError.
    """
    signal, at = along_last("hilbert", x, axis)
    signal = real_float("hilbert", signal)
    n = signal.shape[-1] if N is None else N
    if n < 1:
        raise ShapeError(f"hilbert: length {n}; need at least 1")
    weights = [1.0] + [2.0] * ((n - 1) // 2) + [1.0] * (1 - n % 2) + [0.0] * ((n - 1) // 2)
    spectrum = fft.fft(signal, n=n, axis=-1)
    return restored(fft.ifft(spectrum * signal.device.array(weights[:n], dtype=signal.dtype), axis=-1), at)
