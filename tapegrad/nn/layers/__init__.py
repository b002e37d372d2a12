"""Layers: callables with variables."""
