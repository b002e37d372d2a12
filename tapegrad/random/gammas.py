"""The gamma distribution, and those made of gamma numbers.

Logarithms are drawn: a gamma number of a small shape underflows, but a ratio of two need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Sample, general
from tapegrad.device import dtypes
from tapegrad.device.numerics import sampling
from tapegrad.errors import ShapeError
from tapegrad.ops.dispatch import barrier, tensor
from tapegrad.ops.elementwise.arithmetic import sqrt
from tapegrad.ops.elementwise.exponential import exp
from tapegrad.ops.elementwise.sigmoid import sigmoid
from tapegrad.ops.rows.softmax import softmax
from tapegrad.random.drawing import Draw, lengths_of
from tapegrad.random.stream import Generator
from tapegrad.special.moments import tail_ratio
from tapegrad.tensor import Tensor


def _infer(a: ShapedArray, *, key: int, counter: int, dtype: Any) -> ShapedArray:
    return a.with_dtype(dtype)


log_gamma_p = general(
    "random_log_gamma",
    impl=sampling.log_gamma,
    infer=_infer,
    # Where the logarithm of a gamma number moves as its shape does, its probability held.  Not what differences of
    # draws show: there another attempt may be accepted.
    vjp=[lambda ct, out, a: -ct * tail_ratio(a, out)],
    jvp=[lambda t, out, a: -t * tail_ratio(a, out)],
    samples=[Sample([1, 2, 7], key=3, counter=0, dtype=dtypes.float64)],
    doc="The logarithm of a gamma number.",
)


def _log_gamma(d: Draw, a: Tensor) -> Tensor:
    """Logarithms of gamma numbers of shape ``a``, in the shape of the draw."""
    a = d.full(a)
    key, counter = d.generator.take(sampling.blocks(a.size))
    return barrier(log_gamma_p, a, key=key, counter=counter, dtype=d.wide)


def gamma(
    shape: int | Sequence[int] = (),
    alpha: Any = 1.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Gamma numbers of shape ``alpha`` and mean ``alpha * scale``; differentiable in both.

    In ``alpha`` by implicit reparameterisation: as if each were the quantile of a fixed probability (Figurnov, Mohamed
    and Mnih, "Implicit reparameterization gradients", 2018).  NaN where ``alpha`` is not positive.  Raises DTypeError,
    ShapeError.
    """
    d = Draw("gamma", shape, (alpha, scale), dtype, generator, device)
    alpha, scale = d.parameters
    return d.done(scale * exp(_log_gamma(d, alpha)))


def loggamma(
    shape: int | Sequence[int] = (),
    alpha: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Logarithms of gamma numbers of shape ``alpha``, right where the numbers underflow.  See :func:`gamma`."""
    d = Draw("loggamma", shape, (alpha,), dtype, generator, device)
    (alpha,) = d.parameters
    return d.done(_log_gamma(d, alpha))


def chisquare(
    shape: int | Sequence[int] = (),
    df: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Chi-square numbers of ``df`` degrees of freedom, differentiable in it.  See :func:`gamma`."""
    d = Draw("chisquare", shape, (df,), dtype, generator, device)
    (df,) = d.parameters
    return d.done(2 * exp(_log_gamma(d, 0.5 * df)))


def beta(
    shape: int | Sequence[int] = (),
    a: Any = 1.0,
    b: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Beta numbers, differentiable in both shapes: of two gamma numbers the part of one.  See :func:`gamma`."""
    d = Draw("beta", shape, (a, b), dtype, generator, device)
    a, b = d.parameters
    return d.done(sigmoid(_log_gamma(d, a) - _log_gamma(d, b)))


def f(
    shape: int | Sequence[int] = (),
    dfnum: Any = 1.0,
    dfden: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Numbers of Fisher's F distribution, differentiable in both degrees of freedom.  See :func:`gamma`."""
    d = Draw("f", shape, (dfnum, dfden), dtype, generator, device)
    dfnum, dfden = d.parameters
    ratio = exp(_log_gamma(d, 0.5 * dfnum) - _log_gamma(d, 0.5 * dfden))
    return d.done(ratio * dfden / dfnum)


def standard_t(
    shape: int | Sequence[int] = (),
    df: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Student's numbers of ``df`` degrees of freedom, differentiable in it.  See :func:`gamma`."""
    d = Draw("standard_t", shape, (df,), dtype, generator, device)
    (df,) = d.parameters
    return d.done(d.normal() * sqrt(0.5 * df) * exp(-0.5 * _log_gamma(d, 0.5 * df)))


def dirichlet(
    alpha: Any,
    shape: int | Sequence[int] = (),
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Proportions that sum to 1, ``shape`` times those of ``alpha``, of shape ``(..., K)``; differentiable in it.

    See :func:`gamma`.  Raises DTypeError, ShapeError.
    """
    alpha = tensor("random.dirichlet", alpha)
    if not alpha.ndim:
        raise ShapeError("random.dirichlet: alpha is a number; need an array of shape (..., K)")
    d = Draw("dirichlet", (*lengths_of(shape), *alpha.shape), (alpha,), dtype, generator, device)
    return d.done(softmax(_log_gamma(d, d.parameters[0]), axis=-1))
