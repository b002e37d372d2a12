"""Code: known calls as straight lines of Python.  A line is one call; nothing is looked up but names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from tapegrad.capture.external_buffers import Outside
from tapegrad.device import CPU
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.float_errors import raising_errors, treating_errors
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native import machine
from tapegrad.engine.cpu.native.entries import entry_of
from tapegrad.engine.cpu.native.group import Entry, Lifetime
from tapegrad.engine.cpu.native.steps import interpreted
from tapegrad.engine.cpu.native.table import FlaggedError, Table
from tapegrad.engine.task import Call

_FIXED = re.compile(r"\bx\d+\b")
"""Names of what is never changed: defaults of arguments, since those are found faster than globals."""
_LINES = 1000
"""Lines of one function: compiling takes longer than in proportion to them."""
_LEAST_ENTRIES = 4
"""Calls in a row that are worth a run of their table: what a run takes by itself, NumPy takes for two or three."""


class _Line(NamedTuple):
    """A call: how errors are treated there, what its values are called if they can be changed, and it as an entry."""

    block: str
    call: Call
    own: str | None
    entry: Entry | None
    lifetime: Lifetime


class Code:
    """Calls in order.  ``blocks``: the functions that make them, once it is compiled.

    Each takes an array for each slot that lies outside of the arena; arrays on their memory replace abstract arrays.
    """

    def __init__(self, outside: Outside) -> None:
        self.blocks: list[Callable[..., None]] = []
        self._outside = outside
        self._lines: list[_Line] = []
        self._values: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._local: dict[Any, str] = {}
        self._placing: dict[str, str] = {}
        self._used: list[str] = []
        self._table = Table(lambda x: outside.place(x) if type(x) is AbstractArray else None)
        self._entries: dict[str, int] = {}
        """The numbers of entries that can be changed."""
        self._calls = 0
        self._native = machine.runner() is not None

    @property
    def how(self) -> str:
        """By how many calls of each kind it runs; empty: NumPy makes all."""
        kernels, loops = self._table.counts
        return f"by {kernels} kernels, {loops} of NumPy's loops and {self._calls} calls" if loops or kernels else ""

    def add(self, calls: Sequence[Call], step: int, until: int, errors: Any = None, moves: bool = False) -> None:
        """Make ``calls`` after those before, as ``step``, of which step ``until`` is the last that needs the results.

        ``errors``: how floating-point errors are treated; None: as the caller treats them.  ``moves``: whether they can
        be changed.
        """
        block = "" if errors is None else f" with treating({errors!r}):"
        for k, call in enumerate(calls):
            entry = entry_of(call) if self._native else None
            own = f"n{step}_{k}" if moves else None
            self._lines.append(_Line(block, call, own, entry, Lifetime(step, until)))

    def change(self, calls: Sequence[Call], step: int) -> bool:
        """Make these in place of those of ``step``, which were as many; False if one lies otherwise."""
        for k, call in enumerate(calls):
            own = f"n{step}_{k}"
            if own not in self._entries:
                self._text(call, own)
            elif not self._table.change(self._entries[own], call):
                return False
        return True

    def run(self, outside: Sequence[Array], begin: Callable[[], object]) -> None:
        """Make all calls; ``outside``: the arrays of slots that lie outside of the arena.

        ``begin`` brings the arguments to their places once more, if the calls must be repeated to report an error.
        """
        if not self._table.bind(outside):
            for block in self.blocks:
                block(*outside)
            return
        try:
            with raising_errors() if self._calls else nullcontext():
                for block in self.blocks:
                    block(*outside)
        except (FlaggedError, FloatingPointError):
            begin()
            self._table.failures += 1
            self.run_single(outside)

    def run_single(self, outside: Sequence[Array]) -> None:
        """Make all calls one by one: no kernel does several."""
        self._table.bind(outside, fused=False)
        with interpreted():
            for block in self.blocks:
                block(*outside)

    def _text(self, call: Call, own: str | None) -> str:
        """The line of a call; ``own``: what its values are called, if they can be changed."""
        f: Any
        f, args = call
        keywords: dict[str, Any] = {}
        if isinstance(f, partial) and any(type(x) is AbstractArray for x in (*f.args, *f.keywords.values())):
            f, args, keywords = f.func, (*f.args, *args), f.keywords
        said = [self._said(x, own and f"{own}_{i}") for i, x in enumerate((f, *args))]
        named = [f"{name}={self._said(x, own and f'{own}_{name}')}" for name, x in keywords.items()]
        return f" {said[0]}({', '.join([*said[1:], *named])})"

    def _said(self, x: Any, own: str | None) -> str:
        """The text of a value: its name; of arrays on memory of the call, and of lists with such, an expression."""
        if type(x) is AbstractArray:
            return self._placed(x)
        if type(x) in (list, tuple) and any(type(y) is AbstractArray for y in x):
            parts = [self._said(y, own and f"{own}_{i}") for i, y in enumerate(x)]
            return f"[{', '.join(parts)}]" if type(x) is list else f"({', '.join(parts)},)"
        if own is None:
            return self._name(x)
        self._values[own] = x
        return own

    def _placed(self, x: AbstractArray) -> str:
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

    def compile(self, fused: bool) -> None:
        """Make the functions; no call can be added any more.

        ``fused``: machine code may do several calls at once, and all calls again where one of them met an error.
        """
        self._values.update(treating=treating_errors, placed=CPU.xp.ndarray, run=self._table.run)
        given = [f"o{i}" for i in range(len(self._outside.numbers))]
        ends = (
            [line.lifetime.step for line in self._lines[1:]] + [self._lines[-1].lifetime.step + 1]
            if self._lines
            else []
        )
        for block, group in groupby(zip(self._lines, ends, strict=True), lambda pair: pair[0].block):
            lines = list(self._texts(list(group)))
            for start in range(0, len(lines), _LINES):
                part = lines[start : start + _LINES]
                placing = [self._placing[name] for name in dict.fromkeys(name for _, used in part for name in used)]
                body = [line for line, _ in part]
                fixed = dict.fromkeys(_FIXED.findall(" ".join((*placing, *body))))
                head = f"def block({', '.join([*given, *(f'{name}={name}' for name in fixed)])}):"
                text = "\n".join([head, *placing, *([block, *(f" {line}" for line in body)] if block else body)])
                exec(compile(text, "<captured function>", "exec"), self._values)
                self.blocks.append(self._values.pop("block"))
        self._table.close(fused)
        self._lines.clear()
        self._placing.clear()

    def _texts(self, lines: list[tuple[_Line, int]]) -> Iterator[tuple[str, list[str]]]:
        """The text of each line, and the arrays on memory of the call that it uses; a stretch of entries is one line.

        ``lines``: each with the step behind it.
        """
        for native, group in groupby(lines, lambda pair: pair[0].entry is not None):
            stretch = list(group)
            if native and len(stretch) >= _LEAST_ENTRIES:
                entries: list[Any] = [line.entry for line, _ in stretch]
                number, first = self._table.add(entries, [line.lifetime for line, _ in stretch], stretch[-1][1])
                self._entries.update(
                    (line.own, i) for i, (line, _) in enumerate(stretch, first) if line.own is not None
                )
                yield f" run({number})", []
            else:
                self._calls += len(stretch)
                for line, _ in stretch:
                    self._used = []
                    yield self._text(line.call, line.own), self._used
