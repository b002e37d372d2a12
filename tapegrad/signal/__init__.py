"""Convolution, correlation, filters and spectra under scipy.signal's names."""

from __future__ import annotations

from tapegrad.signal.by_fft import fftconvolve, hilbert
from tapegrad.signal.convolution import convolve, convolve2d, correlate, correlate2d
from tapegrad.signal.densities import csd, periodogram, welch
from tapegrad.signal.filtering import lfilter, sosfilt
from tapegrad.signal.spectral import istft, stft
from tapegrad.signal.trends import detrend
from tapegrad.spellings import explain

__all__ = [
    "convolve", "convolve2d", "correlate", "correlate2d", "csd", "detrend", "fftconvolve", "hilbert", "istft",
    "lfilter", "periodogram", "sosfilt", "stft", "welch",
]  # fmt: skip
explain(globals(), __name__)
