"""Discrete Fourier transforms under the names of the array API standard, NumPy and scipy.fft.

Single and half precision are transformed in single, all other numbers in double.
"""

from __future__ import annotations

from tapegrad.fft.along import fft, hfft, ifft, ihfft, irfft, rfft
from tapegrad.fft.order import fftfreq, fftshift, ifftshift, rfftfreq
from tapegrad.fft.several import fft2, fftn, hfft2, hfftn, ifft2, ifftn, ihfft2, ihfftn, irfft2, irfftn, rfft2, rfftn
from tapegrad.spellings import explain

__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ifftshift",
    "ihfft", "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip
explain(globals(), __name__)
