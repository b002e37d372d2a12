"""Checks that several layers and functions share; ``who`` opens the message."""

from __future__ import annotations

from numbers import Integral, Real

from tapegrad.errors import DTypeError, IndexingError, TapegradError
from tapegrad.ops.index.bounds import require
from tapegrad.tensor import Tensor


def positive(who: object, name: str, value: int) -> int:
    """``value`` if it is a positive integer.  Raises TapegradError."""
    if not isinstance(value, Integral) or value <= 0:
        raise TapegradError(f"{who}: wanted a positive integer for {name}, got {value!r}")
    return int(value)


def rate(who: object, value: float) -> float:
    """``value`` if it is a probability.  Raises TapegradError."""
    if not isinstance(value, (int, float, Real)) or not 0 <= value <= 1:
        raise TapegradError(f"{who}: wanted a rate from 0 to 1, got {value!r}")
    return float(value)


def integers(who: object, name: str, x: Tensor) -> None:
    """Raises DTypeError unless ``x`` holds integers."""
    if "int" not in str(x.dtype):
        raise DTypeError(f"{who}: wanted integer {name}, got {x.dtype}; use astype({name}, 'int64')")


def within(who: object, name: str, indices: Tensor, n: int) -> None:
    """Raises IndexingError unless all are in [0, n): unlike NumPy, -1 is not the last one but a mistake.

    On a GPU it is raised when the host next waits for the device.
    """
    who = str(who)
    require(indices, 0, n - 1, (who, name), lambda wrong, low, high: IndexingError(
        f"{who}: wanted {name} in [0, {high + 1}), got {wrong} among them"))  # fmt: skip
