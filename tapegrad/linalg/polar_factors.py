"""The polar decomposition: computed by the singular value decomposition, but not differentiated through it.

With ``a = u p`` and ``p`` positive definite, ``p dp + dp p = da^H a + a^H da``, a Sylvester equation that is regular
also where singular values are equal, and ``du = (da - u dp) p^-1``.  See N. J. Higham, *Functions of Matrices* (2008),
chapter 8.
"""

from __future__ import annotations

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import H, declare, infer_last, matrix
from tapegrad.linalg.functions import solve_sylvester
from tapegrad.linalg.solving import solve
from tapegrad.ops.dispatch import barrier
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["polar"]


def _run_polar(xp: Namespace, a: Array) -> Array:
    w, _, vh = xp.linalg.svd(a, full_matrices=False)
    return w @ vh


def _hermitian_part(x: Tensor) -> Tensor:
    return (x + H(x)) * 0.5


def _over(x: Tensor, p: Tensor) -> Tensor:
    """``x p^-1`` for a Hermitian ``p``."""
    return H(solve(p, H(x)))


def _pull_polar(ct: Tensor, a: Tensor, out: Tensor) -> Tensor:
    p = _hermitian_part(H(out) @ a)
    g = _over(ct, p)
    return g - 2 * a @ solve_sylvester(p, p, _hermitian_part(H(out) @ g))


def _push_polar(t: Tensor, a: Tensor, out: Tensor) -> Tensor:
    p = _hermitian_part(H(out) @ a)
    return _over(t - out @ solve_sylvester(p, p, 2 * _hermitian_part(H(a) @ t)), p)


polar_p: Primitive = declare(
    "polar",
    _run_polar,
    infer_last,
    vjp=[_pull_polar],
    jvp=[_push_polar],
    flops=22.0,
    samples=[
        Sample([[2.0, 1.0], [-1.0, 3.0], [0.5, -0.5]]),
        Sample([[[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]]),  # two singular values are equal
    ],
)


def polar(a: TensorLike, side: str = "right") -> tuple[Tensor, Tensor]:
    """``u, p`` with ``a = u @ p`` (side ``right``) or ``p @ u`` (``left``), ``p`` positive semidefinite.

    a: ``(..., m, n)`` of full rank where a derivative is asked: at others it does not exist (SciPy's ``linalg.polar``).
    Raises ShapeError, LinAlgError.
    """
    a = matrix("polar", a)
    if side not in ("right", "left"):
        raise ShapeError(f"polar: side={side!r}; give 'right' or 'left'")
    tall = a.shape[-2] >= a.shape[-1]
    u = barrier(polar_p, a) if tall else H(barrier(polar_p, H(a)))
    return u, _hermitian_part(H(u) @ a if side == "right" else a @ H(u))
