"""Distributions of one number."""

from __future__ import annotations

import math

from tapegrad.ops import floor, log, log1p, square, where
from tapegrad.special.entropies import xlog1py, xlogy
from tapegrad.special.gammas import gammaln
from tapegrad.special.incomplete import betainc, betaincc, betaincinv, betaln, gammainc, gammaincc, gammaincinv, stdtr
from tapegrad.special.normal import log_ndtr, ndtr, ndtri
from tapegrad.stats._base import INF, Continuous, Discrete
from tapegrad.tensor import Tensor

__all__ = ["beta", "chi2", "gamma", "norm", "poisson", "t"]

_LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)

norm = Continuous(
    "norm",
    (),
    lambda y: -0.5 * square(y) - _LOG_SQRT_TWO_PI,
    lambda y: ndtr(y),
    lambda y: ndtr(-y),
    log_below=lambda y: log_ndtr(y),
    log_above=lambda y: log_ndtr(-y),
    quantile=lambda q: ndtri(q),
)
gamma = Continuous(
    "gamma",
    ("a",),
    lambda y, a: xlogy(a - 1, y) - y - gammaln(a),
    lambda y, a: gammainc(a, y),
    lambda y, a: gammaincc(a, y),
    lower=0.0,
    middle=1.0,
    quantile=lambda q, a: gammaincinv(a, q),
)
chi2 = Continuous(
    "chi2",
    ("df",),
    lambda y, df: xlogy(0.5 * df - 1, y) - 0.5 * y - gammaln(0.5 * df) - (0.5 * math.log(2)) * df,
    lambda y, df: gammainc(0.5 * df, 0.5 * y),
    lambda y, df: gammaincc(0.5 * df, 0.5 * y),
    lower=0.0,
    middle=1.0,
    quantile=lambda q, df: 2 * gammaincinv(0.5 * df, q),
)
beta = Continuous(
    "beta",
    ("a", "b"),
    lambda y, a, b: xlogy(a - 1, y) + xlog1py(b - 1, -y) - betaln(a, b),
    lambda y, a, b: betainc(a, b, y),
    lambda y, a, b: betaincc(a, b, y),
    lower=0.0,
    upper=1.0,
    middle=0.5,
    quantile=lambda q, a, b: betaincinv(a, b, q),
)


def _student_quantile(q: Tensor, df: Tensor) -> Tensor:
    """By the beta distribution of ``df / (df + t * t)``, on the nearer side of 0."""
    left = q < 0.5
    x = betaincinv(0.5 * df, 0.5, 2 * where(left, q, 1 - q))
    size = (df * (1 - x) / x) ** 0.5
    return where(left, -size, size)


t = Continuous(
    "t",
    ("df",),
    lambda y, df: -betaln(0.5 * df, 0.5) - 0.5 * (log(df) + (df + 1) * log1p(square(y) / df)),
    lambda y, df: stdtr(df, y),
    lambda y, df: stdtr(df, -y),
    quantile=_student_quantile,
)


def _poisson(y: Tensor, mu: Tensor) -> Tensor:
    whole = floor(y) == y
    return where(whole | (y != y), xlogy(y, mu) - gammaln(y + 1) - mu, -INF)


poisson = Discrete(
    "poisson",
    ("mu",),
    _poisson,
    lambda y, mu: gammaincc(floor(y) + 1, mu),
    lambda y, mu: gammainc(floor(y) + 1, mu),
)
