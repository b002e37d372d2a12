"""Tails of the gamma and beta distributions, weighted by powers of their scores, over the density at the cut.

With ``u`` the logarithm of a gamma variable and ``v`` the logit of a beta variable, the densities are

    q(u) = exp(a u - e**u) / Gamma(a)        q(v) = t**a (1 - t)**b / B(a, b),  t = 1 / (1 + e**-v)

The tail is the one on whose far side the density does not rise, so it may be minus the upper one: its derivatives
obey the same rules.  An integral over a distance ``w`` from 0 to infinity is the trapezoidal rule in ``y`` with
``w = scale * exp(y - exp(-y))`` (Takahasi and Mori, "Double exponential formulas for numerical integration", 1974).
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.device.numerics import special
from tapegrad.device.types import Array, Namespace

_NODES = 128
_LEAST = -3.7  # exp(y - exp(-y)) is below 1e-19 there
_GONE = 45.0  # exp(-45) is negligible


def _integral(xp: Namespace, scale: Array, most: Array, weight: Callable[[Array], Array]) -> Array:
    """The integral of ``weight(w)``, which varies over ``scale`` and has vanished at ``most``."""
    step = (xp.log(most / scale) - _LEAST) / (_NODES - 1)
    total = 0.0
    for k in range(_NODES):
        y = _LEAST + k * step
        near = xp.exp(-y)
        w = scale * xp.exp(y - near)
        total = total + weight(w) * (w * (1 + near))
    return total * step


def gamma_tail(xp: Namespace, a: Array, u: Array, n: int) -> Array:
    """The tail at ``u`` of ``(u - digamma(a))**n q(u)``, over ``q(u)``."""
    with special.quiet(xp):
        x = xp.exp(u)
        centre = special.value(xp, "digamma", (a,))
        low = x <= xp.maximum(a, 1.0)
        scale = 1 / (xp.sqrt(x) + xp.abs(a - x))
        below = 46 / a + xp.minimum(1.0, 12 / xp.sqrt(a))
        most = xp.where(low, below, xp.minimum(4.2, 10 / xp.sqrt(x)))
        side = xp.where(low, -1.0, 1.0)

        def weight(w: Array) -> Array:
            w = side * w
            value = xp.exp(a * w - x * xp.expm1(w))
            return value if not n else value * (u + w - centre) ** n

        return -side * _integral(xp, scale, xp.maximum(most, scale), weight)


def beta_tail(xp: Namespace, a: Array, b: Array, v: Array, i: int, j: int) -> Array:
    """The tail at ``v`` of ``(log t - E log t)**i (log(1 - t) - E log(1 - t))**j q(v)``, over ``q(v)``."""
    with special.quiet(xp):
        both = special.value(xp, "digamma", (a + b,))
        centres = special.value(xp, "digamma", (a,)) - both, special.value(xp, "digamma", (b,)) - both
        # Mirrored where the upper tail is asked for, so that the rest computes a lower one.
        t, rest = 1 / (1 + xp.exp(-v)), 1 / (1 + xp.exp(v))
        low = xp.where(t * (a + b) <= a, (rest * (a + b) > 1) | (t < rest), (t * (a + b) <= 1) & (t < rest))
        side = xp.where(low, 1.0, -1.0)
        near, far = xp.where(low, a, b), xp.where(low, b, a)
        t, v = xp.where(low, t, rest), side * v
        logs = -xp.logaddexp(0.0, -v), -xp.logaddexp(0.0, v)
        curve = a * b / (a + b)
        scale = 1 / (xp.abs(near - (near + far) * t) + xp.sqrt((near + far) * t * (1 - t)))
        most = xp.minimum(1.0, 14 / xp.sqrt(curve)) + 1.7 * _GONE / curve

        def weight(w: Array) -> Array:
            bend = xp.log1p(xp.expm1(-w) * t)
            value = xp.exp(-near * w - (near + far) * bend)
            own, other = logs[0] - w - bend, logs[1] - bend
            first, second = xp.where(low, own, other) - centres[0], xp.where(low, other, own) - centres[1]
            return value * first**i * second**j

        return side * _integral(xp, scale, xp.maximum(most, scale), weight)
