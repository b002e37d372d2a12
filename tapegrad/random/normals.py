"""Distributions made of normal numbers."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.device import Device, dtypes
from tapegrad.errors import ShapeError
from tapegrad.linalg import cholesky
from tapegrad.ops import clip, exp, expand_dims, sum, where
from tapegrad.ops.dispatch import cast, promote, real_float
from tapegrad.random.drawing import Draw, distribution, drawn_dtype, lengths_of
from tapegrad.random.stream import Generator
from tapegrad.random.uniforms import normal
from tapegrad.special.normal import ndtr, ndtri
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


def standard_normal(
    shape: int | Sequence[int] = (),
    dtype: DTypeLike | None = None,
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Normal numbers of mean 0 and deviation 1: :func:`normal`, by NumPy's name."""
    return normal(shape, dtype=dtype, generator=generator, device=device)


@distribution({"sigma >= 0": lambda sigma: sigma < 0}, mean=0.0, sigma=1.0)
def lognormal(d: Draw, mean: Tensor, sigma: Tensor) -> Tensor:
    """Numbers whose logarithm is normal, differentiable in both parameters.

    Raises DomainError for a negative ``sigma``, DTypeError, ShapeError.
    """
    return exp(mean + sigma * d.normal())


@distribution(
    {"lower < upper": lambda lower, upper: lower >= upper, "std >= 0": lambda std: std < 0},
    lower=-2.0, upper=2.0, mean=0.0, std=1.0,
)  # fmt: skip
def truncated_normal(d: Draw, lower: Tensor, upper: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normal numbers within bounds, which are given in deviations from the mean; differentiable in all four.

    By inversion, on the side of 0 where the cumulative function is precise.  Raises DomainError for
    bounds in the wrong order and a negative ``std``, DTypeError, ShapeError.
    """
    flipped = lower > 0
    low, high = where(flipped, -upper, lower), where(flipped, -lower, upper)
    first, last = ndtr(low), ndtr(high)
    z = clip(ndtri(first + (last - first) * d.open()), low, high)
    return mean + std * where(flipped, -z, z)


def multivariate_normal(
    mean: TensorLike,
    cov: TensorLike,
    shape: int | Sequence[int] = (),
    dtype: DTypeLike | None = None,
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Normal vectors: ``shape`` of them, each ``(d,)``; differentiable in ``mean`` and, by Cholesky, in ``cov``.

    mean: ``(d,)``; cov: ``(d, d)``, positive definite, of which the lower triangle is read.  Raises ShapeError,
    LinAlgError.
    """
    mean, cov = promote("random.multivariate_normal", (mean, cov), real_float("random.multivariate_normal"))
    if mean.ndim != 1 or cov.shape != (mean.size, mean.size):
        raise ShapeError(
            f"random.multivariate_normal: mean of shape {mean.shape} and cov of {cov.shape}; need (d,) and (d, d)"
        )
    wide = drawn_dtype(dtype)
    z = normal((*lengths_of(shape), mean.size), dtype=wide, generator=generator, device=device or mean.device)
    root = cholesky(cast(cov, wide))
    return cast(cast(mean, wide) + sum(expand_dims(z, -2) * root, axis=-1), dtypes.asdtype(dtype))
