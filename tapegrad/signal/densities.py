"""Power spectral densities (scipy.signal's functions) by Welch's method."""

from __future__ import annotations

from tapegrad.core.aval import broadcast_shapes
from tapegrad.errors import TapegradError
from tapegrad.ops import broadcast_to, conj, mean, pad, real
from tapegrad.ops.dispatch import promote
from tapegrad.signal.spectral import Detrend, Window, along_last, cut_into, restored, scale_of
from tapegrad.tensor import Tensor, TensorLike


def csd(
    x: TensorLike,
    y: TensorLike,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Detrend = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The cross power spectral density by Welch's method (scipy.signal.csd): frequencies and (complex) densities.

    average: ``mean`` over the segments, the only one.  Raises ShapeError, AxisError, and TapegradError for a window,
    scaling or average.
    """
    return _density("csd", x, y, fs, window, nperseg, noverlap, nfft, detrend, return_onesided, scaling, axis, average)


def welch(
    x: TensorLike,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Detrend = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The power spectral density by Welch's method (scipy.signal.welch): frequencies and densities; see :func:`csd`."""
    frequencies, densities = _density(
        "welch", x, None, fs, window, nperseg, noverlap, nfft, detrend, return_onesided, scaling, axis, average
    )
    return frequencies, real(densities)


def periodogram(
    x: TensorLike,
    fs: float = 1.0,
    window: Window = "boxcar",
    nfft: int | None = None,
    detrend: Detrend = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
) -> tuple[Tensor, Tensor]:
    """The power spectral density of the whole signal (scipy.signal.periodogram): frequencies and densities."""
    signal, at = along_last("periodogram", x, axis)
    n = signal.shape[-1]
    if nfft is not None and nfft < n:
        signal, n = signal[..., :nfft], nfft
    return welch(restored(signal, at), fs, window, n, 0, nfft, detrend, return_onesided, scaling, axis)


def _density(
    op: str, x: TensorLike, y: TensorLike | None, fs: float, window: Window, nperseg: int | None, noverlap: int | None,
    nfft: int | None, detrend: Detrend,
    onesided: bool, scaling: str, axis: int, average: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    signal, at = along_last(op, x, axis)
    other = None if y is None else along_last(op, y, axis)[0]
    if other is not None:
        signal, other = _alike(op, signal, other)
    onesided = onesided and "c" not in (signal.dtype.kind, "" if other is None else other.dtype.kind)
    cut = cut_into(op, signal, window, nperseg, noverlap, nfft, onesided)
    if average != "mean":
        raise TapegradError(f"{op}: average {average!r}; take 'mean'")
    one = cut.spectra(signal, detrend)
    two = one if other is None else cut.spectra(other, detrend)
    densities = mean(conj(one) * two, axis=-2) * scale_of(op, cut, fs, scaling)
    if onesided:
        count = densities.shape[-1]
        last = count if cut.nfft % 2 else count - 1
        densities = densities * densities.device.array(
            [2.0 if 0 < k < last else 1.0 for k in range(count)], dtype=cut.window.dtype
        )
    return cut.frequencies(fs), restored(densities, at)


def _alike(op: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two signals of one dtype and length, the shorter one with zeros behind it."""
    x, y = promote(op, (x, y))
    n = max(x.shape[-1], y.shape[-1])
    x, y = (pad(t, [(0, 0)] * (t.ndim - 1) + [(0, n - t.shape[-1])]) for t in (x, y))
    lead = broadcast_shapes(op, x.shape[:-1], y.shape[:-1])
    return broadcast_to(x, (*lead, n)), broadcast_to(y, (*lead, n))
