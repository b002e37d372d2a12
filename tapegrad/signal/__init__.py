"""Convolution, correlation and spectra under scipy.signal's names."""

from __future__ import annotations

__all__: list[str] = []
