"""What tests import of ``autograd.extend``."""

from .tracer import primitive  # noqa: F401
