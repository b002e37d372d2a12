"""The gamma distribution, and those made of gamma numbers.

Logarithms are drawn: a gamma number of a small shape underflows, but a ratio of two need not.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.primitive import Sample, general
from tapegrad.device import Device, dtypes
from tapegrad.device.numerics import sampling
from tapegrad.errors import ShapeError
from tapegrad.ops import exp, sigmoid, softmax, sqrt
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.random.drawing import NONNEGATIVE_SCALE, Domain, Draw, distribution, infer_drawn, lengths_of, within
from tapegrad.random.stream import Generator
from tapegrad.special.moments import tail_ratio
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

log_gamma_p = general(
    "random_log_gamma",
    impl=sampling.log_gamma,
    infer=infer_drawn,
    draws=True,
    # The derivative of the logarithm of a gamma number in its shape, at fixed probability.  Differences of draws do
    # not show it, since another attempt may be accepted.
    vjp=[lambda ct, out, a: -ct * tail_ratio(a, out)],
    jvp=[lambda t, out, a: -t * tail_ratio(a, out)],
    samples=[Sample([1, 2, 7], key=3, counter=0, dtype=dtypes.float64)],
    doc="The logarithm of a gamma number.",
)


def _log_gamma(d: Draw, a: Tensor) -> Tensor:
    """Logarithms of gamma numbers of shape ``a``, in the shape of the draw."""
    a = d.full(a)
    key, counter = d.generator.draw(a.size, sampling.blocks)
    return barrier(log_gamma_p, a, key=key, counter=counter, dtype=d.wide)


_ALPHA: Domain = {"alpha > 0": lambda alpha: alpha <= 0}
_DF: Domain = {"df > 0": lambda df: df <= 0}


@distribution({**_ALPHA, **NONNEGATIVE_SCALE}, alpha=1.0, scale=1.0)
def gamma(d: Draw, alpha: Tensor, scale: Tensor) -> Tensor:
    """Gamma numbers of shape ``alpha`` and mean ``alpha * scale``; differentiable in both.

    In ``alpha`` by implicit reparameterisation: as if each were the quantile of a fixed probability (Figurnov, Mohamed
    and Mnih, "Implicit reparameterization gradients", 2018).  NaN where a parameter is.  Raises DomainError where
    ``alpha`` is not positive or ``scale`` negative, DTypeError, ShapeError.
    """
    return scale * exp(_log_gamma(d, alpha))


@distribution(_ALPHA, alpha=1.0)
def loggamma(d: Draw, alpha: Tensor) -> Tensor:
    """Logarithms of gamma numbers of shape ``alpha``, right where the numbers underflow.  See :func:`gamma`."""
    return _log_gamma(d, alpha)


@distribution(_DF, df=1.0)
def chisquare(d: Draw, df: Tensor) -> Tensor:
    """Chi-square numbers of ``df`` degrees of freedom, differentiable in it.  See :func:`gamma`."""
    return 2 * exp(_log_gamma(d, 0.5 * df))


@distribution({"a > 0": lambda a: a <= 0, "b > 0": lambda b: b <= 0}, a=1.0, b=1.0)
def beta(d: Draw, a: Tensor, b: Tensor) -> Tensor:
    """Beta numbers, differentiable in both shapes: of two gamma numbers the part of one.  See :func:`gamma`."""
    return sigmoid(_log_gamma(d, a) - _log_gamma(d, b))


@distribution({"dfnum > 0": lambda dfnum: dfnum <= 0, "dfden > 0": lambda dfden: dfden <= 0}, dfnum=1.0, dfden=1.0)
def f(d: Draw, dfnum: Tensor, dfden: Tensor) -> Tensor:
    """Numbers of Fisher's F distribution, differentiable in both degrees of freedom.  See :func:`gamma`."""
    ratio = exp(_log_gamma(d, 0.5 * dfnum) - _log_gamma(d, 0.5 * dfden))
    return ratio * dfden / dfnum


@distribution(_DF, df=1.0)
def standard_t(d: Draw, df: Tensor) -> Tensor:
    """Student's numbers of ``df`` degrees of freedom, differentiable in it.  See :func:`gamma`."""
    return d.normal() * sqrt(0.5 * df) * exp(-0.5 * _log_gamma(d, 0.5 * df))


def dirichlet(
    alpha: TensorLike,
    shape: int | Sequence[int] = (),
    dtype: DTypeLike | None = None,
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Proportions that sum to 1, ``shape`` times those of ``alpha``, of shape ``(..., K)``; differentiable in it.

    See :func:`gamma`.  Raises DomainError where ``alpha`` is not positive, DTypeError, ShapeError.
    """
    alpha = tensor("random.dirichlet", alpha)
    if not alpha.ndim:
        raise ShapeError("random.dirichlet: alpha is a number; need an array of shape (..., K)")
    d = Draw("dirichlet", (*lengths_of(shape), *alpha.shape), (alpha,), dtype, generator, device)
    within("dirichlet", _ALPHA, {"alpha": d.parameters[0]})
    return cast(softmax(_log_gamma(d, d.parameters[0]), axis=-1), dtypes.asdtype(dtype))
