"""Eigenvalues and eigenvectors of general matrices.

Derivatives: C. Boeddeker et al., *On the computation of complex-valued gradients with application to statistically
optimum beamforming* (2017), with eigenvectors of length 1.
"""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import H, check_square, column, complex_of, declare, on_diagonal, over, row, square
from tapegrad.linalg.solving import solved
from tapegrad.ops import concat, conj, real, sum
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.shape.diagonals import diagonal
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["EigResult", "eig", "eigvals"]

_SAMPLES = [[[2.0, 1.0], [0.5, -1.0]], [[[1.0, 2.0], [3.0, 4.0]], [[0.5, 1.5], [0.25, -0.5]]], [[1.0]]]


class EigResult(NamedTuple):
    """Eigenvalues in LAPACK's order, and eigenvectors of length 1 in the columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


def _infer_eig(x: ShapedArray) -> ShapedArray:
    check_square("eig", x)
    return x.with_shape((*x.shape[:-2], x.shape[-1] + 1, x.shape[-1])).with_dtype(complex_of(x.dtype))


def _run_eig(xp: Namespace, x: Array) -> Array:
    w, v = xp.linalg.eig(x)
    return xp.concatenate([w[..., None, :], v], axis=-2)


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, a row on top, and eigenvectors below."""
    return packed[..., 0, :], packed[..., 1:, :]


def _pull_eig(ct: Tensor, out: Tensor) -> Tensor:
    (w, v), (gw, gv) = _parts(out), _parts(ct)
    inner = H(v) @ gv
    along = real(diagonal(inner, 0, -2, -1))  # eigenvectors keep their length
    inner = inner - (H(v) @ v) * row(cast(along, v.dtype))
    inner = over(inner, conj(row(w) - column(w)), on_diagonal(w))
    return solved(H(v), (inner @ H(v)) + column(gw) * H(v))


def _push_eig(t: Tensor, out: Tensor) -> Tensor:
    w, v = _parts(out)
    inner = solved(v, t @ v)
    turned = v @ over(inner, row(w) - column(w), on_diagonal(w))
    along = cast(real(sum(conj(v) * turned, axis=-2)), v.dtype)
    return concat([row(diagonal(inner, 0, -2, -1)), turned - v * row(along)], axis=-2)


eig_p: Primitive = declare(
    "eig",
    _run_eig,
    _infer_eig,
    vjp=[_pull_eig],
    jvp=[_push_eig],
    flops=25.0,
    samples=[*(Sample(a) for a in _SAMPLES), Bad((2, 3), error=ShapeError)],
    doc="Eigenvalues as a first row, eigenvectors below.",
)


def _pull_eigvals(ct: Tensor, x: Tensor) -> Tensor:
    v = _parts(barrier(eig_p, x))[1]
    return solved(H(v), column(ct) * H(v))


def _push_eigvals(t: Tensor, x: Tensor) -> Tensor:
    v = _parts(barrier(eig_p, x))[1]
    return diagonal(solved(v, t @ v), 0, -2, -1)


eigvals_p: Primitive = declare(
    "eigvals",
    lambda xp, x: xp.linalg.eigvals(x),
    lambda x: x.with_shape(x.shape[:-1]).with_dtype(complex_of(x.dtype)),
    vjp=[_pull_eigvals],
    jvp=[_push_eigvals],
    flops=10.0,
    samples=[Sample(a) for a in _SAMPLES],
)


def eig(a: TensorLike) -> EigResult:
    """Eigenvalues and eigenvectors of square matrices, always complex (NumPy's ``linalg.eig``: if need be).

    a: ``(..., n, n)``.  The gradient divides by the differences of eigenvalues, and through eigenvectors it has a
    meaning only for functions that do not depend on their phases.  Raises ShapeError, LinAlgError.
    """
    return EigResult(*_parts(barrier(eig_p, square("eig", a))))


def eigvals(a: TensorLike) -> Tensor:
    """The eigenvalues of square matrices, always complex (NumPy's ``linalg.eigvals``: if need be).

    a: ``(..., n, n)``.  The gradient exists for matrices that can be diagonalized; of others LinAlgError may be
    raised.  Raises ShapeError, LinAlgError.
    """
    return barrier(eigvals_p, square("eigvals", a))
