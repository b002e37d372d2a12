"""Ordinary differential equations under scipy.integrate's names."""

from __future__ import annotations

__all__: list[str] = []
