"""A table of calls of inner loops, run without Python between them.

An entry is one call of a ufunc: of NumPy's inner loop, once where all arrays share one flat loop, else row by row.
Runs of entries are replaced by fused kernels when these have been compiled (``group.py``); a kernel is an inner loop
with more operands.  Pointers are bound when the table is closed; those into memory of the present call are placed
before each run.  After each entry the machine looks at the error flags; where one counts, Python reports it as NumPy
does, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from tapegrad.device import CPU, cxx
from tapegrad.device.float_errors import report, reported
from tapegrad.device.phantom import Phantom
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native import kernels, machine
from tapegrad.engine.cpu.native.group import Entry, Group, Lifetime, groups
from tapegrad.engine.cpu.native.loops import Loop, copy_of, loop_of, merged, sum_of
from tapegrad.engine.cpu.native.ops import is_exact
from tapegrad.engine.work import Call, Silenced

_XP = CPU.xp
_ARRAYS = (_XP.ndarray, Phantom)
_MOST_AXES = 4
_MOST_FAILURES = 3
"""Replays that may have to be made again with single ufuncs, before they always are."""


def entry_of(call: Call) -> Entry | None:
    """Return the call as an entry; None if it must stay a Python call."""
    f: Any
    f, arrays = call
    if type(f) is partial and not f.args and list(f.keywords) == ["out"]:
        f, arrays = f.func, (*arrays, f.keywords["out"])
    silenced = type(f) is Silenced
    if silenced:
        f = f.ufunc
    if f is _XP.copyto and len(arrays) == 2:
        arrays = arrays[::-1]
    elif getattr(f, "__name__", "") == "reduce" and getattr(f, "__self__", None) is _XP.add and len(arrays) == 5:
        return _sum(*arrays)
    elif type(f) is not _XP.ufunc or len(arrays) != f.nin + 1:
        return None
    if not all(type(x) in _ARRAYS and x.flags.aligned for x in arrays) or not arrays[-1].size:
        return None
    dtypes = tuple(x.dtype for x in arrays)
    spans = tuple(map(_span, arrays))
    exact = is_exact(f.__name__, dtypes)
    loop = copy_of(dtypes) if f is _XP.copyto else loop_of(f, dtypes)
    loops = _one_loop(arrays) or (_nest(arrays) if exact or f is _XP.copyto else None)
    if loop is None or loops is None or _overlaps(arrays, spans):
        return None
    return Entry(f.__name__, exact, loop, tuple(arrays), *loops, spans, silenced)


def _sum(x: Array, axes: tuple[int, ...], dtype: Any, out: Array, keepdims: bool) -> Entry | None:
    """The sum of all elements of an array without gaps as an entry."""
    if not all(type(a) in _ARRAYS and a.flags.aligned and a.flags.c_contiguous for a in (x, out)):
        return None
    if (
        out.size != 1
        or not x.size
        or type(axes) is not tuple
        or len(axes) != x.ndim
        or not x.dtype == out.dtype == dtype
    ):
        return None
    loop = sum_of(x.dtype)
    if loop is None or _overlaps((x, out), (_span(x), _span(out))):
        return None
    return Entry("reduce", False, loop, (x, out), (x.size,), ((x.itemsize,), (0,)), (_span(x), _span(out)))


Loops = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Sizes of nested loops, outermost first, and the strides of each array."""


def _one_loop(arrays: Sequence[Array]) -> Loops | None:
    """The one flat loop that NumPy would run over all arrays; None if there are several."""
    out = arrays[-1]
    strides = []
    for x in arrays:
        if not x.ndim and x is not out:
            strides.append(0)
        elif x.shape != out.shape or (x.ndim > 1 and not x.flags.c_contiguous):
            return None
        else:
            strides.append(x.strides[0] if x.ndim == 1 else x.itemsize)
    return (out.size,), tuple((s,) for s in strides)


def _nest(arrays: Sequence[Array]) -> Loops | None:
    """The fewest nested loops over all arrays, the innermost along the result's smallest stride; None: too many."""
    out = arrays[-1]
    every = [CPU.xp.broadcast_to(x, out.shape).strides for x in arrays]
    axes = sorted((a for a, n in enumerate(out.shape) if n > 1), key=lambda a: -abs(out.strides[a]))
    sizes, strides = merged([(out.shape[a], [s[a] for s in every]) for a in axes])
    return (tuple(sizes), tuple(zip(*strides, strict=True))) if 0 < len(sizes) <= _MOST_AXES else None


def _overlaps(arrays: Sequence[Array], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the result overlaps an operand but in the very same elements: then NumPy copies the operand."""
    out, (low, high) = arrays[-1], spans[-1]
    layout = lambda x: () if x.size == 1 else (x.strides, x.shape)
    return any(
        first < high and low < end and (first, layout(x)) != (low, layout(out))
        for x, (first, end) in zip(arrays[:-1], spans, strict=False)
    )


def _span(x: Array) -> tuple[int, int]:
    """The addresses of the first byte of an array and of the one behind its last."""
    at = cxx.address(x)
    if x.flags.c_contiguous:
        return at, at + x.nbytes
    reach = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return at + sum(r for r in reach if r < 0), at + sum(r for r in reach if r > 0) + x.itemsize


Place = Callable[[Array], "tuple[int, int] | None"]
"""Of an array on memory of the present call: which memory, and the offset in bytes; None: its address is fixed."""


class FlaggedError(Exception):
    """A floating-point error has occurred, which only single ufuncs can report."""


class _Row(NamedTuple):
    """A call that the machine makes: what of, its nest of loops, and the number of each operand's pointer.

    ``flags``: whether its floating-point errors are reported.
    """

    name: str | None
    loop: Loop
    shape: tuple[int, ...]
    strides: Sequence[Sequence[int]]
    pointers: Sequence[int]
    flags: bool


class _Pointers:
    """Where operands lie: at an offset from one of the ``bases``, of which the first is 0."""

    def __init__(self, count: int) -> None:
        self.offsets = _XP.zeros(count, _XP.int64)
        self.bases = _XP.zeros(count, _XP.int64)


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
        at = cxx.address(self._pointers)
        numbers: list[int] = []
        starts = []
        for row in rows:
            starts.append(8 * len(numbers))
            # The inner loop's size and strides come first: a loop without a nest looks at no others.
            inner_first = (-1, *range(len(row.shape) - 1))
            numbers += [row.shape[a] for a in inner_first]
            numbers += [s[a] for a in inner_first for s in row.strides]
            numbers += [*row.loop[:3], len(row.pointers), len(row.shape)]  # the record of a nest
        self._numbers = _XP.array(numbers, _XP.int64)
        counted = sum(machine.flag_bits().values())
        words: list[int] = []
        for row, start in zip(rows, starts, strict=True):
            axes, count = len(row.shape), len(row.pointers)
            sizes = cxx.address(self._numbers) + start
            strides = sizes + 8 * axes
            called = row.loop[:3] if axes == 1 else (machine.nest(), strides + 8 * axes * count, 0)
            words += [*called, at, sizes, strides, row.flags * counted, 0]
            at += 8 * count
        self._words = _XP.array(words, _XP.int64)
        self.address = cxx.address(self._words)

    def take_offsets(self) -> None:
        """Take the offsets as they are now."""
        self._offsets = self._source.offsets.take(self._index)

    def bind(self, bases: Array) -> None:
        """Let pointers be offsets from ``bases``."""
        _XP.add(self._offsets, bases.take(self._bases), out=self._pointers)


class Table:
    """Stretches of entries: :meth:`add` appends one, :meth:`close` binds all, :meth:`run` calls those of one."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._run: Any = machine.runner()
        self._entries: list[Entry] = []
        self._lifetimes: list[Lifetime] = []
        self._stretches: list[tuple[int, int]] = []
        self._behind: list[int] = []
        self._groups: list[Group] = []
        self._kernels = kernels.NOTHING
        self._fused: _Rows | None = None
        self._changed = False
        """Whether some entry has been changed since the last replay."""
        self.failures = 0
        """Replays that had to be made again."""

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
        self._starts = [0, *accumulate(len(entry.arrays) for entry in self._entries)]
        self._pointers = _Pointers(self._starts[-1])
        for number, entry in enumerate(self._entries):
            self._point_to(number, entry)
        rows = [self._row(number) for number in range(len(self._entries))]
        self._single = _Rows(rows, self._stretches, self._pointers)
        if fused:
            for (first, last), then in zip(self._stretches, self._behind, strict=True):
                self._groups += groups(self._entries, self._lifetimes, first, last, then)
            self._kernels = kernels.request(g.structure for g in self._groups)

    def _point_to(self, number: int, entry: Entry) -> None:
        """Point to the arrays of an entry."""
        for at, x in enumerate(entry.arrays, self._starts[number]):
            place = self._place(x)
            self._pointers.bases[at], self._pointers.offsets[at] = (
                (0, cxx.address(x)) if place is None else (place[0] + 1, place[1])
            )

    def _row(self, number: int) -> _Row:
        entry = self._entries[number]
        pointers = range(self._starts[number], self._starts[number + 1])
        flags = entry.loop.flags and not entry.silenced
        return _Row(entry.name, entry.loop, entry.shape, entry.strides, pointers, flags)

    def _fuse(self) -> None:
        """Let kernels stand for the groups that have one."""
        rows: list[_Row] = []
        stretches = []
        of = {g.first: g for g in self._groups if self._kernels.address(g.structure)}
        for first, last in self._stretches:
            begin = len(rows)
            while first < last:
                g = of.get(first)
                if g is None:
                    rows.append(self._row(first))
                    first += 1
                else:
                    loop = Loop(self._kernels.address(g.structure), 0, 0, True)
                    pointers = [self._starts[number] + k for number, k in g.operands]
                    rows.append(_Row(None, loop, g.shape, g.strides, pointers, not self._entries[first].silenced))
                    first = g.last
            stretches.append((begin, len(rows)))
        self._fused = _Rows(rows, stretches, self._pointers)
        self._kernels = kernels.NOTHING

    @property
    def counts(self) -> tuple[int, int]:
        """How many kernels a replay calls, and how many single loops."""
        names = (self._fused or self._single).names
        return names.count(None), len(names) - names.count(None)

    def change(self, number: int, call: Call) -> bool:
        """Make ``call`` in place of the entry, whose arrays had the same layouts; False if it cannot be one."""
        entry = entry_of(call)
        old = self._entries[number]
        if entry is None or (entry.loop, entry.shape, entry.strides) != (old.loop, old.shape, old.strides):
            return False
        self._entries[number] = entry
        self._point_to(number, entry)
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
        self._now.bind(_XP.array([0, *map(cxx.address, arrays)], _XP.int64))
        return self._now is self._fused

    def run(self, stretch: int) -> None:
        """Call the entries of a stretch; report floating-point errors as the error state says.

        Raises FlaggedError, and reports nothing, where one has occurred while kernels serve.
        """
        rows: Any = self._now
        bits = machine.flag_bits()
        first, last = rows.stretches[stretch]
        mask = sum(bits[kind] for kind in reported())
        while first < last:
            first, flags = divmod(self._run(rows.address, first, last, mask), 64)
            if flags:
                if rows is self._fused:
                    raise FlaggedError
                report(rows.names[first], [kind for kind, bit in bits.items() if flags & bit])
                first += 1
