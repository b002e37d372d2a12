"""A run as files that other programs open: each module has ``write(run, path)``."""
