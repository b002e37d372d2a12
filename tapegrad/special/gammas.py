"""The gamma function and what is made of it."""

from __future__ import annotations

import math
from numbers import Integral

from tapegrad.core.primitive import Sample
from tapegrad.device.numerics import special
from tapegrad.errors import ShapeError
from tapegrad.ops import cos, floor, sin, where
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.special._declare import Function, barrier_of, pointwise, scipy_float, together, with_order
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "binom", "comb", "digamma", "factorial", "gamma", "gammaln", "gammasgn", "lgamma", "loggamma", "multigammaln",
    "mvlgamma", "poch", "polygamma", "psi", "rgamma", "zeta", "zetac",
]  # fmt: skip

gammaln = lgamma = pointwise(
    "gammaln", [lambda x: digamma(x)], cxx="lgamma({x})", domain=(0.3, 4.0),
    doc="Logarithm of the absolute value of the gamma function: inf at 0, -1, -2, ...; the gradient is NaN there"
    " (at 0: -inf).",
)  # fmt: skip
loggamma = pointwise(
    "loggamma", [lambda x: digamma(x)], domain=(0.3, 4.0),
    doc="Logarithm of the gamma function of a real number; NaN for negative ones, where it is complex.",
)  # fmt: skip
digamma: Function = pointwise(
    "digamma", [lambda x: polygamma(1, x)], cxx="tg_digamma({x})", domain=(0.3, 4.0),
    doc="The derivative of ``gammaln``; NaN at -1, -2, ..., -inf at 0.",
)  # fmt: skip
psi = digamma
gammasgn = pointwise("gammasgn", [0.0], domain=(0.3, 4.0), doc="The sign of the gamma function; gradient 0.")
gamma = pointwise(
    "gamma", [lambda out, x: out * digamma(x)], cxx="tgamma({x})", domain=(0.3, 4.0),
    doc="The gamma function; at 0, -1, -2, ..., the gradient is no number or infinite, as the function is.",
)  # fmt: skip


def _rgamma_slope(x: Tensor) -> Tensor:
    """By reflection left of 1/2: smooth at 0, -1, -2, ..., where ``digamma`` has poles."""
    left = x < 0.5
    low, high = where(left, x, 0.0), where(left, 1.0, x)
    turn = math.pi * (low - 2 * floor(low / 2))
    reflected = gamma(1 - low) * (cos(turn) - sin(turn) * digamma(1 - low) / math.pi)
    return where(left, reflected, -digamma(high) * rgamma(high))


rgamma = pointwise(
    "rgamma", [_rgamma_slope], domain=(-3.4, 3.4), doc="``1 / gamma(x)``: 0 at 0, -1, -2, ..., and smooth there."
)
_ORDERS = [[1.0], [2.0], [3.0]]
_polygamma_p = barrier_of(
    "polygamma",
    ("n", "x"),
    # The power of -1 in SciPy's formula is taken in float64 whatever x is.
    lambda xp, n, x: special.value(xp, "polygamma", (n.astype("float64"), x.astype("float64"))).astype(x.dtype),
    [None, lambda n, x: polygamma(n + 1, x)],
    [Sample(_ORDERS, (3, 4), domain=(0.5, 3.0)), Sample(1.0, (), domain=(0.5, 3.0)), Sample((1, 3), (0, 3))],
    "The ``n``-th derivative of ``digamma``.",
)


def polygamma(n: TensorLike, x: TensorLike) -> Tensor:
    """The ``n``-th derivative of ``digamma`` at ``x`` (SciPy's ``polygamma``); it has no gradient in ``n``.

    n: 0, 1, 2, ..., a number or an array that broadcasts with ``x``; the dtype is that of ``x``.
    """
    return barrier(_polygamma_p, *with_order("polygamma", n, x))


_zeta_p = barrier_of(
    "zeta",
    ("x", "q"),
    lambda xp, x, q: special.value(xp, "zeta", (x, q)),
    [None, lambda x, q: -x * zeta(x + 1, q)],
    [Sample([[2.0], [3.5]], (2, 3), domain=(0.5, 3.0)), Sample(2.0, 1.5), Sample((1, 3), (0, 3))],
    "Hurwitz's zeta function.",
)
_riemann_p = barrier_of(
    "riemann_zeta",
    ("x",),
    lambda xp, x: special.riemann_zeta(xp, x),
    [None],
    [Sample((3, 4), domain=(1.5, 4.0)), Sample((0,))],
    "Riemann's zeta function.",
)


def zeta(x: TensorLike, q: TensorLike | None = None) -> Tensor:
    """The sum of ``(k + q)**-x`` over ``k = 0, 1, ...`` (SciPy's ``zeta``); ``q=None``: Riemann's, ``q = 1``.

    The gradient is that in ``q``; asking for one in ``x`` raises NoGradientError.
    """
    return barrier(_riemann_p, *together("zeta", (x,))) if q is None else barrier(_zeta_p, *together("zeta", (x, q)))


zetac = pointwise(
    "zetac", [None], domain=(1.5, 4.0),
    doc="Riemann's zeta function, less 1; asking for its gradient raises NoGradientError.",
)  # fmt: skip


def multigammaln(a: TensorLike, d: int) -> Tensor:
    """Logarithm of the multivariate gamma function of dimension ``d`` (SciPy's ``multigammaln``).

    Defined for ``a > (d - 1) / 2``.  Raises ShapeError unless ``d`` is a positive integer.
    """
    if not isinstance(d, (int, Integral)) or d < 1:
        raise ShapeError(f"multigammaln: the dimension d must be a positive integer, got {d!r}")
    (a,) = promote("multigammaln", (a,), scipy_float("multigammaln"))
    total = gammaln(a)
    for j in range(1, d):
        total = total + gammaln(a - j / 2)
    return total + d * (d - 1) * 0.25 * math.log(math.pi)


mvlgamma = multigammaln


def factorial(n: TensorLike) -> Tensor:
    """``gamma(n + 1)``, 0 for negative ``n`` (SciPy's ``factorial`` with ``exact=False``)."""
    (n,) = promote("factorial", (n,), scipy_float("factorial"))
    return where(n < 0, 0.0, gamma(where(n < 0, 0.0, n) + 1))


def _pole(x: Tensor) -> Tensor:
    """Whether ``x`` is 0, -1, -2, ..."""
    return (x <= 0) & (floor(x) == x)


def _binom_slope(of: Tensor, against: Tensor) -> Tensor:
    """``digamma(of) - digamma(against)``; 0 at a pole of either, where ``binom`` is 0 or not smooth."""
    poles = _pole(of) | _pole(against)
    return where(poles, 0.0, digamma(where(poles, 1.0, of)) - digamma(where(poles, 1.0, against)))


def _binom_in_n(out: Tensor, n: Tensor, k: Tensor) -> Tensor:
    beyond = _pole(n - k + 1) & ~_pole(n + 1)
    smooth = out * _binom_slope(n + 1, n - k + 1)
    return where(beyond, gamma(where(beyond, n + 1, 1.0)) * rgamma(k + 1) * _rgamma_slope(n - k + 1), smooth)


def _binom_in_k(out: Tensor, n: Tensor, k: Tensor) -> Tensor:
    beyond = (_pole(n - k + 1) | _pole(k + 1)) & ~_pole(n + 1)
    top = gamma(where(beyond, n + 1, 1.0))
    at = top * (_rgamma_slope(k + 1) * rgamma(n - k + 1) - rgamma(k + 1) * _rgamma_slope(n - k + 1))
    return where(beyond, at, out * _binom_slope(n - k + 1, k + 1))


binom = pointwise(
    "binom", [_binom_in_n, _binom_in_k], operands=("n", "k"), domain=(1.2, 3.0),
    doc="The binomial coefficient of real numbers, ``gamma(n + 1) / gamma(k + 1) / gamma(n - k + 1)``.",
)  # fmt: skip


def comb(N: TensorLike, k: TensorLike) -> Tensor:
    """How many ways there are to choose ``k`` of ``N`` (SciPy's ``comb`` with ``exact=False``); 0 where there is none.

    As ``binom`` it is a smooth function of real numbers, and so are its gradients; they are 0 where it is 0.
    """
    n, k = together("comb", (N, k))
    some = (k <= n) & (n >= 0) & (k >= 0)
    return where(some, binom(where(some, n, 1.0), where(some, k, 0.0)), 0.0)


poch = pointwise(
    "poch",
    [lambda out, z, m: out * (digamma(z + m) - digamma(z)), lambda out, z, m: out * digamma(z + m)],
    operands=("z", "m"),
    domain=(0.4, 2.5),
    doc="Pochhammer's symbol ``gamma(z + m) / gamma(z)``; at a pole of either the gradient is NaN.",
)
