"""Systems of equations with banded and Toeplitz matrices."""

from __future__ import annotations

from operator import index

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import declare, floating, infer_last
from tapegrad.linalg.solving import solve
from tapegrad.linalg.structured import toeplitz
from tapegrad.ops import conj, flip, pad, reshape, stack, sum
from tapegrad.ops.dispatch import barrier, promote, tensor
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["solve_banded", "solve_toeplitz"]

_BANDS = [[0.0, 0.5, -1.0, 0.25], [2.0, 3.0, -2.0, 1.5], [1.0, -0.5, 0.5, 0.0]]


def _run_banded(xp: Namespace, x: Array, b: Array, *, lower: int, upper: int) -> Array:
    if not b.size:
        return xp.zeros_like(b)
    return scipy.on_host(xp, "solve_banded", (lower, upper))(x, b, check_finite=False)


def _turned(x: Tensor, lower: int, upper: int) -> Tensor:
    """The bands of the conjugate transpose: band ``i`` lies ``upper - i`` above the diagonal, and moves by as much."""
    rows = [_shifted(x[i], upper - i) for i in range(lower + upper + 1)]
    return conj(flip(stack(rows), axis=0))


def _shifted(x: Tensor, by: int) -> Tensor:
    """``y[j] = x[j + by]``, zeros from outside."""
    inside = x[by:] if by >= 0 else x[:by]
    gap = x.shape[0] - inside.shape[0]
    return pad(inside, [(0, gap) if by >= 0 else (gap, 0)] + [(0, 0)] * (x.ndim - 1))


def _outer_bands(rows: Tensor, columns: Tensor, lower: int, upper: int) -> Tensor:
    """The bands of ``rows @ columns.mH``: in band ``i``, at ``j``, the product of row ``j + i - upper`` and ``j``."""
    return stack([sum(_shifted(rows, i - upper) * conj(columns), axis=-1) for i in range(lower + upper + 1)])


def _banded(x: Tensor, b: Tensor, lower: int, upper: int) -> Tensor:
    return barrier(banded_p, x, b, lower=lower, upper=upper)


def _pull_bands(ct: Tensor, x: Tensor, out: Tensor, *, lower: int, upper: int) -> Tensor:
    return -_outer_bands(_banded(_turned(x, lower, upper), ct, upper, lower), out, lower, upper)


def _times_bands(x: Tensor, v: Tensor, lower: int, upper: int) -> Tensor:
    """The banded matrix times ``v``."""
    total = x[upper][:, None] * v
    for i in range(lower + upper + 1):
        if i != upper:
            total = total + _shifted(x[i][:, None] * v, upper - i)
    return total


banded_p: Primitive = declare(
    "solve_banded",
    _run_banded,
    infer_last,
    stacks=False,
    vjp=[
        _pull_bands,
        lambda ct, x, *, lower, upper: _banded(_turned(x, lower, upper), ct, upper, lower),
    ],
    jvp=[
        lambda t, x, out, *, lower, upper: -_banded(x, _times_bands(t, out, lower, upper), lower, upper),
        lambda t, x, *, lower, upper: _banded(x, t, lower, upper),
    ],
    samples=[
        Sample(_BANDS, (4, 2), lower=1, upper=1), Sample(_BANDS[1:], (4, 1), lower=1, upper=0),
        Sample(_BANDS[1:2], (4, 2), lower=0, upper=0),
    ],
)  # fmt: skip


def solve_banded(l_and_u: tuple[int, int], ab: TensorLike, b: TensorLike) -> Tensor:
    """The ``x`` with ``a @ x = b`` for a banded ``a`` (SciPy's ``linalg.solve_banded``).

    l_and_u: how many diagonals lie below and above the main one; ab: ``(l + u + 1, n)``, with element ``(i, j)`` of
    ``a`` at ``[u + i - j, j]``; b: ``(n,)`` or ``(n, k)``.  Elements of ``ab`` outside ``a`` get gradient 0.  On CUDA
    the host computes it.  Raises ShapeError, LinAlgError.
    """
    lower, upper = map(index, l_and_u)
    x, b = promote("solve_banded", (ab, b), to=floating)
    if x.ndim != 2 or b.ndim not in (1, 2) or x.shape != (lower + upper + 1, b.shape[0]):
        raise ShapeError(f"solve_banded: bands of shape {x.shape} for (l, u) = {(lower, upper)} and b of {b.shape}")
    out = _banded(x, reshape(b, (b.shape[0], b.size // max(b.shape[0], 1))), lower, upper)
    return reshape(out, b.shape)


def solve_toeplitz(c_or_cr: TensorLike, b: TensorLike) -> Tensor:
    """The ``x`` with ``toeplitz(c, r) @ x = b`` (SciPy's ``linalg.solve_toeplitz``), by elimination.

    c_or_cr: the first column, or a tuple of that and the first row; b: ``(n,)`` or ``(n, k)``.  Raises ShapeError,
    LinAlgError.
    """
    c, r = c_or_cr if isinstance(c_or_cr, tuple) else (c_or_cr, None)
    return solve(toeplitz(c, r), tensor("solve_toeplitz", b))
