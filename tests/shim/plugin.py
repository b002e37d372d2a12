"""A pytest plugin (``-p shim.plugin``, ``tests`` being on the path): CuPy is the stand-in, CUDA the default device."""

from shim import standin

standin.install()
