"""Algorithms on arrays, for NumPy and CuPy alike."""
