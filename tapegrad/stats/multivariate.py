"""Distributions of several numbers together."""

from __future__ import annotations

import math

from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.linalg import cholesky, eigvalsh, pinv, solve_triangular
from tapegrad.ops.create.creation import eye
from tapegrad.ops.dispatch import cast, promote, real_float
from tapegrad.ops.elementwise.arithmetic import abs, square
from tapegrad.ops.elementwise.exponential import exp, log
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take
from tapegrad.ops.reduce.reductions import max, sum
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import expand_dims, matrix_transpose, reshape
from tapegrad.special.entropies import xlogy
from tapegrad.special.gammas import gammaln
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["dirichlet", "multivariate_normal"]


class _Dirichlet:
    """The distribution of ``K`` proportions that sum to 1; ``alpha``: ``K`` positive numbers."""

    def __repr__(self) -> str:
        return "<distribution dirichlet>"

    def logpdf(self, x: TensorLike, alpha: TensorLike) -> Tensor:
        """The logarithm of the density at ``x`` of shape ``(K,)`` or ``(K, N)``, or without the last of the ``K`` rows.

        That the proportions sum to 1, and that ``alpha`` is positive, is not checked.  Raises ShapeError.
        """
        x, alpha = promote("dirichlet.logpdf", (x, alpha), real_float("dirichlet.logpdf"))
        if alpha.ndim != 1 or not x.ndim or x.shape[0] not in (alpha.size, alpha.size - 1):
            raise ShapeError(
                f"dirichlet.logpdf: x of shape {x.shape} and alpha of {alpha.shape}; need (K,) or (K, N) beside (K,)"
            )
        if x.shape[0] < alpha.size:
            x = concat([x, 1 - sum(x, axis=0, keepdims=True)], axis=0)
        powers = reshape(alpha - 1, (alpha.size, *[1] * (x.ndim - 1)))
        return sum(xlogy(powers, x), axis=0) - sum(gammaln(alpha)) + gammaln(sum(alpha))

    def pdf(self, x: TensorLike, alpha: TensorLike) -> Tensor:
        """The density at ``x``; see ``logpdf``."""
        return exp(self.logpdf(x, alpha))


class _MultivariateNormal:
    """Normal distribution of ``d`` values; ``mean``: ``(d,)`` or number; ``cov``: ``(d, d)``, a diagonal or number."""

    def __repr__(self) -> str:
        return "<distribution multivariate_normal>"

    def logpdf(
        self, x: TensorLike, mean: TensorLike | None = None, cov: TensorLike = 1, allow_singular: bool = False
    ) -> Tensor:
        """The logarithm of the density at ``x`` of shape ``(..., d)`` (or ``(...)`` where ``d`` is 1).

        The covariance is positive definite, and its lower triangle is read; allow_singular: or semidefinite, and the
        density is that on its range, -inf beside it.  Raises ShapeError, LinAlgError.
        """
        x, mean, cov = self._operands("multivariate_normal.logpdf", x, mean, cov)
        d = cov.shape[-1]
        if d == 1 and (not x.ndim or x.shape[-1] != 1):
            x = expand_dims(x, -1)
        if x.shape[-1:] != (d,):
            raise ShapeError(
                f"multivariate_normal.logpdf: x of shape {x.shape} for {d} dimensions; its last must be {d}"
            )
        off = x - mean
        if allow_singular:
            return _on_range(off, cov)
        root = cholesky(cov)
        rows = reshape(off, (off.size // d, d))
        unit = solve_triangular(root, matrix_transpose(rows), lower=True)
        return -0.5 * (reshape(sum(square(unit), axis=0), off.shape[:-1]) + d * math.log(2 * math.pi)) - _log_det(root)

    def pdf(
        self, x: TensorLike, mean: TensorLike | None = None, cov: TensorLike = 1, allow_singular: bool = False
    ) -> Tensor:
        """The density at ``x``; see ``logpdf``."""
        return exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: TensorLike | None = None, cov: TensorLike = 1) -> Tensor:
        """The differential entropy, in nats; it does not depend on ``mean``."""
        _, _, cov = self._operands("multivariate_normal.entropy", 0.0, mean, cov)
        return _log_det(cholesky(cov)) + 0.5 * cov.shape[-1] * (math.log(2 * math.pi) + 1)

    def _operands(
        self, op: str, x: TensorLike, mean: TensorLike | None, cov: TensorLike
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x``, the mean of shape (d,) or () and the covariance as a matrix."""
        x, mean, cov = promote(op, (x, 0.0 if mean is None else mean, cov), real_float(op))
        if mean.ndim > 1 or cov.ndim > 2 or (cov.ndim == 2 and cov.shape[0] != cov.shape[1]):
            raise ShapeError(f"{op}: mean of shape {mean.shape} and cov of {cov.shape}; need (d,) and (d, d)")
        d = cov.shape[-1] if cov.ndim else mean.size
        if mean.ndim and mean.size != d:
            raise ShapeError(f"{op}: mean of shape {mean.shape} beside cov of shape {cov.shape}; need (d,) and (d, d)")
        if cov.ndim < 2:
            cov = cov * eye(d, dtype=cov.dtype, device=cov.device)
        return x, mean, cov


def _on_range(off: Tensor, cov: Tensor) -> Tensor:
    """The logarithm of a normal density on the range of a semidefinite covariance (SciPy's bounds for what is 0)."""
    spread = eigvalsh(cov)
    least = 1e6 * dtypes.finfo(cov.dtype).eps * max(abs(spread))
    kept = spread > least
    rank, volume = sum(cast(kept, cov.dtype)), sum(where(kept, log(where(kept, spread, 1.0)), 0.0))
    inverse = pinv(cov, rtol=1e6 * dtypes.finfo(cov.dtype).eps)
    beside = off - off @ inverse @ cov
    density = -0.5 * (sum(off @ inverse * off, axis=-1) + rank * math.log(2 * math.pi) + volume)
    return where(sum(square(beside), axis=-1) > square(least), -math.inf, density)


def _log_det(root: Tensor) -> Tensor:
    """The sum of the logarithms of a Cholesky factor's diagonal."""
    n = root.shape[-1]
    return sum(log(take(reshape(root, (n * n,)), list(range(0, n * n, n + 1)), axis=0)))


dirichlet = _Dirichlet()
multivariate_normal = _MultivariateNormal()
