"""A region on the CPU: its program, and running that tile by tile."""
