"""Products and solves with sparse matrices of SciPy and cupyx."""

from __future__ import annotations

__all__: list[str] = []
