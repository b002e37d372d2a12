"""Determinants, with gradients that are right for singular matrices, too."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from tapegrad.core.primitive import Bad, Primitive, Sample
from tapegrad.core.state import unrecorded
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import H, check_square, declare, floating, square
from tapegrad.linalg.singular import svd
from tapegrad.linalg.solving import inv, solved
from tapegrad.ops.create.creation import ones_like
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.elementwise.arithmetic import negative
from tapegrad.ops.elementwise.comparison import equal, less
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.exponential import log
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.diagonals import diag_embed, diagonal
from tapegrad.ops.shape.join import concat, stack
from tapegrad.ops.shape.shape import matrix_transpose
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["SlogdetResult", "det", "logdet", "slogdet"]

_A = [[2.0, 1.0, 0.5], [-1.0, 3.0, 0.25], [0.5, -0.5, 1.5]]
_FOUR = [[2.0, 1.0, 0.5, 0.0], [-1.0, 3.0, 0.25, 1.0], [0.5, -0.5, 1.5, 0.75], [0.5, 1.0, -0.25, -2.0]]
_STACK = [[[2.0, 1.0], [-1.0, 3.0]], [[1.5, 0.5], [0.25, -2.5]]]
_SINGULAR = [[1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 2.0, 1.0], [1.5, 1.0, 5.0, 5.0], [0.0, 1.0, -1.0, 2.0]]
_CORNER = 3
"""The size of the block whose determinant is written out: with up to so many singular values of 0 all derivatives are
right.
"""


def _small_cofactors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Determinant and cofactors of matrices of up to 3 rows, written out."""
    n = x.shape[-1]
    if n == 1:
        return x[..., 0, 0], ones_like(x)
    a = [[x[..., i, j] for j in range(n)] for i in range(n)]
    if n == 2:
        rows = [[a[1][1], negative(a[1][0])], [negative(a[0][1]), a[0][0]]]
    else:
        rows = [
            [a[i - 2][j - 2] * a[i - 1][j - 1] - a[i - 2][j - 1] * a[i - 1][j - 2] for j in range(3)] for i in range(3)
        ]
    det = sum(stack([p * q for p, q in zip(a[0], rows[0], strict=True)], axis=-1), axis=-1)
    return det, stack([stack(r, axis=-1) for r in rows], axis=-2)


def cofactors(x: Tensor) -> Tensor:
    """The cofactors of each matrix, which are the derivative of its determinant.

    ``x = u @ b @ vh`` with the factors of the singular value decomposition *held constant*: ``b`` is diagonal in value,
    but varies as ``x`` does.  By its Schur complement in the block of the smallest singular values, ``det(b)`` is the
    determinant of a block with an inverse times that of a 3 by 3 one, whose cofactors are polynomials.
    """
    n = x.shape[-1]
    if n <= _CORNER:
        return _small_cofactors(x)[1] if n else x
    u, s, vh = unrecorded(partial(svd, full_matrices=False), x)
    turn = unrecorded(lambda: det(u) * det(vh))
    lost = unrecorded(lambda: equal(s[..., : n - _CORNER], 0))  # more than three are 0: all is 0
    b = H(u) @ x @ H(vh)
    middle = _corner_cofactors(b, diag_embed(cast(lost, b.dtype)))
    middle = where(lost[..., -1:, None], 0, middle)
    return turn[..., None, None] * (conj(u) @ middle @ conj(vh))


def _corner_cofactors(b: Tensor, mended: Tensor) -> Tensor:
    k = b.shape[-1] - _CORNER
    p, q, r, corner = b[..., :k, :k] + mended, b[..., :k, k:], b[..., k:, :k], b[..., k:, k:]
    inverse = inv(p)
    pq, rp = inverse @ q, r @ inverse
    small, inner = _small_cofactors(corner - r @ pq)
    left, below = matrix_transpose(rp) @ inner, inner @ matrix_transpose(pq)
    first = small[..., None, None] * matrix_transpose(inverse) + left @ matrix_transpose(pq)
    rows = [concat([first, -left], axis=-1), concat([-below, inner], axis=-1)]
    return det(p)[..., None, None] * concat(rows, axis=-2)


det_p: Primitive = declare(
    "det",
    lambda xp, x: xp.linalg.det(x),
    lambda x: check_square("det", x).with_shape(x.shape[:-2]).with_dtype(floating(x.dtype)),
    vjp=[lambda ct, x: ct[..., None, None] * conj(cofactors(x))],
    jvp=[lambda t, x: sum(cofactors(x) * t, axis=(-2, -1))],
    flops=0.7,
    samples=[
        Sample(_A), Sample(_FOUR), Sample(_SINGULAR), Sample(_STACK), Sample([[3.0]]), Sample((0, 0)),
        Sample((0, 2, 2)), Bad((2, 3), error=ShapeError),
    ],
)  # fmt: skip


def det(a: TensorLike) -> Tensor:
    """The determinant of each square matrix (NumPy's ``linalg.det``).

    x: ``(..., n, n)``.  The gradient, the matrix of cofactors, is right for singular matrices, too; so are derivatives
    of any order while at most three singular values are 0.  Raises ShapeError.
    """
    return barrier(det_p, square("det", a))


class SlogdetResult(NamedTuple):
    """The sign (a number of magnitude 1, or 0) and the logarithm of the magnitude of a determinant."""

    sign: Tensor
    logabsdet: Tensor


def _run_slogdet(xp: Namespace, x: Array) -> Array:
    sign, logabs = xp.linalg.slogdet(x)
    return xp.stack([sign, logabs.astype(sign.dtype)], axis=-1)


def _pull_slogdet(ct: Tensor, x: Tensor, out: Tensor) -> Tensor:
    g = ct[..., 1]
    if x.dtype.kind == "c":
        g = cast(real(g), x.dtype) - 1j * cast(imag(conj(ct[..., 0]) * out[..., 0]), x.dtype)
    return g[..., None, None] * H(inv(x))


def _push_slogdet(t: Tensor, x: Tensor, out: Tensor) -> Tensor:
    trace = sum(diagonal(solved(x, t), 0, -2, -1), axis=-1)
    if x.dtype.kind != "c":
        return stack([0 * trace, trace], axis=-1)
    turned = 1j * cast(imag(trace), x.dtype) * out[..., 0]
    return stack([turned, cast(real(trace), x.dtype)], axis=-1)


slogdet_p: Primitive = declare(
    "slogdet",
    _run_slogdet,
    lambda x: check_square("slogdet", x).with_shape((*x.shape[:-2], 2)).with_dtype(floating(x.dtype)),
    vjp=[_pull_slogdet],
    jvp=[_push_slogdet],
    flops=0.7,
    samples=[Sample(_A), Sample(_STACK), Sample((0, 0)), Sample((0, 2, 2)), Bad((3,), error=ShapeError)],
    doc="The sign, then the logarithm.",
)


def slogdet(a: TensorLike) -> SlogdetResult:
    """Sign and logarithm of the magnitude of each determinant (NumPy's ``linalg.slogdet``).

    x: ``(..., n, n)``; a singular matrix gives 0 and -inf, and asking for its gradient raises LinAlgError (on CUDA:
    infinities or NaN).  The sign of a real matrix has gradient 0.  Raises ShapeError.
    """
    packed = barrier(slogdet_p, square("slogdet", a))
    return SlogdetResult(packed[..., 0], real(packed[..., 1]))


def logdet(x: TensorLike) -> Tensor:
    """The logarithm of each determinant (PyTorch's ``logdet``): NaN where a real one is negative, -inf where it is 0.

    x: ``(..., n, n)``.  Gradient as of :func:`slogdet`.  Raises ShapeError, LinAlgError.
    """
    sign, logabs = slogdet(x)
    if sign.dtype.kind == "c":
        return cast(logabs, sign.dtype) + log(sign)
    return where(less(sign, 0), float("nan"), logabs)
