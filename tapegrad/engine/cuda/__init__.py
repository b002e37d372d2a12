"""A region on CUDA: how its arrays lie, its text, and launching it."""
