"""report and saved: what a tape keeps, value by value, with bytes, and what it would have to recompute.

Lines of the user's program are known of what was made while a ``tg.measure()`` block was open (to find them costs time
for each operation), and of what lives while a budget is in force.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import basename
from typing import Any

from tapegrad.autodiff.recording import Recording
from tapegrad.autodiff.records import Called, Record
from tapegrad.core.aval import ShapedArray, rounded
from tapegrad.core.buffer import EVICTED, Buffer
from tapegrad.core.node import LEAF, Node
from tapegrad.device.host_scalar import HostScalar
from tapegrad.errors import NotATensorError
from tapegrad.remat.budget.recipes import SavedBuffers, roots
from tapegrad.remat.checkpoint.checkpoint import Checkpoint
from tapegrad.sizes import format_bytes
from tapegrad.tracing import html
from tapegrad.tracing.frames import line_of
from tapegrad.tracing.ledger import LEDGER
from tapegrad.variable import everyone

UNKNOWN = "?"
_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One value that a tape keeps, or would have to recompute.

    ``state``: *saved* (its bytes are kept), *view* (it lies in the bytes of another row), *pending* (not stored: the
    backward kernel computes it from other rows), *held* (a variable's content, there anyway), *evicted* (dropped under
    a budget, recomputed when read), *offloaded* (its bytes are in another memory), *recomputed* (of a call that runs
    again; what it keeps for that, inputs and stored states, has rows of its own), or *custom* (of a call with a
    gradient function of its own, which keeps what it keeps).
    """

    index: int
    """The value's number; it grows with every value made."""
    op: str
    """The primitive or call that made it, ``variable NAME``, or ``input``."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Bytes of the value."""
    kept_bytes: int
    """Bytes that the tape keeps for it, as the ledger counts them: in units of 512, each storage once."""
    state: str
    line: str = UNKNOWN
    """``file:line`` of the user's program, or ``?``."""
    times: int = 0
    """How often it was recomputed."""
    made_from: tuple[int, ...] = ()
    """Of a view or pending value: the numbers of the rows whose bytes it needs."""

    @property
    def value(self) -> str:
        """dtype and shape."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Rows:
    """Rows in the order in which the values were made; ``print`` them for a table."""

    rows: tuple[Row, ...]

    @property
    def kept_bytes(self) -> int:
        """What the tape keeps in all: the ledger's category "activation", if nothing else is recorded."""
        return sum(r.kept_bytes for r in self.rows)

    def _told(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Title, heads and rows of the table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        title, heads, cells = self._told()
        return html.paragraph(title) + html.table(heads, cells)

    def __str__(self) -> str:
        title, heads, cells = self._told()
        table = [heads, *cells]
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        lines = [title, *("  ".join(c.rjust(w) if i == 0 else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths)))
                          for r in table)]  # fmt: skip
        if all(r.line == UNKNOWN for r in self.rows) and self.rows:
            lines[0] += " (lines are known of what is recorded inside tg.measure())"
        lines = [line.rstrip() for line in lines]
        return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..." for line in lines)


class Report(Rows):
    """All values that a tape knows how to get at in its backward walk."""

    def _told(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        counts: dict[str, int] = {}
        for r in self.rows:
            counts[r.state] = counts.get(r.state, 0) + 1
        parts = ", ".join(f"{n} {state}" for state, n in counts.items())
        cells: list[tuple[str, ...]] = [
            (_size(r), f"%{r.index}", r.value, r.op, r.state, str(r.times or ""), _short(r.line), _from(r))
            for r in self.rows
        ]
        heads = ("kept", "", "value", "made by", "state", "again", "line", "")
        return f"the tape keeps {format_bytes(self.kept_bytes)}: {parts or 'nothing'}", heads, cells


class Saved(Rows):
    """What is saved for the backward walk."""

    def _told(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        cells: list[tuple[str, ...]] = [
            (_size(r), f"%{r.index}", r.value, r.op, _short(r.line), _from(r)) for r in self.rows
        ]
        heads = ("bytes", "", "value", "made by", "line", "")
        return f"saved: {format_bytes(self.kept_bytes)}", heads, cells


def report(tape: Recording) -> Report:
    """What becomes of each value that ``tape`` needs: bytes, primitive, line, state, times recomputed.

    Ask before the tape is used up, or a persistent one at any time.  Raises NotATensorError for what is no tape.
    """
    return Report(_rows_of(tape))


def saved(tape: Recording) -> Saved:
    """What ``tape`` saves for its backward walk, with bytes (JAX's ``print_saved_residuals``).

    Values that are not stored are listed with 0 bytes, variables with what they hold anyway.  Raises NotATensorError.
    """
    return Saved(tuple(r for r in _rows_of(tape) if r.state in ("saved", "pending", "view", "held")))


def _rows_of(tape: Recording) -> tuple[Row, ...]:
    if not isinstance(tape, Recording):
        raise NotATensorError(f"a report is of a GradientTape, not of {type(tape).__name__}")
    table = _Table(tape)
    for record in list(tape._records):
        table.add_record(record)
    return tuple(table.rows[index] for index in sorted(table.rows))


class _Table:
    """Rows by node index, while they are collected."""

    def __init__(self, tape: Recording) -> None:
        self.rows: dict[int, Row] = {}
        self._variables: dict[int, str] = {}
        for v in list(everyone.values()):
            content = v._cell._content
            self._variables[content.root().node.index] = self._variables[content.node.index] = v.name
        for number, indices in getattr(tape, "_values", {}).items():
            if number in everyone:
                self._variables.update(dict.fromkeys(indices, everyone[number].name))

    def add_record(self, record: Record) -> None:
        """What one record keeps."""
        if isinstance(record, Called):
            call = record.call
            for node in record.results[: getattr(record.call, "returned", None)]:
                state = "recomputed" if isinstance(call, Checkpoint) else "custom"
                row = self._row(node, state, call.name)
                self._put(replace(row, times=getattr(call, "times", 0)))
            if isinstance(call, Checkpoint):
                for content in call.contents():
                    for b in (content, content.root()):
                        self._variables.setdefault(b.node.index, "(a former content)")
                    self._add(content)
                for thing in call.kept():
                    self._add_thing(thing)
            return
        kept = record.residuals
        for thing in kept if isinstance(kept, tuple) else (kept,):
            self._add_thing(thing)

    def _add_thing(self, thing: Any) -> None:
        """A buffer, something that stands for one or several, or a recording."""
        if isinstance(thing, Buffer):
            self._add(thing)
        elif isinstance(thing, SavedBuffers):
            for buffer, recipe in zip(thing.buffers, thing.recipes, strict=True):
                self._add(buffer, 0 if recipe is None else recipe.times)
        elif isinstance(thing, Recording):
            for record in list(thing._records):
                self.add_record(record)
        else:
            self._put(self._row(thing.node, "offloaded"))

    def _add(self, buffer: Buffer, times: int = 0) -> None:
        """A value, with the storages it needs, if it is there."""
        if buffer.array is None and buffer.state == EVICTED:
            recipe = buffer.recipe
            state = "evicted" if recipe.slot is None else "offloaded"
            self._put(replace(self._row(buffer.node, state), times=recipe.times))
            return
        below = roots(buffer)
        content = buffer.array is not None and buffer.node.index in self._variables
        if content or below == [buffer]:
            self._put(replace(self._stored(buffer), times=times))
            return
        for root in below:
            if root.node.index not in self.rows:
                self._put(self._stored(root))
        state = "pending" if buffer.array is None else "view"
        made_from = tuple(sorted(root.node.index for root in below))
        self._put(replace(self._row(buffer.node, state, buffer=buffer), times=times, made_from=made_from))

    def _stored(self, buffer: Buffer) -> Row:
        name = self._variables.get(buffer.node.index)
        row = self._row(buffer.node, "saved" if name is None else "held", buffer=buffer)
        if name is not None or type(buffer.array) is HostScalar:  # a kernel's argument: nothing lies on the device
            return row
        return replace(row, kept_bytes=rounded(row.nbytes))

    def _row(self, node: Node, state: str, op: str | None = None, buffer: Buffer | None = None) -> Row:
        aval: ShapedArray = node.aval
        if op is None:
            name = self._variables.get(node.index)
            op = f"variable {name}" if name is not None else "input" if node.prim is LEAF else node.prim.name
        place = getattr(node, "place", None)
        if place is None and buffer is not None:
            place = LEDGER.place_of(buffer)
        line = UNKNOWN if place is None else line_of(place)
        return Row(node.index, op, aval.shape, aval.dtype.name, aval.nbytes, 0, state, line)

    def _put(self, row: Row) -> None:
        have = self.rows.get(row.index)
        if have is None or have.times < row.times:
            self.rows[row.index] = row


def _size(row: Row) -> str:
    return format_bytes(row.kept_bytes)


def _short(line: str) -> str:
    """The line without its directory; nothing for a note in brackets."""
    return UNKNOWN if line.startswith("(") else basename(line)


def _from(row: Row) -> str:
    return "in " * (row.state == "view") + "from " * (row.state == "pending") + " ".join(f"%{i}" for i in row.made_from)
