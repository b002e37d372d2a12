"""Values whose bytes are in another memory: pinned host memory, or disk."""
