"""Counters of an optimizer, whose numbers are known on the host: asking the device would wait for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from tapegrad.core.state import thread
from tapegrad.variable import Variable


class Counts:
    """By name, what a counter held when it was last read or written, and the number that this is."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Any]] = {}

    def number(self, name: str, counter: Variable) -> Any:
        """What a counter holds; while a step is captured a live number."""
        held, number = self._known.get(name, (None, 0))
        if held is _content(counter):
            return number
        return thread.executor.number(partial(self.now, name, counter))

    def now(self, name: str, counter: Variable) -> int:
        """What a counter holds, read from its device if nobody knows it here."""
        held = counter._cell.get(counter)
        if held is not self._known.get(name, (None, 0))[0]:
            array = held.array
            number = getattr(array, "value", array)  # on the host, whatever its device is
            self._known[name] = held, int(counter.numpy() if array is None else number)
        return self._known[name][1]

    def put(self, name: str, counter: Variable, number: Any) -> None:
        """Assign a number to a counter."""
        counter.assign(number)
        self._known[name] = _content(counter), number


def _content(variable: Variable) -> Any:
    """What a variable holds: a new object after every assignment."""
    return variable._cell.get(variable)
