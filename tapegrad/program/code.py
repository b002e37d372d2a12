"""Code: known calls as straight lines of Python.  A line is one call; nothing is looked up but names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from tapegrad.device.float_errors import treating_errors
from tapegrad.engine.work import Call

_LINES = 1000
"""Lines of one function: compiling takes longer than in proportion to them."""


class Code:
    """Calls in order.  ``blocks``: the functions that make them, once it is compiled."""

    def __init__(self) -> None:
        self.blocks: list[Callable[[], None]] = []
        self._lines: list[tuple[str, str]] = []  # how errors are treated there, and the line
        self._values: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def add(self, calls: Sequence[Call], number: int | None = None, errors: Any = None) -> None:
        """Make ``calls`` after those before; with a ``number`` they can be changed.

        ``errors``: how floating-point errors are treated; None: as the caller treats them.
        """
        block = "" if errors is None else f" with treating({errors!r}):"
        for k, (f, args) in enumerate(calls):
            if number is None:
                names = [self._name(x) for x in (f, *args)]
            else:
                names = [f"n{number}_{k}_{i}" for i in range(1 + len(args))]
            self._lines.append((block, f" {names[0]}({', '.join(names[1:])})"))
        if number is not None:
            self.change(calls, number)

    def change(self, calls: Sequence[Call], number: int) -> None:
        """Make these in place of those of ``number``, which were as many."""
        for k, (f, args) in enumerate(calls):
            self._values.update((f"n{number}_{k}_{i}", x) for i, x in enumerate((f, *args)))

    def _name(self, x: object) -> str:
        """One name for each object."""
        name = self._names.get(id(x))
        if name is None:
            name = self._names[id(x)] = f"x{len(self._names)}"
            self._values[name] = x
        return name

    def compile(self) -> None:
        """Make the functions; no call can be added any more."""
        self._values["treating"] = treating_errors
        for block, group in groupby(self._lines, lambda line: line[0]):
            lines = [line for _, line in group]
            for start in range(0, len(lines), _LINES):
                body = lines[start : start + _LINES]
                text = "\n".join(["def block():", *([block, *(f" {line}" for line in body)] if block else body)])
                exec(compile(text, "<captured function>", "exec"), self._values)
                self.blocks.append(self._values.pop("block"))
        self._lines.clear()
