"""A pytest plugin (``-p shim.plugin``, with ``tests`` on the path): CuPy is the stand-in, and CUDA the default device."""

from shim import standin

standin.install()
