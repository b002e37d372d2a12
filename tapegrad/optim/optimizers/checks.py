"""Checks of hyperparameters, variables and gradients; ``who``, the optimizer, opens the message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, TypeVar

from tapegrad.errors import DTypeError, GradientError, NotATensorError, TapegradError
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

T = TypeVar("T")


def number(who: object, name: str, value: Any) -> float:
    """``value`` if it compares with a number.  Raises NotATensorError with a remedy for variables and other things."""
    try:
        bool(value >= 0)
    except (TypeError, ValueError):
        given = value if isinstance(value, (list, tuple)) else [value]
        advice = f"; write {type(who).__name__}(...).apply_gradients(zip(gradients, variables))"
        variables = bool(given) and all(isinstance(v, (Variable, Tensor)) for v in given)
        raise NotATensorError(
            f"{who}: {name} must be a number, got {type(value).__name__} {value!r:.60}"
            + ("; the learning rate comes first, and variables are passed with their gradients" + advice) * variables
        ) from None
    return value


def share(who: object, name: str, value: float) -> float:
    """``value`` if it is in [0, 1).  Raises TapegradError."""
    if not 0 <= number(who, name, value) < 1:
        raise TapegradError(f"{who}: wanted {name} in [0, 1), got {value!r}")
    return value


def at_least(who: object, name: str, value: float, least: float) -> float:
    """``value`` if it is not less than ``least``.  Raises TapegradError."""
    if not number(who, name, value) >= least:
        raise TapegradError(f"{who}: wanted {name} of at least {least}, got {value!r}")
    return value


def positive(who: object, name: str, value: float | None) -> float | None:
    """``value`` if it is positive or None.  Raises TapegradError."""
    if value is not None and not number(who, name, value) > 0:
        raise TapegradError(f"{who}: wanted a positive {name}, got {value!r}")
    return value


def count(who: object, name: str, value: int, least: int = 1) -> int:
    """``value`` if it is an integer of at least ``least``.  Raises TapegradError."""
    if not isinstance(value, (int, Integral)) or isinstance(value, bool) or value < least:
        raise TapegradError(f"{who}: wanted an integer of at least {least} for {name}, got {value!r}")
    return int(value)


def listed(who: object, what: str, given: Iterable[T]) -> list[T]:
    """Return ``given``, several of ``what``, as a list.  Raises NotATensorError for what is no iterable."""
    if not isinstance(given, Iterable):
        raise NotATensorError(f"{who}: wanted a list of {what}, got {type(given).__name__} {given!r:.60}")
    return list(given)


def named(variable: Variable) -> str:
    """As messages name a variable."""
    return f'variable "{variable.name}" {variable.shape}'


def trained(who: object, variable: object) -> None:
    """Raises NotATensorError for what is no Variable, DTypeError for one whose dtype has no derivatives."""
    if not isinstance(variable, Variable):
        raise NotATensorError(f"{who}: wanted Variables, got {type(variable).__name__}")
    if "float" not in str(variable.dtype):
        raise DTypeError(f"{who}: cannot train {named(variable)} of dtype {variable.dtype}; wanted a real float")


def each_once(who: object, variables: Sequence[Variable]) -> None:
    """Raises GradientError for a variable that is among ``variables`` twice."""
    if len(set(map(id, variables))) != len(variables):
        twice = next(v for i, v in enumerate(variables) if any(v is w for w in variables[:i]))
        raise GradientError(f"{who}: {named(twice)} appears more than once among the variables")


def no_gradient(who: object, missing: Sequence[Variable]) -> GradientError:
    """The error for gradients that are None."""
    return GradientError(
        f"{who}: no gradient (None) for {', '.join(map(named, missing))}: the target does not depend on them, or the "
        "tape did not record how; leave them out, or pass skip_none=True"
    )


def gradient(who: object, g: Tensor | IndexedSlices, variable: Variable) -> None:
    """Raises GradientError where a gradient has not its variable's shape, DTypeError for complex numbers."""
    if g.shape != variable.shape:
        raise GradientError(f"{who}: wanted a gradient {variable.shape} for {named(variable)}, got {g.shape}")
    if "complex" in str(g.dtype):
        raise DTypeError(f"{who}: wanted a real gradient for {named(variable)}, got {g.dtype}")
