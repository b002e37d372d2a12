"""Discrete Fourier transforms under the names of the array API standard and NumPy."""

from __future__ import annotations

__all__: list[str] = []
