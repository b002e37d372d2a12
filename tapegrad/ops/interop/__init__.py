"""How Python, NumPy and other libraries call the operations."""
