"""Parts of complex numbers.

Convention (TensorFlow's): the gradient of a real function is the conjugate of its holomorphic derivative, so that a
step against it descends; cotangents of ``f(z)`` pull back as ``conj(f'(z)) * ct``.
"""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device import dtypes
from tapegrad.ops.casting import real_p
from tapegrad.ops.create.creation import zeros_like
from tapegrad.ops.dispatch import bind, cast, infer_same, tensor
from tapegrad.ops.elementwise.selection import where
from tapegrad.tensor import Tensor, TensorLike, identity_of

conj_p = elementwise(
    "conj",
    infer=infer_same,
    partials=[lambda ct: conj(ct)],
    operands=("x",),
    cxx="tg_conj({x})",
    doc="Complex conjugate.",
)
imag_p = elementwise(
    "imag",
    widens=False,
    infer=real_p.infer,
    impl=lambda xp, out, x: xp.copyto(out, x.imag),
    partials=[lambda ct, x_aval: 1j * cast(ct, x_aval.dtype)],
    jvp=[lambda t: imag(t)],
    operands=("x",),
    cxx="tg_imag({x})",
    doc="Imaginary part.",
)


def conj(x: TensorLike) -> Tensor:
    """The complex conjugate."""
    x = tensor("conj", x)
    return bind(conj_p, x) if x.dtype.kind == "c" else identity_of(x)


def real(val: TensorLike) -> Tensor:
    """The real part."""
    val = tensor("real", val)
    return bind(real_p, val) if val.dtype.kind == "c" else identity_of(val)


def imag(val: TensorLike) -> Tensor:
    """The imaginary part (zeros for a real tensor)."""
    val = tensor("imag", val)
    if val.dtype.kind == "c":
        return bind(imag_p, val)
    return where(zeros_like(val, dtype=dtypes.bool_), val, zeros_like(val))  # not 0 * x, which is NaN for inf
