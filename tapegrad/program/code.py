"""Code: known calls as straight lines of Python.  A line is one call; nothing is looked up but names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from tapegrad.device import CPU
from tapegrad.device.float_errors import treating_errors
from tapegrad.device.phantom import Phantom
from tapegrad.engine.work import Call
from tapegrad.program.outside import Outside

_FIXED = re.compile(r"\bx\d+\b")
"""Names of what is never changed: defaults of arguments, since those are found faster than globals."""
_LINES = 1000
"""Lines of one function: compiling takes longer than in proportion to them."""


class Code:
    """Calls in order.  ``blocks``: the functions that make them, once it is compiled.

    Each takes an array for each slot that lies outside of the arena; arrays on their memory replace phantoms.
    """

    def __init__(self, outside: Outside) -> None:
        self.blocks: list[Callable[..., None]] = []
        self._outside = outside
        self._lines: list[tuple[str, str, tuple[str, ...]]] = []
        """How errors are treated there, the line, and the arrays on memory of the call that it uses."""
        self._values: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._local: dict[Any, str] = {}
        self._placing: dict[str, str] = {}
        self._used: list[str] = []

    def add(self, calls: Sequence[Call], number: int | None = None, errors: Any = None) -> None:
        """Make ``calls`` after those before; with a ``number`` they can be changed.

        ``errors``: how floating-point errors are treated; None: as the caller treats them.
        """
        block = "" if errors is None else f" with treating({errors!r}):"
        for line in self._text(calls, number):
            self._lines.append((block, line, tuple(self._used)))

    def change(self, calls: Sequence[Call], number: int) -> None:
        """Make these in place of those of ``number``, which were as many."""
        for _ in self._text(calls, number):
            pass

    def _text(self, calls: Sequence[Call], number: int | None) -> Iterator[str]:
        """The lines of calls; with a ``number`` their values get names of their own."""
        f: Any
        for k, (f, args) in enumerate(calls):
            self._used = []
            own = None if number is None else f"n{number}_{k}"
            keywords: dict[str, Any] = {}
            if isinstance(f, partial) and any(type(x) is Phantom for x in (*f.args, *f.keywords.values())):
                f, args, keywords = f.func, (*f.args, *args), f.keywords
            said = [self._said(x, own and f"{own}_{i}") for i, x in enumerate((f, *args))]
            named = [f"{name}={self._said(x, own and f'{own}_{name}')}" for name, x in keywords.items()]
            yield f" {said[0]}({', '.join([*said[1:], *named])})"

    def _said(self, x: Any, own: str | None) -> str:
        """The text of a value: its name; of arrays on memory of the call, and of lists with such, an expression."""
        if type(x) is Phantom:
            return self._placed(x)
        if type(x) in (list, tuple) and any(type(y) is Phantom for y in x):
            parts = [self._said(y, own and f"{own}_{i}") for i, y in enumerate(x)]
            return f"[{', '.join(parts)}]" if type(x) is list else f"({', '.join(parts)},)"
        if own is None:
            return self._name(x)
        self._values[own] = x
        return own

    def _placed(self, x: Phantom) -> str:
        """The name of an array on memory of the call."""
        number, offset = self._outside.place(x)
        key = number, offset, x.shape, x.strides, x.dtype
        name = self._local.get(key)
        if name is None:
            name = self._local[key] = f"a{len(self._local)}"
            shape, dtype, strides = (self._name(part) for part in (x.shape, x.dtype, x.strides))
            self._placing[name] = f" {name} = placed({shape}, {dtype}, o{number}, {offset}, {strides})"
        self._used.append(name)
        return name

    def _name(self, x: object) -> str:
        """One name for each object."""
        name = self._names.get(id(x))
        if name is None:
            name = self._names[id(x)] = f"x{len(self._names)}"
            self._values[name] = x
        return name

    def compile(self) -> None:
        """Make the functions; no call can be added any more."""
        self._values.update(treating=treating_errors, placed=CPU.xp.ndarray)
        given = [f"o{i}" for i in range(len(self._outside.numbers))]
        for block, group in groupby(self._lines, lambda line: line[0]):
            lines = list(group)
            for start in range(0, len(lines), _LINES):
                part = lines[start : start + _LINES]
                placing = [self._placing[name] for name in dict.fromkeys(name for line in part for name in line[2])]
                body = [line for _, line, _ in part]
                fixed = dict.fromkeys(_FIXED.findall(" ".join((*placing, *body))))
                head = f"def block({', '.join([*given, *(f'{name}={name}' for name in fixed)])}):"
                text = "\n".join([head, *placing, *([block, *(f" {line}" for line in body)] if block else body)])
                exec(compile(text, "<captured function>", "exec"), self._values)
                self.blocks.append(self._values.pop("block"))
        self._lines.clear()
        self._placing.clear()
