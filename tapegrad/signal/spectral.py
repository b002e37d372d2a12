"""Spectra of segments of a signal, and back (scipy.signal's functions), made of differentiable pieces.

Windows given by name are SciPy's; one given as an array may be a tensor with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, TypeAlias

from tapegrad import fft
from tapegrad.core.aval import normalize_axis
from tapegrad.device import CPU, dtypes
from tapegrad.device.numerics import scipy
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.ops import arange, broadcast_to, concat, flip, moveaxis, pad, reshape, sqrt, sum, take, where
from tapegrad.ops.dispatch import barrier, cast, promote, tensor, whole_in_float64
from tapegrad.ops.index.indexing import scatter_add_p
from tapegrad.signal.trends import detrend as without_trend
from tapegrad.tensor import Tensor, TensorLike


def along_last(op: str, x: TensorLike, axis: int) -> tuple[Tensor, int]:
    """The signal with its axis last, in floats, and which axis that was.  Raises AxisError."""
    (signal,) = promote(op, (x,), whole_in_float64)
    at = normalize_axis(op, axis, signal.ndim)
    return moveaxis(signal, at, -1), at


def restored(x: Tensor, at: int) -> Tensor:
    """``x`` with its last axis moved back to position ``at``."""
    return moveaxis(x, -1, at)


def real_float(op: str, x: Tensor) -> Tensor:
    """``x``, if it is real.  Raises DTypeError."""
    if x.dtype.kind == "c":
        raise DTypeError(f"{op}: a complex signal; take its real part")
    return x


Window: TypeAlias = "str | tuple[Any, ...] | TensorLike"
Detrend: TypeAlias = "str | Literal[False] | Callable[[Tensor], Tensor]"


@dataclass(frozen=True)
class Cut:
    """How a signal is cut into segments."""

    op: str
    window: Tensor
    nperseg: int
    step: int
    nfft: int
    onesided: bool

    def segments(self, x: Tensor) -> Tensor:
        """``(..., segments, nperseg)``.  Raises ShapeError."""
        n = x.shape[-1]
        if n < self.nperseg:
            raise ShapeError(f"{self.op}: a signal of length {n} holds no segment of length {self.nperseg}")
        return take(x, self.places((n - self.nperseg) // self.step + 1), axis=-1)

    def places(self, count: int) -> Tensor:
        """The positions of every segment's elements."""
        starts = reshape(arange(count, device=self.window.device) * self.step, (count, 1))
        return starts + arange(self.nperseg, device=self.window.device)

    def spectra(self, x: Tensor, detrend: Detrend) -> Tensor:
        """The windowed segments' transforms, ``(..., segments, frequencies)``."""
        parts = self.segments(x)
        if detrend:
            parts = detrend(parts) if callable(detrend) else without_trend(parts, type=detrend)
        parts = parts * self.window
        return (fft.rfft if self.onesided else fft.fft)(parts, n=self.nfft, axis=-1)

    def frequencies(self, fs: float) -> Tensor:
        """The frequency of each entry of a spectrum."""
        numbers = (fft.rfftfreq if self.onesided else fft.fftfreq)(self.nfft, d=1 / fs, device=self.window.device)
        return cast(numbers, dtypes.float64)


def cut_into(
    op: str,
    x: Tensor,
    window: Window,
    nperseg: int | None,
    noverlap: int | None,
    nfft: int | None,
    onesided: bool,
    n: int | None = None,
) -> Cut:
    """The parts of SciPy's arguments, with its defaults.  Raises ShapeError, TapegradError."""
    n = x.shape[-1] if n is None else n
    if isinstance(window, (str, tuple)):
        nperseg = min(256 if nperseg is None else index(nperseg), n)
        if nperseg < 1:
            raise ShapeError(f"{op}: segments of length {nperseg} of a signal of length {n}; need at least 1")
        try:
            win = x.device.array(scipy.signal(CPU.xp).get_window(window, nperseg))
        except ValueError as e:
            raise TapegradError(f"{op}: {e}") from None
    else:
        win = tensor(op, window, x)
        if win.ndim != 1 or win.shape[0] > n or (nperseg is not None and win.shape[0] != nperseg):
            raise ShapeError(f"{op}: a window {win.shape} for segments of length {nperseg} and a signal of length {n}")
        nperseg = win.shape[0]
    nfft = nperseg if nfft is None else index(nfft)
    noverlap = nperseg // 2 if noverlap is None else index(noverlap)
    if nfft < nperseg or noverlap >= nperseg:
        raise ShapeError(f"{op}: nfft={nfft}, noverlap={noverlap}, nperseg={nperseg}; need noverlap < nperseg <= nfft")
    kind = dtypes.real_of(dtypes.accumulator(x.dtype))
    return Cut(op, cast(tensor(op, win, x), kind), nperseg, nperseg - noverlap, nfft, onesided)


_EXTENSIONS = {"even": "reflect", "constant": "edge", "zeros": "constant"}


def _extended(op: str, x: Tensor, boundary: str | None, n: int) -> Tensor:
    """The signal with ``n`` elements more on either side."""
    if not boundary:
        return x
    if boundary not in (*_EXTENSIONS, "odd"):
        raise TapegradError(f"{op}: boundary {boundary!r}; take 'even', 'odd', 'constant', 'zeros' or None")
    if boundary in ("even", "odd") and n >= x.shape[-1]:
        raise ShapeError(f"{op}: boundary {boundary!r} of {n} elements for a signal of length {x.shape[-1]}")
    widths = [(0, 0)] * (x.ndim - 1) + [(n, n)]
    if boundary != "odd":
        return pad(x, widths, mode=_EXTENSIONS[boundary])
    if not n:
        return x
    left, right = (flip(part, axis=-1) for part in (x[..., 1 : n + 1], x[..., -n - 1 : -1]))
    return concat([2 * x[..., :1] - left, x, 2 * x[..., -1:] - right], axis=-1)


def scale_of(op: str, cut: Cut, fs: float, scaling: str) -> Tensor:
    if scaling in ("density", "psd"):
        return 1.0 / (fs * sum(cut.window * cut.window))
    if scaling == "spectrum":
        return 1.0 / sum(cut.window) ** 2
    raise TapegradError(f"{op}: scaling {scaling!r}")


def stft(
    x: TensorLike,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = 256,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Detrend = False,
    return_onesided: bool = True,
    boundary: str | None = "zeros",
    padded: bool = True,
    axis: int = -1,
    scaling: str = "spectrum",
) -> tuple[Tensor, Tensor, Tensor]:
    """The short-time Fourier transform (scipy.signal.stft): frequencies, times, and the complex spectra.

    The result has the axis of the frequencies where ``axis`` was, and that of the times last.  Raises ShapeError,
    AxisError, and TapegradError for a window, boundary or scaling.
    """
    signal, at = along_last("stft", x, axis)
    onesided = return_onesided and signal.dtype.kind != "c"
    cut = cut_into("stft", signal, window, nperseg, noverlap, nfft, onesided)
    signal = _extended("stft", signal, boundary, cut.nperseg // 2)
    if padded:
        gap = -(signal.shape[-1] - cut.nperseg) % cut.step % cut.nperseg
        signal = pad(signal, [(0, 0)] * (signal.ndim - 1) + [(0, gap)])
    spectra = cut.spectra(signal, detrend) * sqrt(scale_of("stft", cut, fs, scaling))
    times = (arange(spectra.shape[-2], dtype="float64", device=spectra.device) * cut.step + cut.nperseg / 2) / fs
    if boundary:
        times = times - cut.nperseg / 2 / fs
    return cut.frequencies(fs), times, moveaxis(spectra, -1, at)


def istft(
    Zxx: TensorLike,
    fs: float = 1.0,
    window: Window = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    input_onesided: bool = True,
    boundary: bool = True,
    time_axis: int = -1,
    freq_axis: int = -2,
    scaling: str = "spectrum",
) -> tuple[Tensor, Tensor]:
    """The signal that has these short-time spectra (scipy.signal.istft): times and values.

    Where the windows do not overlap the result is not divided by their sum.  Raises ShapeError, AxisError.
    """
    (z,) = promote("istft", (Zxx,), whole_in_float64)
    if z.ndim < 2:
        raise ShapeError(f"istft: spectra {z.shape}; need an axis of frequencies and one of times")
    t, f = (normalize_axis("istft", a, z.ndim) for a in (time_axis, freq_axis))
    if t == f:
        raise ShapeError(f"istft: time_axis and freq_axis are both {t}")
    z = moveaxis(z, (f, t), (-1, -2))
    default = 2 * (z.shape[-1] - 1) if input_onesided else z.shape[-1]
    nperseg = default if nperseg is None else index(nperseg)
    if nfft is None:
        nfft = nperseg if input_onesided and nperseg == default + 1 else default
    cut = cut_into("istft", z, window, nperseg, noverlap, max(nfft, nperseg), input_onesided, nperseg)
    parts = (fft.irfft if input_onesided else fft.ifft)(z, n=nfft, axis=-1)[..., : cut.nperseg] * cut.window
    count, places = z.shape[-2], cut.places(z.shape[-2])
    n = cut.nperseg + (count - 1) * cut.step
    signal = barrier(scatter_add_p, parts / sqrt(scale_of("istft", cut, fs, scaling)), places, axis=parts.ndim - 2, n=n)
    squares = broadcast_to(cut.window * cut.window, (count, cut.nperseg))
    norm = barrier(scatter_add_p, squares, places, axis=0, n=n)
    if boundary:
        inner = slice(cut.nperseg // 2, n - cut.nperseg // 2)
        signal, norm = signal[..., inner], norm[inner]
    signal = signal / where(norm > 1e-10, norm, 1.0)
    times = arange(signal.shape[-1], dtype="float64", device=signal.device) / fs
    return times, moveaxis(signal, -1, t - (f < t))
