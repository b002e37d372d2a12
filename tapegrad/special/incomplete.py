"""The beta function, the incomplete gamma and beta functions, and their inverses."""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.primitive import Sample
from tapegrad.ops import exp, log, log1p, sign, softplus, where
from tapegrad.ops.dispatch import barrier
from tapegrad.special._declare import pointwise
from tapegrad.special.entropies import xlog1py, xlogy
from tapegrad.special.gammas import digamma, gammaln
from tapegrad.special.moments import beta_tail_p, tail_ratio
from tapegrad.tensor import Tensor

__all__ = [
    "beta", "betainc", "betaincc", "betainccinv", "betaincinv", "betaln", "gammainc", "gammaincc", "gammainccinv",
    "gammaincinv", "stdtr",
]  # fmt: skip

_INF = float("inf")


def _beta_slope(a: Tensor, b: Tensor) -> Tensor:
    return digamma(a) - digamma(a + b)


beta = pointwise(
    "beta", [lambda out, a, b: out * _beta_slope(a, b), lambda out, a, b: out * _beta_slope(b, a)],
    operands=("a", "b"), domain=(0.4, 3.0), doc="``gamma(a) gamma(b) / gamma(a + b)``.",
)  # fmt: skip
betaln = pointwise(
    "betaln", [lambda a, b: _beta_slope(a, b), lambda a, b: _beta_slope(b, a)], operands=("a", "b"),
    domain=(0.4, 3.0), doc="Logarithm of the absolute value of ``beta``.",
)  # fmt: skip


def gamma_density(a: Tensor, x: Tensor) -> Tensor:
    """``x**(a - 1) exp(-x) / gamma(a)``: 0 or inf at 0 as ``a`` says, 0 at infinity."""
    ends = x == _INF
    x = where(ends, 1.0, x)
    return where(ends, 0.0, exp(xlogy(a - 1, x) - x - gammaln(a)))


def _gamma_in_a(a: Tensor, x: Tensor) -> Tensor:
    within = (x > 0) & (x < _INF)
    u = log(where(within, x, 1.0))
    return where(within, tail_ratio(a, u) * exp(a * u - exp(u) - gammaln(a)), 0.0)


_GAMMAS = [Sample([[0.6], [2.5]], (2, 3), domain=(0.3, 2.6)), Sample(1.5, 2.0), Sample((0, 3), (0, 3))]
gammainc = pointwise(
    "gammainc", [_gamma_in_a, gamma_density], operands=("a", "x"), samples=_GAMMAS,
    doc="The lower incomplete gamma function over ``gamma(a)``; derivatives in both, in ``a`` by quadrature.",
)  # fmt: skip
gammaincc = pointwise(
    "gammaincc", [lambda a, x: -_gamma_in_a(a, x), lambda a, x: -gamma_density(a, x)], operands=("a", "x"),
    samples=_GAMMAS, doc="``1 - gammainc(a, x)``, precise where it is small.",
)  # fmt: skip


def _inverse_in_a(out: Tensor, a: Tensor) -> Tensor:
    """The derivative of the quantile in ``a`` at fixed probability, by the implicit function theorem."""
    within = (out > 0) & (out < _INF)
    x = where(within, out, 1.0)
    return where(within, -x * tail_ratio(a, log(x)), 0.0)


_QUANTILES = [Sample([[0.6], [2.5]], (2, 3), domain=(0.2, 0.8)), Sample(1.5, 0.4), Sample((0, 3), (0, 3))]
gammaincinv = pointwise(
    "gammaincinv", [lambda out, a: _inverse_in_a(out, a), lambda out, a: 1 / gamma_density(a, out)],
    operands=("a", "y"), samples=_QUANTILES, doc="The ``x`` with ``gammainc(a, x) = y``.",
)  # fmt: skip
gammainccinv = pointwise(
    "gammainccinv", [lambda out, a: _inverse_in_a(out, a), lambda out, a: -1 / gamma_density(a, out)],
    operands=("a", "y"), samples=_QUANTILES, doc="The ``x`` with ``gammaincc(a, x) = y``.",
)  # fmt: skip


def beta_density(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """``x**(a - 1) (1 - x)**(b - 1) / beta(a, b)``: 0 or inf at the ends as ``a`` and ``b`` say."""
    return exp(xlogy(a - 1, x) + xlog1py(b - 1, -x) - betaln(a, b))


def _beta_in(first: int, second: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The derivative of ``betainc`` in ``a`` (1, 0) or ``b`` (0, 1)."""

    def partial(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        within = (x > 0) & (x < 1)
        return where(within, beta_tail_at(a, b, _logit(where(within, x, 0.5)), first, second), 0.0)

    return partial


def beta_tail_at(a: Tensor, b: Tensor, v: Tensor, first: int, second: int) -> Tensor:
    """The derivative of ``betainc`` in ``a`` (1, 0) or ``b`` (0, 1), where the logit of its argument is ``v``."""
    density = exp(-a * softplus(-v) - b * softplus(v) - betaln(a, b))
    return barrier(beta_tail_p, a, b, v, m=first, n=second) * density


def _logit(x: Tensor) -> Tensor:
    return log(x) - log1p(-x)


_BETAS = [
    Sample([0.7, 2.0, 3.0], [1.4, 0.6, 2.5], [0.2, 0.7, 0.5]), Sample(1.5, 2.0, 0.3), Sample((0, 3), (0, 3), (0, 3)),
]  # fmt: skip
_in_a, _in_b = _beta_in(1, 0), _beta_in(0, 1)
betainc = pointwise(
    "betainc", [_in_a, _in_b, beta_density], operands=("a", "b", "x"), samples=_BETAS,
    doc="The incomplete beta function over ``beta(a, b)``; derivatives in all three, in ``a`` and ``b`` by quadrature.",
)  # fmt: skip
betaincc = pointwise(
    "betaincc",
    [lambda a, b, x: -_in_a(a, b, x), lambda a, b, x: -_in_b(a, b, x), lambda a, b, x: -beta_density(a, b, x)],
    operands=("a", "b", "x"),
    samples=_BETAS,
    doc="``1 - betainc(a, b, x)``, precise where it is small.",
)


def _quantile_in(first: int, second: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def partial(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        within = (out > 0) & (out < 1)
        x = where(within, out, 0.5)
        return where(within, -x * (1 - x) * barrier(beta_tail_p, a, b, _logit(x), m=first, n=second), 0.0)

    return partial


betaincinv = pointwise(
    "betaincinv", [_quantile_in(1, 0), _quantile_in(0, 1), lambda out, a, b: 1 / beta_density(a, b, out)],
    operands=("a", "b", "y"), samples=_BETAS, doc="The ``x`` with ``betainc(a, b, x) = y``.",
)  # fmt: skip
betainccinv = pointwise(
    "betainccinv", [_quantile_in(1, 0), _quantile_in(0, 1), lambda out, a, b: -1 / beta_density(a, b, out)],
    operands=("a", "b", "y"), samples=_BETAS, doc="The ``x`` with ``betaincc(a, b, x) = y``.",
)  # fmt: skip


def _student_density(df: Tensor, x: Tensor) -> Tensor:
    return exp(-0.5 * (log(df) + (df + 1) * log1p(x * x / df)) - betaln(0.5 * df, 0.5))


def _student_in_df(df: Tensor, x: Tensor) -> Tensor:
    """Left of 0 the function is half of ``betainc(df / 2, 1/2, df / (df + x * x))``; it is odd about 1/2.

    At 0 that has a kink in each half: there the line with the right slope stands for it.
    """
    there = x != 0
    square = where(there, x * x, 1.0)
    tail = beta_tail_at(0.5 * df, 0.5 + 0 * df, log(df) - log(square), 1, 0)
    density = _student_density(df, x)
    slope = density * 0.5 * (digamma(0.5 * (df + 1)) - digamma(0.5 * df))
    return where(there, -0.25 * sign(x) * tail, slope * x) - 0.5 * x / df * density


stdtr = pointwise(
    "stdtr", [_student_in_df, _student_density], operands=("df", "x"),
    samples=[Sample([[0.8], [3.5]], (2, 3), domain=(-2.0, 2.0)), Sample(1.5, 2.0), Sample((0, 3), (0, 3))],
    doc="Student's cumulative function of ``df`` degrees of freedom; derivatives in both, in ``df`` by quadrature.",
)  # fmt: skip
