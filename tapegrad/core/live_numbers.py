"""Live numbers: Python numbers that each replay of a captured step asks for again (see ``program``).

While a step is captured, what the host will tell differently next time (a learning rate, the number of steps, the
position of a random stream) must not become a constant of the program.  So an executor that captures hands out a live
number in its place; every other executor hands out the number itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from tapegrad.errors import FunctionError


class LiveInt(int):
    """An integer of a primitive's parameters: its value while the step is captured; ``now()`` is the present one.

    It is ``offset`` more than ``origin``.
    """

    now: Callable[[], int]
    offset = 0
    _origin: LiveInt | None = None
    """None: itself, without a cycle."""

    @property
    def origin(self) -> LiveInt:
        """The integer from which additions have led here."""
        return self if self._origin is None else self._origin

    def __add__(self, n: int) -> LiveInt:
        origin, offset = self.origin, self.offset + n
        number = live_int(int(self) + n, lambda: origin.now() + offset)
        number._origin, number.offset = origin, offset
        return number


def live_int(value: int, now: Callable[[], int]) -> LiveInt:
    """An integer of which ``now()`` tells the present value."""
    number = LiveInt(value)
    number.now = now
    return number


class LiveNumber:
    """A number that has no value while a step is captured; arithmetic makes live numbers of it, too."""

    __slots__ = ("now",)

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        """The present value."""

    def _refuse(self, *args: object) -> NoReturn:
        raise FunctionError(
            "a captured function makes a Python number of a learning rate or a step count: it would be frozen in the "
            "program; compute with it in tensors (tg.sqrt instead of math.sqrt), or outside of the function"
        )

    __float__ = __int__ = __index__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = _refuse


def present(x: Any) -> Any:
    """The present value of a live number; any other number is itself."""
    return x.now() if isinstance(x, LiveNumber) else x


def _arithmetic(name: str, f: Callable[[Any, Any], Any]) -> None:
    def left(self: LiveNumber, other: Any) -> Any:
        if isinstance(other, LiveNumber):
            return LiveNumber(lambda: f(self.now(), other.now()))
        if isinstance(other, (int, float)):
            return LiveNumber(lambda: f(self.now(), other))
        return NotImplemented

    def right(self: LiveNumber, other: Any) -> Any:
        return LiveNumber(lambda: f(other, self.now())) if isinstance(other, (int, float)) else NotImplemented

    setattr(LiveNumber, f"__{name}__", left)
    setattr(LiveNumber, f"__r{name}__", right)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _arithmetic(_name, getattr(operator, _name))
