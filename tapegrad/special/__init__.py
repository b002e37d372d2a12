"""Special functions under scipy.special's names."""

from __future__ import annotations

__all__: list[str] = []
