"""``autograd.builtins``: plain structures."""

from . import dict, isinstance, list, tuple  # noqa: F401
