"""Distributions of one number: shapes, location and scale, support."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from tapegrad.ops import exp, log, where
from tapegrad.ops.dispatch import promote, real_float
from tapegrad.tensor import Tensor, TensorLike

INF = float("inf")
Formula = Callable[..., Tensor]


def _log(x: Tensor) -> Tensor:
    """``log(x)`` of a probability, without warning or infinite gradient where that is 0."""
    gone = x == 0
    return where(gone, -INF, log(where(gone, 1.0, x)))


@dataclass(frozen=True)
class Univariate:
    """A distribution, made of formulas of the standardised number and the shapes.

    Every method takes the number, the ``shapes``, ``loc=0`` and, of a continuous distribution, ``scale=1``, by position
    or name as in scipy.stats; all of them broadcast, and have gradients.  Outside the support density and gradients
    are 0.  Where a shape or the scale is not positive, the value is NaN.
    """

    name: str
    shapes: tuple[str, ...]
    log_density: Formula
    below: Formula
    above: Formula
    lower: float = -INF
    upper: float = INF
    middle: float = 0.0
    """Some number of the support, at which a formula is evaluated instead of one outside."""
    scaled: bool = True
    log_below: Formula | None = None
    log_above: Formula | None = None

    def __repr__(self) -> str:
        return f"<distribution {self.name}>"

    def cdf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The probability of at most the number."""
        return self._cumulative("cdf", self.below, 0.0, 1.0, args, named)

    def sf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The probability of more than the number, precise where it is small."""
        return self._cumulative("sf", self.above, 1.0, 0.0, args, named)

    def logcdf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The logarithm of ``cdf``."""
        formula = self.log_below or (lambda *xs: _log(self.below(*xs)))
        return self._cumulative("logcdf", formula, -INF, 0.0, args, named)

    def logsf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The logarithm of ``sf``."""
        formula = self.log_above or (lambda *xs: _log(self.above(*xs)))
        return self._cumulative("logsf", formula, 0.0, -INF, args, named)

    def _mass(self, op: str, args: tuple[TensorLike, ...], named: dict[str, TensorLike]) -> Tensor:
        """The logarithm of the density."""
        x, shapes, loc, scale, wrong = self._arguments(op, "x", args, named)
        y = (x - loc) / scale
        beyond = (y < self.lower) | (y > self.upper)
        mass = self.log_density(where(beyond, self.middle, y), *shapes) - log(scale)
        return where(wrong, float("nan"), where(beyond, -INF, mass))

    def _cumulative(
        self,
        op: str,
        formula: Formula,
        low: float,
        high: float,
        args: tuple[TensorLike, ...],
        named: dict[str, TensorLike],
    ) -> Tensor:
        """A formula within the support; ``low`` and ``high``: the values below and above it."""
        x, shapes, loc, scale, wrong = self._arguments(op, "x", args, named)
        y = (x - loc) / scale
        under, over = y < self.lower, y > self.upper
        value = formula(where(under | over, self.middle, y), *shapes)
        return where(wrong, float("nan"), where(under, low, where(over, high, value)))

    def _arguments(
        self, op: str, first: str, args: tuple[TensorLike, ...], named: dict[str, TensorLike]
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
        """The number, the shapes, location and scale of one float dtype; where one is invalid (and made 1)."""
        label = f"{self.name}.{op}"
        kind = inspect.Parameter
        last = [("loc", 0), ("scale", 1)] if self.scaled else [("loc", 0)]
        parameters = [kind(s, kind.POSITIONAL_OR_KEYWORD) for s in (first, *self.shapes)]
        parameters += [kind(s, kind.POSITIONAL_OR_KEYWORD, default=d) for s, d in last]
        try:
            bound = inspect.Signature(parameters).bind(*args, **named)
        except TypeError as e:
            raise TypeError(f"{label}: {e}; it takes {inspect.Signature(parameters)}") from None
        bound.apply_defaults()
        x, *others = promote(label, tuple(bound.arguments.values()), real_float(label))
        loc = others.pop(len(self.shapes))
        wrong = loc != loc
        for i, s in enumerate(others):
            bad = ~(s > 0)
            wrong, others[i] = wrong | bad, where(bad, 1.0, s)
        scale = others.pop() if self.scaled else where(wrong, 1.0, 1.0 + 0 * loc)
        return x, others, loc, scale, wrong


@dataclass(frozen=True, repr=False)
class Continuous(Univariate):
    """A distribution with a density."""

    quantile: Formula = lambda p: p

    def logpdf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The logarithm of the density: -inf outside the support."""
        return self._mass("logpdf", args, named)

    def pdf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The density: 0 outside the support."""
        return exp(self._mass("pdf", args, named))

    def ppf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The number below which a probability ``q`` lies: the inverse of ``cdf``; NaN outside [0, 1]."""
        q, shapes, loc, scale, wrong = self._arguments("ppf", "q", args, named)
        wrong = wrong | ~((q >= 0) & (q <= 1))
        return where(wrong, float("nan"), loc + scale * self.quantile(where(wrong, 0.5, q), *shapes))


@dataclass(frozen=True, repr=False)
class Discrete(Univariate):
    """A distribution over 0, 1, 2, ..., shifted by ``loc``."""

    scaled: bool = False
    lower: float = 0.0

    def logpmf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The logarithm of the probability of a number: -inf for what is no whole number of the support."""
        return self._mass("logpmf", args, named)

    def pmf(self, *args: TensorLike, **named: TensorLike) -> Tensor:
        """The probability of a number: 0 for what is no whole number of the support."""
        return exp(self._mass("pmf", args, named))
