"""Densities and distribution functions under scipy.stats' names."""

from __future__ import annotations

__all__: list[str] = []
