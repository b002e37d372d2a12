"""Systems of linear equations and inverses.

Derivatives: M. B. Giles, *Collected matrix derivative results for forward and reverse mode algorithmic
differentiation* (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tapegrad.core.aval import normalize_axis
from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.numerics import triangles
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import (
    H,
    check_square,
    column,
    declare,
    floating,
    infer_last,
    lower_part,
    square,
    stacked,
    triangle_of_product,
    upper_part,
)
from tapegrad.ops import conj, matrix_transpose, permute_dims, reshape, squeeze
from tapegrad.ops.dispatch import barrier, promote, tensor
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["inv", "solve", "solve_triangular", "tensorinv", "tensorsolve"]

_A = [[2.0, 1.0, 0.5], [-1.0, 3.0, 0.25], [0.5, -0.5, 1.5]]
_STACK = [_A, [[1.5, 0.0, 0.5], [0.25, 2.0, -1.0], [1.0, 0.5, -2.0]]]


solve_p: Primitive = declare(
    "solve",
    lambda xp, a, b: xp.linalg.solve(a, b),
    infer_last,
    vjp=[
        lambda ct, a, out: -(solved(H(a), ct) @ H(out)),
        lambda ct, a: solved(H(a), ct),
    ],
    jvp=[
        lambda t, a, out: -solved(a, t @ out),
        lambda t, a: solved(a, t),
    ],
    flops=0.7,
    samples=[
        Sample(_A, (3, 2)), Sample(_STACK, (2, 3, 1)), Sample((0, 0), (0, 2)), Sample((0, 2, 2), (0, 2, 2))
    ],
)  # fmt: skip


def solved(a: Tensor, b: Tensor) -> Tensor:
    """``a @ x = b`` for stacks of matrices."""
    return barrier(solve_p, *stacked("solve", a, b))


def _right_side(op: str, a: TensorLike, b: TensorLike) -> tuple[Tensor, Tensor, bool]:
    """The operands in one dtype, the right side as matrices, and whether it was one vector."""
    a, b = promote(op, (a, b), to=floating)
    check_square(op, a)
    if not b.ndim:
        raise ShapeError(f"{op}: the right side has no dimensions; give a vector of {a.shape[-1]} or a matrix")
    vector = b.ndim == 1
    b = column(b) if vector else b
    if b.shape[-2] != a.shape[-1]:
        raise ShapeError(f"{op}: matrices of shape {a.shape} do not fit a right side of {b.shape[-2]} rows")
    return a, b, vector


def solve(a: TensorLike, b: TensorLike) -> Tensor:
    """The ``x`` with ``a @ x = b`` (NumPy's ``linalg.solve``).

    a: ``(..., n, n)``; b: ``(n,)``, or ``(..., n, k)``; leading dimensions broadcast.  Raises ShapeError, and
    LinAlgError for a singular matrix (on CUDA CuPy gives infinities or NaN instead).
    """
    a, b, vector = _right_side("solve", a, b)
    out = solved(a, b)
    return squeeze(out, -1) if vector else out


inv_p: Primitive = declare(
    "inv",
    lambda xp, x: xp.linalg.inv(x),
    infer_last,
    vjp=[lambda ct, out: -(H(out) @ ct @ H(out))],
    jvp=[lambda t, out: -(out @ t @ out)],
    flops=2.0,
    samples=[
        Sample(_A), Sample(_STACK), Sample((0, 0)), Sample((0, 2, 2))
    ],
)  # fmt: skip


def inv(a: TensorLike) -> Tensor:
    """The inverse of each square matrix (NumPy's ``linalg.inv``).

    Raises ShapeError, and LinAlgError for a singular matrix (on CUDA CuPy gives infinities or NaN instead).
    """
    return barrier(inv_p, square("inv", a))


def _run_triangular(xp: Namespace, a: Array, b: Array, *, lower: bool, unit: bool, out: Array) -> None:
    triangles.solve(xp, a, b, lower, unit, out)


def _triangle(x: Tensor, lower: bool, unit: bool) -> Tensor:
    """The part of the operand that is read."""
    return lower_part(x, -int(unit)) if lower else upper_part(x, int(unit))


triangular_p: Primitive = declare(
    "solve_triangular",
    _run_triangular,
    infer_last,
    vjp=[
        lambda ct, a, out, *, lower, unit: triangle_of_product(
            triangular(H(a), ct, not lower, unit), -H(out), lower, -int(unit) if lower else int(unit)
        ),
        lambda ct, a, *, lower, unit: triangular(H(a), ct, not lower, unit),
    ],
    jvp=[
        lambda t, a, out, *, lower, unit: -triangular(a, _triangle(t, lower, unit) @ out, lower, unit),
        lambda t, a, *, lower, unit: triangular(a, t, lower, unit),
    ],
    into=True,
    flops=1.0,
    samples=[
        Sample(_A, (3, 2), lower=True, unit=False), Sample(_STACK, (2, 3, 1), lower=False, unit=False),
        Sample(_A, (3, 2), lower=True, unit=True), Sample(_A, (3, 2), lower=False, unit=True),
        Sample((0, 0), (0, 2), lower=True, unit=False), Sample((0, 2, 2), (0, 2, 2), lower=True, unit=False),
    ],
)  # fmt: skip


def triangular(a: Tensor, b: Tensor, lower: bool, unit: bool = False) -> Tensor:
    """``a @ x = b`` for stacks of triangular matrices."""
    return barrier(triangular_p, *stacked("solve_triangular", a, b), lower=lower, unit=unit)


_TRANS = {0: 0, "N": 0, 1: 1, "T": 1, 2: 2, "C": 2}


def solve_triangular(
    a: TensorLike, b: TensorLike, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """The ``x`` with ``a @ x = b``, reading one triangle of ``a`` (SciPy's ``linalg.solve_triangular``).

    a: ``(..., n, n)``; b: ``(n,)`` or ``(..., n, k)``; trans: 0 or "N", 1 or "T" (``a.mT @ x = b``), 2 or "C" (the
    conjugate transpose).  What is not read gets gradient 0, and so does the diagonal if it is taken for ones.  Raises
    ShapeError, and LinAlgError for a zero on the diagonal (infinities on CUDA).
    """
    if trans not in _TRANS:
        raise ShapeError(f"solve_triangular: trans={trans!r}; give 0 or 'N', 1 or 'T', 2 or 'C'")
    a, b, vector = _right_side("solve_triangular", a, b)
    way = _TRANS[trans]
    if way:
        a, lower = matrix_transpose(conj(a) if way == 2 else a), not lower
    out = triangular(a, b, bool(lower), bool(unit_diagonal))
    return squeeze(out, -1) if vector else out


def tensorinv(a: TensorLike, ind: int = 2) -> Tensor:
    """The inverse of ``a`` under ``tensordot`` over ``ind`` axes (NumPy's ``linalg.tensorinv``).

    Raises ShapeError unless the first ``ind`` axes hold as many elements as the others, LinAlgError if singular.
    """
    a = tensor("tensorinv", a)
    if ind <= 0:
        raise ShapeError(f"tensorinv: ind={ind}; it counts the first axes, so it is 1 or more")
    before, after = a.shape[:ind], a.shape[ind:]
    if prod(before) != prod(after):
        raise ShapeError(f"tensorinv: the first {ind} axes of {a.shape} hold {prod(before)}, the rest {prod(after)}")
    return reshape(inv(reshape(a, (prod(before), prod(after)))), (*after, *before))


def tensorsolve(a: TensorLike, b: TensorLike, axes: Sequence[int] | None = None) -> Tensor:
    """The ``x`` with ``tensordot(a, x, axes=x.ndim) = b`` (NumPy's ``linalg.tensorsolve``).

    axes: those of ``a`` to move to its end first.  Raises ShapeError, AxisError; LinAlgError if singular.
    """
    a, b = promote("tensorsolve", (a, b), to=floating)
    if axes is not None:
        moved = [normalize_axis("tensorsolve", k, a.ndim) for k in axes]
        a = permute_dims(a, (*(k for k in range(a.ndim) if k not in moved), *moved))
    shape = a.shape[b.ndim :]
    if prod(shape) != b.size or prod(a.shape[: b.ndim]) != b.size:
        raise ShapeError(f"tensorsolve: {a.shape} with {b.shape}: the axes of x, {shape}, hold {prod(shape)} elements")
    return reshape(solve(reshape(a, (b.size, b.size)), reshape(b, (b.size,))), shape)
