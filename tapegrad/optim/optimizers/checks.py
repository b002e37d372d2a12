"""Checks of hyperparameters that several optimizers share; ``who`` opens the message."""

from __future__ import annotations

from tapegrad.errors import TapegradError


def share(who: object, name: str, value: float) -> float:
    """``value`` if it is in [0, 1).  Raises TapegradError."""
    if not 0 <= value < 1:
        raise TapegradError(f"{who}: wanted {name} in [0, 1), got {value!r}")
    return value


def at_least(who: object, name: str, value: float, least: float) -> float:
    """``value`` if it is not less than ``least``.  Raises TapegradError."""
    if not value >= least:
        raise TapegradError(f"{who}: wanted {name} of at least {least}, got {value!r}")
    return value


def positive(who: object, name: str, value: float | None) -> float | None:
    """``value`` if it is positive or None.  Raises TapegradError."""
    if value is not None and not value > 0:
        raise TapegradError(f"{who}: wanted a positive {name}, got {value!r}")
    return value


def count(who: object, name: str, value: int, least: int = 1) -> int:
    """``value`` if it is an integer of at least ``least``.  Raises TapegradError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TapegradError(f"{who}: wanted an integer of at least {least} for {name}, got {value!r}")
    return value
