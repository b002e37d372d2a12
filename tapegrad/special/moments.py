"""Primitives behind derivatives in the parameters of the gamma and beta distributions (see ``_quadrature``).

Each is a tail of the density, weighted by powers of its scores, over the density at the cut; its derivatives are more
of the same kind, so there are derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.types import Array, Namespace
from tapegrad.ops import exp, sigmoid, softplus
from tapegrad.ops.dispatch import barrier
from tapegrad.special import _quadrature
from tapegrad.special._declare import barrier_of
from tapegrad.special.gammas import digamma, polygamma
from tapegrad.tensor import Tensor


def _wide(xp: Namespace, f: Callable[..., Array], arrays: tuple[Array, ...], *orders: int) -> Array:
    """``f`` computed in float64."""
    return f(xp, *(x.astype(xp.float64) for x in arrays), *orders).astype(arrays[-1].dtype)


def _trigamma(x: Tensor) -> Tensor:
    return polygamma(1, x)


def _power(x: Tensor, n: int) -> Tensor | float:
    return x**n if n else 1.0


def _gamma_in_a(out: Tensor, a: Tensor, u: Tensor, *, n: int) -> Tensor:
    slope = barrier(gamma_tail_p, a, u, n=n + 1) - out * (u - digamma(a))
    return slope if not n else slope - n * _trigamma(a) * barrier(gamma_tail_p, a, u, n=n - 1)


def _gamma_in_u(out: Tensor, a: Tensor, u: Tensor, *, n: int) -> Tensor:
    return _power(u - digamma(a), n) - out * (a - exp(u))


gamma_tail_p: Primitive = barrier_of(
    "gamma_tail",
    ("a", "u"),
    lambda xp, a, u, *, n: _wide(xp, _quadrature.gamma_tail, (a, u), n),
    [_gamma_in_a, _gamma_in_u],
    [Sample((3, 4), (3, 4), n=1, domain=(0.3, 0.9)), Sample([2.0, 3.0], [1.5, 0.1], n=0), Sample((0,), (0,), n=2)],
    "A tail of ``(u - digamma(a))**n exp(a u - e**u)``, over its density at ``u``.",
    ("n",),
)


def tail_ratio(a: Tensor, u: Tensor) -> Tensor:
    """Minus the derivative in ``a`` of a gamma variable's logarithm ``u``, at fixed probability."""
    return barrier(gamma_tail_p, a, u, n=1)


def _beta(a: Tensor, b: Tensor, v: Tensor, m: int, n: int) -> Tensor:
    return barrier(beta_tail_p, a, b, v, m=m, n=n)


def _scores(a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    both = digamma(a + b)
    return -softplus(-v) - digamma(a) + both, -softplus(v) - digamma(b) + both


def _beta_in_a(out: Tensor, a: Tensor, b: Tensor, v: Tensor, *, m: int, n: int) -> Tensor:
    slope = _beta(a, b, v, m + 1, n) - out * _scores(a, b, v)[0]
    if m:
        slope = slope - m * (_trigamma(a) - _trigamma(a + b)) * _beta(a, b, v, m - 1, n)
    return slope if not n else slope + n * _trigamma(a + b) * _beta(a, b, v, m, n - 1)


def _beta_in_b(out: Tensor, a: Tensor, b: Tensor, v: Tensor, *, m: int, n: int) -> Tensor:
    slope = _beta(a, b, v, m, n + 1) - out * _scores(a, b, v)[1]
    if n:
        slope = slope - n * (_trigamma(b) - _trigamma(a + b)) * _beta(a, b, v, m, n - 1)
    return slope if not m else slope + m * _trigamma(a + b) * _beta(a, b, v, m - 1, n)


def _beta_in_v(out: Tensor, a: Tensor, b: Tensor, v: Tensor, *, m: int, n: int) -> Tensor:
    first, second = _scores(a, b, v)
    return _power(first, m) * _power(second, n) - out * (a * sigmoid(-v) - b * sigmoid(v))


beta_tail_p: Primitive = barrier_of(
    "beta_tail",
    ("a", "b", "v"),
    lambda xp, a, b, v, *, m, n: _wide(xp, _quadrature.beta_tail, (a, b, v), m, n),
    [_beta_in_a, _beta_in_b, _beta_in_v],
    [
        Sample([2.0, 0.7], [1.5, 3.0], [0.4, -1.0], m=1, n=0),
        Sample([2.0, 0.7], [1.5, 3.0], [0.9, -0.1], m=0, n=1),
        Sample((0,), (0,), (0,), m=1, n=1),
    ],
    "A tail of the beta density in the logit ``v``, weighted by powers of its scores, over the density at ``v``.",
    ("m", "n"),
)
