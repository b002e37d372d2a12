"""Functions of matrices, and the Sylvester equation.

The derivative of a function of matrices in direction ``e`` stands in the corner of its value at ``[[a, e], [0, a]]``
(R. Mathias, *A chain rule for matrix functions and applications*, 1996; A. H. Al-Mohy and N. J. Higham, 2009, for
``expm``).
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import (
    H,
    check_square,
    complex_of,
    declare,
    floating,
    matrices,
    one_by_one,
    square,
    stacked,
)
from tapegrad.ops import broadcast_to, concat, equal, imag, real, zeros_like
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["expm", "expm_frechet", "logm", "solve_sylvester", "sqrtm"]

_A = [[2.0, 1.0, 0.5], [-1.0, 3.0, 0.25], [0.5, -0.5, 1.5]]
_STACK = [[[0.5, 1.0], [-1.0, 0.25]], [[-0.5, 0.5], [0.25, 1.0]]]


def _corner(function: Callable[[Tensor], Tensor], a: Tensor, e: Tensor) -> Tensor:
    """The derivative of ``function`` at ``a`` in direction ``e``."""
    shape = (*e.shape[:-2], *a.shape[-2:])  # a Jacobian's rows give e one axis more than a has
    a, n = broadcast_to(a, shape), a.shape[-1]
    block = concat([concat([a, e], axis=-1), concat([zeros_like(a), a], axis=-1)], axis=-2)
    return function(block)[..., :n, n:]


def _expm(x: Tensor) -> Tensor:
    return barrier(expm_p, x)


expm_p: Primitive = declare(
    "expm",
    lambda xp, x: one_by_one(xp, scipy.linalg(xp).expm, (x,), x.shape[-2:], x.dtype),
    lambda x: check_square("expm", x).with_dtype(floating(x.dtype)),
    vjp=[lambda ct, x: _corner(_expm, H(x), ct)],
    jvp=[lambda t, x: _corner(_expm, x, t)],
    flops=30.0,
    samples=[
        Sample([[0.5, 1.0], [-1.0, 0.25]]), Sample(_STACK), Sample([[0.25]]), Sample((0, 0)), Sample((0, 2, 2)),
        Bad((2, 3), error=ShapeError),
    ],
)  # fmt: skip


def expm(A: TensorLike) -> Tensor:
    """The exponential of each square matrix (SciPy's ``linalg.expm``).

    A: ``(..., n, n)``.  Each order of derivative takes an exponential of twice the size.  Raises ShapeError.
    """
    return _expm(square("expm", A))


def expm_frechet(
    A: TensorLike, E: TensorLike, method: str | None = None, compute_expm: bool = True
) -> Tensor | tuple[Tensor, Tensor]:
    """``expm(A)`` and its derivative in direction ``E`` (SciPy's ``linalg.expm_frechet``).

    A, E: ``(..., n, n)``; method is accepted for SciPy, and ignored; compute_expm=False: the derivative alone.  Raises
    ShapeError.
    """
    a, e = matrices("expm_frechet", A, E)
    check_square("expm_frechet", a)
    if a.shape[-2:] != e.shape[-2:]:
        raise ShapeError(f"expm_frechet: a direction of shape {e.shape} for matrices of shape {a.shape}")
    derivative = _corner(_expm, *stacked("expm_frechet", a, e))
    return (_expm(a), derivative) if compute_expm else derivative


def _infer_sylvester(a: ShapedArray, b: ShapedArray, q: ShapedArray) -> ShapedArray:
    check_square("solve_sylvester", a)
    check_square("solve_sylvester", b)
    return q.with_dtype(floating(q.dtype))


def _sylvester(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    return barrier(sylvester_p, *stacked("solve_sylvester", a, b, q))


sylvester_p: Primitive = declare(
    "solve_sylvester",
    lambda xp, a, b, q: one_by_one(xp, scipy.on_host(xp, "solve_sylvester"), (a, b, q), q.shape[-2:], q.dtype),
    _infer_sylvester,
    vjp=[
        lambda ct, a, b, out: -(_sylvester(H(a), H(b), ct) @ H(out)),
        lambda ct, a, b, out: -(H(out) @ _sylvester(H(a), H(b), ct)),
        lambda ct, a, b: _sylvester(H(a), H(b), ct),
    ],
    jvp=[
        lambda t, a, b, out: -_sylvester(a, b, t @ out),
        lambda t, a, b, out: -_sylvester(a, b, out @ t),
        lambda t, a, b: _sylvester(a, b, t),
    ],
    flops=50.0,
    samples=[Sample(_A, _STACK[0], (3, 2)), Sample(_STACK, [[[2.0]], [[3.0]]], (2, 2, 1))],
)


def solve_sylvester(a: TensorLike, b: TensorLike, q: TensorLike) -> Tensor:
    """The ``x`` with ``a @ x + x @ b = q`` (SciPy's ``linalg.solve_sylvester``).

    a: ``(..., m, m)``, b: ``(..., n, n)``, q: ``(..., m, n)``; no eigenvalue of ``a`` may be that of ``-b``.  On CUDA
    it is computed on the host.  Raises ShapeError, LinAlgError.
    """
    a, b, q = matrices("solve_sylvester", a, b, q)
    check_square("solve_sylvester", a)
    check_square("solve_sylvester", b)
    if q.shape[-2:] != (a.shape[-1], b.shape[-1]):
        raise ShapeError(f"solve_sylvester: q of shape {q.shape} for matrices of shape {a.shape} and {b.shape}")
    return _sylvester(a, b, q)


def _principal(name: str, double: bool) -> Callable[..., Array]:
    """The implementation of a function that is complex for real matrices with negative eigenvalues."""

    def run(xp: Namespace, x: Array) -> Array:
        inner = dtypes.result_type(x.dtype, dtypes.float64) if double else x.dtype
        stacks = (x.astype(inner, copy=False),)
        return one_by_one(xp, scipy.on_host(xp, name), stacks, x.shape[-2:], complex_of(x.dtype))

    return run


sqrtm_p: Primitive = declare(
    "sqrtm",
    _principal("sqrtm", double=False),
    lambda x: check_square("sqrtm", x).with_dtype(complex_of(x.dtype)),
    vjp=[lambda ct, out: _sylvester(H(out), H(out), ct)],
    jvp=[lambda t, out: _sylvester(out, out, cast(t, out.dtype))],
    flops=30.0,
    samples=[Sample([[2.0, 1.0], [-1.0, 3.0]]), Sample([[[1.0]], [[4.0]]])],
)


def _log(x: Tensor) -> Tensor:
    return barrier(logm_p, x)


logm_p: Primitive = declare(
    "logm",
    _principal("logm", double=True),
    lambda x: check_square("sqrtm", x).with_dtype(complex_of(x.dtype)),
    vjp=[lambda ct, x: H(_corner(_log, cast(x, ct.dtype), H(ct)))],  # on the same side of the branch cut as x
    jvp=[lambda t, x: _corner(_log, x, t)],
    flops=60.0,
    samples=[Sample([[2.0, 1.0], [-1.0, 3.0]]), Sample([[[1.0]], [[4.0]]])],
)


def _real_if_so(prim: Primitive, A: TensorLike) -> Tensor:
    x = square(prim.name, A)
    out = barrier(prim, x)
    if x.dtype.kind == "c":
        return out
    so = unrecorded(lambda: bool(all_of(equal(imag(out), 0))))
    return cast(real(out), x.dtype) if so else out


def sqrtm(A: TensorLike) -> Tensor:
    """The principal square root of each matrix (SciPy's ``linalg.sqrtm``).

    A: ``(..., n, n)``, evaluated: the result of real matrices is real if all its elements are, else complex.  The
    gradient is infinite or NaN, or raises LinAlgError, for singular matrices.  On CUDA it is computed on the host.
    Raises ShapeError.
    """
    return _real_if_so(sqrtm_p, A)


def logm(A: TensorLike) -> Tensor:
    """The principal logarithm of each matrix (SciPy's ``linalg.logm``).

    A: ``(..., n, n)``, evaluated: the result of real matrices is real if all its elements are, else complex; computed
    in double precision.  On CUDA it is computed on the host.  Raises ShapeError.
    """
    return _real_if_so(logm_p, A)
