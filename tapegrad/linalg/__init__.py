"""Linear algebra under the names of the array API standard, NumPy and scipy.linalg."""

from __future__ import annotations

__all__: list[str] = []
