"""What tests import of ``autograd.core`` by the way; HIPS's internals themselves are not here."""

from ._values import make_jvp, make_vjp  # noqa: F401

primitive_vjps: dict = {}
