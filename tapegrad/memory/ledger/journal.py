"""The journal: every event of the ledger in order, for profiles.

It is written while a program runs, so it does little: one tuple for an event, numbers instead of names, nothing that
holds an array.  What was alive when, and what it was for, is worked out afterwards (``profile/``).

Long programs: events of a step that is neither among the first ones, nor the latest ones, nor the one with the most
bytes are dropped once there are too many; what outlives such a step stays, and how many were dropped is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.storage import METER, Storage
from tapegrad.engine.evaluate import array_of
from tapegrad.memory.ledger.contents import Contents
from tapegrad.memory.ledger.figures import Replayed
from tapegrad.memory.ledger.frames import CHECKPOINT, Call, Frames, NamedPlace, caller, named
from tapegrad.memory.ledger.phase import FORWARD, HERE, RECOMPUTE, phase
from tapegrad.memory.ledger.spool import CHANGE, GRADIENT, HELD, REPEATS, WALK, Spool

if TYPE_CHECKING:
    from types import CodeType

_NEAR = (0, *(sign * off for off in range(1, 33) for sign in (1, -1)))
STEP, OOM, USER, STOPPED = range(4)
"""Kinds of marks."""

FIRST_STEPS = 3
LAST_STEPS = 2

# An allocation: seq, ns, bytes, category, op, phase, place, call, number of the aval, and of the row that it repeats.
# Nothing in it is tracked by the garbage collector, which therefore does not slow down as rows become many.
Row = tuple[int, int, int, str, str, int, int, int, int, int]
# Its end: seq, ns, holder, last reading in the forward pass, first one in the backward pass.
End = tuple[int, int, str, int, int]


class Value(NamedTuple):
    """What a journal tells of an aval."""

    shape: str
    dtype: str
    nbytes: int
    device: str


class Journal:
    """Events as they happen.  The ledger calls it, holding its lock."""

    def __init__(self, stacks: str = "line", keep: int = 1_000_000, gradients: bool = False) -> None:
        self.began_ns = perf_counter_ns()
        self.marks: list[tuple[int, int, int, str]] = []  # seq, ns, kind, text
        self.frames = Frames(stacks, self._call_began)
        self.parts = Parts(keep, self.frames.forget)
        self.walks: list[tuple[int, int]] = []
        """When each gradient walk that lies in no other began and ended, in ns."""
        self.gradients: list[tuple[int, str, str]] | None = [] if gradients else None
        """Seq, name and digest of every gradient, if they are wanted."""
        self.programs: list[Contents] = []
        """The captured programs that were replayed."""
        self._program_numbers: dict[int, int] = {}
        self.before_op: Callable[[], None] | None = None
        """Called before every operation, when all that came before has been told."""
        self.spool: Spool | None = None
        """What is written on disk meanwhile."""
        self.avals: list[ShapedArray] = []
        self._aval_numbers: dict[int, int] = {}
        self._tick = count().__next__
        self._number = count().__next__
        self._made: dict[int, tuple[int, int]] = {}  # by node: where it was applied
        self._now = (-1, -1)
        """The last node that was applied, and the phase then."""
        self._last: dict[int, int] = {}  # by node: the last allocation for its value
        self._before: tuple[dict[int, tuple[int, int]], dict[int, int]] = ({}, {})

    # What the ledger tells -------------------------------------------------------------------------------------

    def census(self, entries: Iterable[Storage]) -> None:
        """What is alive when the journal begins."""
        for storage in entries:
            buffer = storage()
            if buffer is not None:
                self._add(storage, buffer.node, storage.category, -1, -1, -1)

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``."""
        if self.before_op is not None:
            self.before_op()
        if HERE.optimizing:  # many, and small: their results tell enough
            return
        index, now = node.index, phase()
        place, call = self._made[index] = self._made.get(index) or self._where(index)
        self._now = index, now
        seq, ns = self._tick(), perf_counter_ns()
        row = seq, ns, node.prim.name, now, call, place
        self.parts.now.ops.append(row)
        touches = call >= 0 and self._touch(call, seq, ns)
        if self.spool is not None:
            self.spool.op(self, row, touches)
        if now <= RECOMPUTE:
            self._used([b for b in inputs if b.array is not None], seq, now)

    def read(self, buffers: Iterable[Buffer]) -> None:
        """A kernel reads values now that were noted for it before."""
        self._used(buffers, self._tick(), phase())

    def called(self, node: Node) -> None:
        """``node`` is due to this place: a result of a call with a derivative of its own, or one that is postponed."""
        self._made[node.index] = self._where(node.index)

    def allocated(self, storage: Storage, node: Node) -> None:
        """A buffer got bytes."""
        index = node.index
        place, call = self._made.get(index) or self._before[0].get(index) or self._where(index)
        again = -1
        if HERE.reruns:
            same = index if HERE.restoring else index + HERE.shift
            again = self._repeated(same, storage, node, place)
        self._add(storage, node, storage.category, place, call, again)
        self._last[index] = storage.number

    def left(self, storage: Storage) -> None:
        """A buffer is gone."""
        seq = self._tick()
        self._end(storage.number, (seq, perf_counter_ns(), storage.holder, storage.read, storage.next))

    def _end(self, number: int, end: End) -> None:
        self.parts.now.ends[number] = end
        if self.spool is not None:
            self.spool.end(number, end)

    def changed(self, storage: Storage) -> None:
        """Bytes serve as something else."""
        seq = self._tick()
        self.parts.now.changes.append((seq, storage.number, storage.category))
        if self.spool is not None:
            self.spool.put(CHANGE, seq, storage.number, self.spool.text(storage.category))

    def held(self, storage: Storage, holder: str) -> None:
        """Something keeps the bytes of ``storage``."""
        if self.spool is not None and storage.number >= 0 and holder != storage.holder:
            self.spool.put(HELD, storage.number, self.spool.text(holder))
        storage.holder = holder

    def walked(self, began_ns: int) -> None:
        """A gradient walk that lies in no other has ended."""
        self.walks.append((began_ns, perf_counter_ns()))
        if self.spool is not None:
            self.spool.put(WALK, *self.walks[-1])

    def differentiating(self, index: int) -> None:
        """The walk of this thread has come to what was made as node ``index``."""
        HERE.source = self._made.get(index) or self._before[0].get(index)

    def catch_up(self, entries: Iterable[Storage]) -> None:
        """Nothing was told for a while: what is not among ``entries`` any more is gone."""
        entries = list(entries)
        self.census(e for e in entries if e.number < 0)  # of other threads
        alive, seq, ns = {e.number for e in entries}, self._tick(), perf_counter_ns()
        ended = {number for part in self.parts.all for number in part.ends}
        for part in self.parts.all:
            for number in part.rows.keys() - ended - alive:
                self._end(number, (seq, ns, "", -1, -1))

    def gradient(self, name: str, digest: str) -> None:
        """A gradient that the program has asked for is there."""
        if self.gradients is not None:
            self.gradients.append((self._tick(), name, digest))
            if self.spool is not None:
                seq, *texts = self.gradients[-1]
                self.spool.put(GRADIENT, seq, *map(self.spool.text, texts))

    def now(self) -> int:
        """A seq of its own for this moment."""
        return self._tick()

    def replayed(self, report: Replayed, arena: Buffer | None) -> None:
        """A captured program was replayed; what it consists of is noted once."""
        number = self._program_numbers.get(report.number)
        if number is None:
            number = self._program_numbers[report.number] = len(self.programs)
            self.programs.append(report.contents())
        row = self._tick(), perf_counter_ns(), number, -1 if arena is None else arena.storage.number
        self.parts.now.replays.append(row)
        if self.spool is not None:
            self.spool.replay(self, row)

    def mark(self, kind: int, text: str, peak: int) -> int:
        """Something worth a mark; the end of a step closes its part.  Returns its seq."""
        seq = self._tick()
        self.marks.append((seq, perf_counter_ns(), kind, text))
        if self.spool is not None:
            self.spool.mark(self.marks[-1], peak)
        if kind == STEP:
            self._close(peak)
        return seq

    # Parts -----------------------------------------------------------------------------------------------------

    def _close(self, peak: int) -> None:
        self.parts.close(peak, len(self.frames.calls))
        self._before = self._made, self._last
        self._made, self._last = {}, {}

    def _repeated(self, index: int, storage: Storage, node: Node, place: int) -> int:
        """The allocation for the value that is made again, about that of node ``index``; -1: none is like it.

        Indices are off by a few where a run makes nodes that the other does not (constants, other threads).
        """
        mine = storage.primitive, self._aval(node.aval), self._instruction(place)
        for off in (0,) if HERE.restoring else _NEAR:
            number = self._last.get(index + off, self._before[1].get(index + off, -1))
            row = self.parts.row(number)
            if row is not None and (row[4], row[8], self._instruction(row[6])) == mine:
                if not HERE.restoring:
                    HERE.shift += off
                return number
        return -1

    def _instruction(self, place: int) -> tuple[CodeType, int] | None:
        return self.frames.places[place][:2] if place >= 0 else None

    # Rows ------------------------------------------------------------------------------------------------------

    def _add(self, storage: Storage, node: Node, category: str, place: int, call: int, again: int) -> None:
        storage.number = number = self._number()
        storage.holder = ""
        storage.read = storage.next = -1
        seq, ns = self._tick(), perf_counter_ns()
        now = self._now[1] if self._now[0] == node.index else phase()
        row = seq, ns, storage.nbytes, category, storage.primitive, now, place, call, self._aval(node.aval), again
        self.parts.now.rows[number] = row
        touches = call >= 0 and self._touch(call, seq, ns)
        if self.spool is not None:
            self.spool.row(self, number, row, touches)

    def _aval(self, aval: ShapedArray) -> int:
        number = self._aval_numbers.get(id(aval))
        if number is None:
            number = self._aval_numbers[id(aval)] = len(self.avals)
            self.avals.append(aval)
        return number

    def _used(self, buffers: Iterable[Buffer], seq: int, now: int) -> None:
        if now > RECOMPUTE:
            return
        read = []
        for b in buffers:
            storage = getattr(b.root(), "storage", None)
            if storage is None or not METER.counts(storage):
                continue
            if now == FORWARD or storage.next < 0:
                storage.read, storage.next = (seq, -1) if now == FORWARD else (storage.read, seq)
                read.append(storage.number)
        if self.spool is not None:
            self.spool.used(seq, now, read)

    def _where(self, index: int) -> tuple[int, int]:
        """Place and call of what is made now: of what is being differentiated, or where the program is."""
        if HERE.walking and not HERE.reruns and HERE.source is not None:
            return HERE.source
        if HERE.optimizing:
            if HERE.update is None:
                HERE.update = self.frames.look(caller(2))
            return HERE.update
        place, call = self.frames.look(caller(2))
        if HERE.reruns and call >= 0:
            self._note_first(call, index)
            if HERE.source is not None and not self._inside(place, call):
                place = HERE.source[0]  # of the first run: a rerun of a layer's has no line of the program
        return place, call

    def _inside(self, place: int, call: int) -> bool:
        """Whether a place lies within the rerun that ``call`` is in."""
        code = self.frames.places[place][0] if place >= 0 else None
        here = self.frames.calls[call]
        while code is not None and here is not None:
            if (here.file, here.line) == (code.co_filename, code.co_firstlineno):
                return True
            if here.kind == CHECKPOINT:
                return False
            here = self.frames.calls[here.parent] if here.parent >= 0 else None
        return True

    def _note_first(self, call: int, index: int) -> None:
        """Which call of the first run the calls of a rerun repeat, from what they make."""
        index += HERE.shift
        calls = self.frames.calls
        number, here = call, calls[call]
        _, first = self._made.get(index) or self._before[0].get(index) or (-1, -1)
        while here is not None and here.first < 0 and here.phase == RECOMPUTE:
            there = calls[first] if first >= 0 else None
            while there is not None and there.key != here.key:
                first = there.parent
                there = calls[first] if first >= 0 else None
            if there is None:
                return
            here.first = first
            if self.spool is not None:
                self.spool.put(REPEATS, number, first)
            number = here.parent
            here = calls[number] if number >= 0 else None

    def _call_began(self, call: Call) -> None:
        call.begin_seq, call.begin_ns = self._tick(), perf_counter_ns()
        call.end_seq, call.end_ns = call.begin_seq, call.begin_ns
        if self.spool is not None:
            self.spool.call(self, len(self.frames.calls) - 1, call)

    def _touch(self, call: int, seq: int, ns: int) -> bool:
        """Whether ``call`` goes on: what a walk does is not done in the call that it differentiates."""
        if HERE.walking and not HERE.reruns:
            return False
        c = self.frames.calls[call]
        if c is not None:
            c.end_seq, c.end_ns = seq, ns
        return True

    # What others ask -------------------------------------------------------------------------------------------

    def values(self, first: int = 0) -> list[Value]:
        """Of the avals from the one numbered ``first`` on."""
        return [Value(str(tuple(map(int, a.shape))), a.dtype.name, a.nbytes, a.device.name) for a in self.avals[first:]]

    def named_places(self, first: int = 0) -> list[NamedPlace]:
        """The places from the one numbered ``first`` on."""
        return [named(*place) for place in self.frames.places[first:]]


def digest_of(buffer: Buffer) -> str:
    """Of the bytes of a value."""
    value = buffer.node.aval.device.numpy(array_of(buffer))
    return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()


class Part:
    """The events of one step, or of the time between two, or what is left of several."""

    def __init__(self, first_call: int = 0) -> None:
        self.rows: dict[int, Row] = {}
        self.ends: dict[int, End] = {}
        self.changes: list[tuple[int, int, str]] = []  # seq, allocation, category
        self.ops: list[tuple[int, int, str, int, int, int]] = []  # seq, ns, name, phase, call, place
        self.replays: list[tuple[int, int, int, int]] = []  # seq, ns, program, allocation of its arena
        self.calls = range(first_call, first_call)
        self.peak = 0
        self.whole = True
        """False: events of it were dropped."""

    def add(self, later: Part) -> None:
        """What is left of this and of the next one, as one."""
        self.rows.update(later.rows)
        self.ends.update(later.ends)
        self.changes += later.changes

    def reduce(self) -> None:
        """Leave what later or earlier parts need: values that came into this one or outlive it."""
        inside = self.rows.keys() & self.ends.keys()
        for number in inside:
            del self.rows[number], self.ends[number]
        self.changes = [c for c in self.changes if c[1] not in inside]
        self.ops, self.replays = [], []
        self.whole = False

    def __len__(self) -> int:
        return len(self.rows) + len(self.ends) + len(self.changes) + len(self.ops) + len(self.replays)


class Parts:
    """All of them; no more than about ``keep`` events, if the first and last steps and the highest one have fewer.

    ``forget`` is told of the calls of steps that are dropped.  Adjacent dropped steps become one, so that each step
    costs the same, however many there were.
    """

    def __init__(self, keep: int, forget: Callable[[Iterable[int]], None]) -> None:
        self.now = self._best = Part()
        self.all = [self.now]
        self.events = self.dropped = 0
        self._size = 0  # events in the parts that are over
        self._keep = keep
        self._forget = forget

    def close(self, peak: int, calls: int) -> None:
        """The part that is open ends; its peak was ``peak``, and so many calls have begun since the start."""
        part = self.now
        part.peak, part.calls = peak, range(part.calls.start, calls)
        if peak > self._best.peak:
            self._best = part
        self.events += len(part)
        self._size += len(part)
        self.now = Part(calls)
        self.all.append(self.now)
        while self._size > self._keep and self._drop_one():
            pass

    def row(self, number: int) -> Row | None:
        """A row of the last few parts."""
        return next((part.rows[number] for part in self.all[-1:-4:-1] if number in part.rows), None)

    def _drop_one(self) -> bool:
        for at in range(FIRST_STEPS, len(self.all) - LAST_STEPS):  # those dropped before are one part, or a few
            if self.all[at].whole and self.all[at] is not self._best:
                self._drop(at)
                return True
        return False

    def _drop(self, at: int) -> None:
        """Drop the events of a part, but for what others need; dropped parts beside it become one with it."""
        parts = self.all
        self._forget(parts[at].calls)
        before = len(parts[at])
        for beside in (at + 1, at - 1):
            if not parts[beside].whole:
                first = min(at, beside)
                before += len(parts[beside])
                parts[first].add(parts.pop(first + 1))
                at = first
        parts[at].reduce()
        self.dropped += before - len(parts[at])
        self._size -= before - len(parts[at])
