"""A table of calls of inner loops, run without Python between them.

An entry is one call of a ufunc: of NumPy's inner loop, once where all arrays share one flat loop, else row by row.
Runs of entries are replaced by fused kernels when these have been compiled (``group.py``); a kernel is an inner loop
with more operands.  Pointers are bound when the table is closed; those into memory of the present call are placed
before each run.  After each entry the machine looks at the error flags; where one counts, Python reports it as NumPy
does, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tapegrad.device import CPU, cuda_types
from tapegrad.device.float_errors import report
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native import kernels, machine
from tapegrad.engine.cpu.native.boxes import Part, Run, runs
from tapegrad.engine.cpu.native.entries import entry_of
from tapegrad.engine.cpu.native.group import Entry, Group, Lifetime, groups
from tapegrad.engine.cpu.native.loops import Core, Loop
from tapegrad.engine.task import Call

_XP = CPU.xp
_MOST_FAILURES = 3
"""Replays that may have to be repeated with single ufuncs, before they always are."""


Place = Callable[[Array], "tuple[int, int] | None"]
"""Of an array on memory of the present call: which memory, and the offset in bytes; None: its address is fixed."""


class FlaggedError(Exception):
    """A floating-point error has occurred, which only single ufuncs can report."""


class _Row(NamedTuple):
    """A call that the machine makes: what of, its nest of loops, and the number of each operand's pointer.

    ``flags``: whether its floating-point errors are reported.  ``core``: see :class:`Entry`.
    """

    name: str | None
    loop: Loop
    shape: tuple[int, ...]
    strides: Sequence[Sequence[int]]
    pointers: Sequence[int]
    flags: bool
    core: Core = ((), ())


class _Pointers:
    """Where operands lie: at an offset from one of the ``bases``, of which the first is 0."""

    def __init__(self, counts: Sequence[int]) -> None:
        """``counts``: how many operands each entry has."""
        self._starts = [0, *accumulate(counts)]
        self.offsets = _XP.zeros(self._starts[-1], _XP.int64)
        self.bases = _XP.zeros(self._starts[-1], _XP.int64)

    def of(self, number: int) -> range:
        """The numbers of an entry's pointers."""
        return range(self._starts[number], self._starts[number + 1])


class _Rows:
    """Calls that the machine walks; ``stretches``: the rows that stand for each stretch of entries."""

    def __init__(self, rows: Sequence[_Row], stretches: Sequence[tuple[int, int]], pointers: _Pointers) -> None:
        self.names = [row.name for row in rows]
        self.stretches = stretches
        self._source = pointers
        self._index = _XP.array([p for row in rows for p in row.pointers], _XP.int64)
        self._bases = pointers.bases.take(self._index)
        self._pointers = _XP.empty(len(self._index), _XP.int64)
        self.take_offsets()
        at = cuda_types.address(self._pointers)
        numbers: list[int] = []
        starts = []
        for row in rows:
            starts.append(8 * len(numbers))
            # The inner loop's size and strides come first: a loop without a nest looks at no others.
            inner_first = (-1, *range(len(row.shape) - 1))
            numbers += [*(row.shape[a] for a in inner_first), *row.core[0]]
            numbers += [*(s[a] for a in inner_first for s in row.strides), *row.core[1]]
            numbers += [*row.loop[:3], len(row.pointers), len(row.shape)]  # the record of a nest
        self._numbers = _XP.array(numbers, _XP.int64)
        counted = sum(machine.flag_bits().values())
        words: list[int] = []
        for row, start in zip(rows, starts, strict=True):
            axes, count = len(row.shape), len(row.pointers)
            sizes = cuda_types.address(self._numbers) + start
            strides = sizes + 8 * (axes + len(row.core[0]))
            called = row.loop[:3] if axes == 1 else (machine.nest(), strides + 8 * axes * count, 0)
            words += [*called, at, sizes, strides, row.flags * counted, 0]
            at += 8 * count
        self._words = _XP.array(words, _XP.int64)
        self.address = cuda_types.address(self._words)

    def take_offsets(self) -> None:
        """Take the offsets as they are now."""
        self._offsets = self._source.offsets.take(self._index)
        self._is_fixed = False

    def bind(self, arrays: Sequence[Array]) -> None:
        """Set pointers to offsets from the addresses of ``arrays``; without arrays they are absolute, and set once."""
        if arrays or not self._is_fixed:
            bases = _XP.array([0, *map(cuda_types.address, arrays)], _XP.int64)
            _XP.add(self._offsets, bases.take(self._bases), out=self._pointers)
            self._is_fixed = not arrays


class Table:
    """Stretches of entries: :meth:`add` appends one, :meth:`close` binds all, :meth:`run` calls those of one."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._run: Any = machine.runner()
        self._entries: list[Entry] = []
        self._lifetimes: list[Lifetime] = []
        self._stretches: list[tuple[int, int]] = []
        self._behind: list[int] = []
        self._parts: dict[int, list[tuple[int, Part]]] = {}
        """Of entries that are cut into boxes: the entries that stand for their parts, which come behind all others."""
        self._ranges: list[list[tuple[int, int]]] = []
        """Which entries are done for each stretch where kernels serve."""
        self._groups: list[Group] = []
        self._kernels = kernels.NOTHING
        self._fused: _Rows | None = None
        self._changed = False
        """Whether some entry has been changed since the last replay."""
        self.failures = 0
        """Replays that had to be repeated."""

    def add(self, entries: Sequence[Entry], lifetimes: Sequence[Lifetime], then: int) -> tuple[int, int]:
        """Append a stretch, behind which comes step ``then``; return its number, and that of its first entry."""
        first = len(self._entries)
        self._entries += entries
        self._lifetimes += lifetimes
        self._stretches.append((first, len(self._entries)))
        self._behind.append(then)
        return len(self._stretches) - 1, first

    def close(self, fused: bool) -> None:
        """Bind all entries to memory; none can be added any more.  ``fused``: kernels may stand for groups of them."""
        if fused:
            for (first, last), then in zip(self._stretches, self._behind, strict=True):
                self._ranges.append([*self._divided(first, last, then)])
        self._pointers = _Pointers([len(entry.arrays) for entry in self._entries])
        for number, entry in enumerate(self._entries):
            self._point_to(number, entry)
        rows = [self._row(number) for number in range(self._stretches[-1][1] if self._stretches else 0)]
        self._single = _Rows(rows, self._stretches, self._pointers)
        self._kernels = kernels.request(g.structure for g in self._groups)

    def _divided(self, first: int, last: int, then: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of entries that stand for those from ``first`` up to ``last``, and note their groups."""
        step = lambda number: self._lifetimes[number].step if number < last else then
        for run in runs(self._entries, first, last):
            if boxes := self._cut(run):
                yield self._grouped(first, run.first, step(run.first))
                yield from (self._grouped(*box, step(run.last)) for box in boxes)
                first = run.last
        yield self._grouped(first, last, then)

    def _cut(self, run: Run) -> list[tuple[int, int]]:
        """Append the parts of entries in boxes; return the entries of each box, none if one cannot be cut so."""
        parts = [part for box in run.boxes for part in box]
        entries = [entry for part in parts if (entry := part.of(self._entries[part.number]))]
        if len(entries) < len(parts):
            return []
        ends = [*accumulate(map(len, run.boxes), initial=len(self._entries))]
        for number, part in enumerate(parts, len(self._entries)):
            self._parts.setdefault(part.number, []).append((number, part))
            self._lifetimes.append(self._lifetimes[part.number])
        self._entries += entries
        return [*pairwise(ends)]

    def _grouped(self, first: int, last: int, then: int) -> tuple[int, int]:
        self._groups += [g for g in groups(self._entries, self._lifetimes, first, last, then) if g.structure.stores]
        return first, last

    def _point_to(self, number: int, entry: Entry) -> None:
        """Point to the arrays of an entry."""
        for at, x in zip(self._pointers.of(number), entry.arrays, strict=True):
            place = self._place(x)
            self._pointers.bases[at], self._pointers.offsets[at] = (
                (0, cuda_types.address(x)) if place is None else (place[0] + 1, place[1])
            )

    def _row(self, number: int) -> _Row:
        entry = self._entries[number]
        flags = entry.loop.flags and not entry.silenced
        return _Row(entry.name, entry.loop, entry.shape, entry.strides, self._pointers.of(number), flags, entry.core)

    def _fuse(self) -> None:
        """Let kernels stand for the groups that have one."""
        rows: list[_Row] = []
        stretches = []
        of = {g.first: g for g in self._groups if self._kernels.address(g.structure)}
        for ranges in self._ranges:
            begin = len(rows)
            for first, last in ranges:
                while first < last:
                    if g := of.get(first):
                        rows.append(self._row_of(g))
                        first = g.last
                    else:
                        rows.append(self._row(first))
                        first += 1
            stretches.append((begin, len(rows)))
        self._fused = _Rows(rows, stretches, self._pointers)
        self._kernels = kernels.NOTHING

    def _row_of(self, group: Group) -> _Row:
        loop = Loop(self._kernels.address(group.structure), 0, 0, True)
        pointers = [self._pointers.of(number)[k] for number, k in group.operands]
        return _Row(None, loop, group.shape, group.strides, pointers, not self._entries[group.first].silenced)

    @property
    def counts(self) -> tuple[int, int]:
        """How many kernels a replay calls, and how many single loops."""
        names = (self._fused or self._single).names
        return names.count(None), len(names) - names.count(None)

    def change(self, number: int, call: Call) -> bool:
        """Make ``call`` in place of the entry, whose arrays had the same layouts; False if it cannot be one."""
        entry = entry_of(call)
        old = self._entries[number]
        form = lambda e: (e.loop, e.shape, e.strides, e.core)
        if entry is None or form(entry) != form(old):
            return False
        parts = [(n, part.of(entry)) for n, part in self._parts.get(number, ())]
        for n, changed in ((number, entry), *parts):
            if changed is None:
                return False
            self._entries[n] = changed
            self._point_to(n, changed)
        self._changed = True
        return True

    def bind(self, arrays: Sequence[Array], fused: bool = True) -> bool:
        """Begin a replay: let pointers into memory of the present call point to ``arrays``.

        ``fused``: where there are kernels, they do several calls at once.  Returns whether they do.
        """
        if self._kernels.ready:
            self._fuse()
        if self._changed:
            for rows in filter(None, (self._single, self._fused)):
                rows.take_offsets()
            self._changed = False
        kernels_serve = fused and self.failures < _MOST_FAILURES
        self._now = (self._fused if kernels_serve else None) or self._single
        self._now.bind(arrays)
        return self._now is self._fused

    def run(self, stretch: int) -> None:
        """Call the entries of a stretch; report floating-point errors as the error state says.

        Raises FlaggedError, and reports nothing, where one has occurred while kernels serve.
        """
        rows: Any = self._now
        first, last = rows.stretches[stretch]
        mask = machine.reported_mask()
        while first < last:
            first, flags = divmod(self._run(rows.address, first, last, mask), 64)
            if flags:
                if rows is self._fused:
                    raise FlaggedError
                report(rows.names[first], [kind for kind, bit in machine.flag_bits().items() if flags & bit])
                first += 1
