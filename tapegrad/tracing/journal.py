"""The journal: every event of the ledger in order, as rows of a run file.

It is written while a program runs, so it does little: a row of numbers for an event, nothing that holds an array.
Live bytes, steps and peaks are derived afterwards (``trace/``).

Long programs: events of a step that is neither among the first ones, nor the latest ones, nor the one with the highest
peak are deleted once there are too many; values that outlive such a step stay, and deleted events are counted.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING

from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.storage import METER, Storage
from tapegrad.engine.realize import array_of
from tapegrad.tracing.costs import cost_of
from tapegrad.tracing.frames import CHECKPOINT, Call, Frames, caller, named
from tapegrad.tracing.metrics import CATEGORIES, Replayed
from tapegrad.tracing.names import COST_GRAINS, SLOT_KINDS
from tapegrad.tracing.phase import BACKWARD, FORWARD, HERE, RECOMPUTE, phase
from tapegrad.tracing.program_summary import Contents

if TYPE_CHECKING:
    from types import CodeType

    from tapegrad.tracing.log import Log

_NEAR = (0, *(sign * off for off in range(1, 33) for sign in (1, -1)))
STEP, OOM, USER, STOPPED = range(4)
"""Kinds of marks."""
_LARGE = 64 << 20
"""Bytes of an allocation after which all is written: at the next one the system may kill the program."""

FIRST_STEPS = 3
LAST_STEPS = 2

_ENDS = "allocs", "end_seq", "end_ns"
_USES = "allocs", "holder", "last_forward_seq", "next_backward_seq"
_CALL_ENDS = "calls", "end_seq", "end_ns"
_REPEATS = "calls", "first"


class Journal:
    """Writes events to ``log``.  The ledger calls it, holding the meter's lock."""

    def __init__(self, log: Log, stacks: str = "line", keep: int = 1_000_000, gradients: bool = False) -> None:
        self.log = log
        self.began_ns = perf_counter_ns()
        self.frames = Frames(stacks, self._call_began)
        self.gradients = gradients
        """Whether to keep a digest of every gradient."""
        self.compared = 0, 0
        """Comparisons with the allocator, and the largest difference in bytes."""
        self.before_op: Callable[[], None] | None = None
        """Called before every operation, when all that came before has been noted."""
        self.parts = Parts(self, keep)
        self._programs: dict[int, int] = {}  # by number of the report
        self._avals: list[tuple[ShapedArray, int, int, int]] = []  # with the strings of shape, dtype and device
        self._aval_numbers: dict[int, int] = {}
        self._tick = count().__next__
        self._made: dict[int, tuple[int, int]] = {}  # by node: where it was applied
        self._now = (-1, -1)
        """The last node that was applied, and the phase then."""
        self._last: dict[int, int] = {}  # by node: the last allocation for its value
        self._ops: dict[int, int] = {}  # by node of this step: its operation
        self._before: tuple[dict[int, tuple[int, int]], dict[int, int]] = ({}, {})
        self._like: deque[dict[int, tuple[str, int, int]]] = deque([{}], maxlen=3)
        """Primitive, aval and place of the allocations of the last steps, by number."""
        self._live: set[int] = set()
        """Allocations that have not ended."""
        self._places = self._losses = 0
        """Places that are written, and the log's losses then."""

    # What the ledger reports -----------------------------------------------------------------------------------

    def census(self, storages: Iterable[Storage]) -> None:
        """Note storages that are alive when the journal begins."""
        for storage in storages:
            buffer = storage()
            if buffer is not None:
                self._add(storage, buffer.node, storage.category, -1, -1, -1)

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """Note that ``node`` is applied to ``inputs``."""
        if self.before_op is not None:
            self.before_op()
        if HERE.optimizing:  # many, and small: their results tell enough
            return
        index, now = node.index, phase()
        place, call = self._made[index] = self._made.get(index) or self._where(index)
        self._now = index, now
        seq, ns = self._tick(), self._elapsed()
        name = self.log.text(node.prim.name)
        of = self._ops.get(HERE.node, -1) if now == BACKWARD else -1
        cost = round(cost_of(node, [b.node.aval for b in inputs]))
        op = self._ops[index] = self.parts.add("ops", seq, ns, name, now, call, place, node.aval.footprint, cost, of)
        if call >= 0:
            self._touch(call, seq, ns)
        if now <= BACKWARD:
            self._note_reads(op, inputs)
        if now <= RECOMPUTE:
            self._used([b for b in inputs if b.array is not None], seq, now)

    def _note_reads(self, op: int, inputs: tuple[Buffer, ...]) -> None:
        sources = [self._ops.get(b.root().node.index) for b in inputs]
        for source in dict.fromkeys(sources):
            if source is not None:
                self.log.add("reads", op, source)

    def read(self, buffers: Iterable[Buffer]) -> None:
        """Note that a kernel reads values which were applied before."""
        self._used(buffers, self._tick(), phase())

    def called(self, node: Node) -> None:
        """Give ``node``, a result of a call with a derivative of its own or a lazy one, this source location."""
        self._made[node.index] = self._where(node.index)

    def allocated(self, storage: Storage, node: Node) -> None:
        """Note an allocation."""
        index = node.index
        place, call = self._made.get(index) or self._before[0].get(index) or self._where(index)
        again = -1
        if HERE.reruns:
            same = index if HERE.restoring else index + HERE.shift
            again = self._repeated(same, storage, node, place)
        self._add(storage, node, storage.category, place, call, again)
        self._last[index] = storage.number

    def left(self, storage: Storage) -> None:
        """Note that a storage is freed."""
        self.parts.events += 1
        self._live.discard(storage.number)
        self.log.update(_ENDS, storage.number, self._tick(), self._elapsed())

    def _note_use(self, storage: Storage) -> None:
        if storage.number >= 0:
            holder = self.log.text(storage.holder) if storage.holder else -1
            self.log.update(_USES, storage.number, holder, storage.read, storage.next)

    def changed(self, storage: Storage) -> None:
        """Note that bytes have another category."""
        self.parts.add("changes", self._tick(), storage.number, CATEGORIES.index(storage.category))

    def held(self, storage: Storage, holder: str) -> None:
        """Note what keeps the bytes of ``storage``."""
        if holder != storage.holder:
            storage.holder = holder
            self._note_use(storage)

    def walked(self, began_ns: int) -> None:
        """Note that an outermost backward pass has ended."""
        begin = max(0, began_ns - self.began_ns)
        self.log.add("walks", 0, begin, max(begin, self._elapsed()))

    def differentiating(self, index: int) -> None:
        """Take the source location of node ``index``, to which the backward pass of this thread has come."""
        HERE.source = self._made.get(index) or self._before[0].get(index)
        HERE.node = index

    def catch_up(self, storages: Iterable[Storage]) -> None:
        """Note what has become of storages while nothing was reported; ``storages``: those that are alive."""
        storages = list(storages)
        self.census(s for s in storages if s.number < 0)  # of other threads
        alive, seq, ns = {s.number for s in storages}, self._tick(), self._elapsed()
        for number in self._live - alive:
            self.log.update(_ENDS, number, seq, ns)
        self._live &= alive

    def gradient(self, name: str, digest: str) -> None:
        """Note a gradient that the program has asked for."""
        self.log.add("gradients", self._tick(), -1, self.log.text(name), self.log.text(digest))

    def now(self) -> int:
        """Return a seq of its own for this moment."""
        return self._tick()

    def replayed(self, report: Replayed, arena: Buffer | None) -> None:
        """Note a replay of a captured program, and at its first one the program's contents."""
        number = self._programs.get(report.number)
        if number is None:
            number = self._programs[report.number] = self._program(report.contents())
        alloc = -1 if arena is None else arena.storage.number
        self.parts.add("replays", self._tick(), self._elapsed(), number, alloc, -1)

    def mark(self, kind: int, text: str, peak: int) -> int:
        """Note a mark, and return its seq; the end of a step closes its part."""
        seq = self._tick()
        self.log.add("marks", seq, self._elapsed(), kind, self.log.text(text))
        if kind == STEP:
            self.parts.close(peak)
            self._before = self._made, self._last
            self._made, self._last, self._ops = {}, {}, {}
            self._like.append({})
        return seq

    def flush(self) -> None:
        """Write what was noted."""
        if self._losses != self.log.losses:
            self._losses = self.log.losses
            self._places = 0
            self._programs.clear()
        for number in range(self._places, len(self.frames.places)):
            file, line, function, parent, *span = named(*self.frames.places[number])
            self.log.put("frames", number, self.log.text(file), line, self.log.text(function), *span)
            self.log.put("stacks", number, number, parent)
            self._places = number + 1
        self.log.set("checks", self.checks())
        self.log.flush()

    def checks(self) -> dict[str, int]:
        """Return the numbers of events and deleted events, and what comparing with the allocator showed."""
        checked, drift = self.compared
        parts = self.parts
        return {"events": parts.events, "dropped": parts.dropped, "checked": checked, "drift_bytes": drift}

    def _repeated(self, index: int, storage: Storage, node: Node, place: int) -> int:
        """Return the allocation for the value that is recomputed, about that of node ``index``; -1: none is like it.

        Indices are off by a few where a run makes nodes that the other does not (constants, other threads).
        """
        mine = storage.primitive, self._aval(node.aval), self._instruction(place)
        for off in (0,) if HERE.restoring else _NEAR:
            number = self._last.get(index + off, self._before[1].get(index + off, -1))
            like = next((step[number] for step in reversed(self._like) if number in step), None)
            if like is not None and (*like[:2], self._instruction(like[2])) == mine:
                if not HERE.restoring:
                    HERE.shift += off
                return number
        return -1

    def _instruction(self, place: int) -> tuple[CodeType, int] | None:
        return self.frames.places[place][:2] if place >= 0 else None

    # Rows ------------------------------------------------------------------------------------------------------

    def _elapsed(self) -> int:
        """Return the nanoseconds since the recording began; flush where that is due."""
        now = perf_counter_ns()
        if now > self.log.due:
            self.flush()
        return now - self.began_ns

    def _add(self, storage: Storage, node: Node, category: str, place: int, call: int, again: int) -> None:
        storage.holder = ""
        storage.read = storage.next = -1
        seq, ns = self._tick(), self._elapsed()
        now = self._now[1] if self._now[0] == node.index else phase()
        which, text = self._aval(node.aval), self.log.text
        aval, shape, dtype, device = self._avals[which]
        storage.number = self.parts.add(
            "allocs", seq, ns, storage.nbytes, aval.nbytes, CATEGORIES.index(category), text(storage.primitive), now,
            place, call, shape, dtype, -1, again, device, -1, -1, -1, -1, -1, self._ops.get(node.index, -1),
        )  # fmt: skip
        self._live.add(storage.number)
        self._like[-1][storage.number] = storage.primitive, which, place
        if call >= 0:
            self._touch(call, seq, ns)
        if storage.nbytes >= _LARGE:
            self.flush()

    def _aval(self, aval: ShapedArray) -> int:
        number = self._aval_numbers.get(id(aval))
        if number is None:
            number = self._aval_numbers[id(aval)] = len(self._avals)
            texts = str(tuple(map(int, aval.shape))), aval.dtype.name, aval.device.name
            shape, dtype, device = map(self.log.text, texts)
            self._avals.append((aval, shape, dtype, device))  # which keeps the aval, and so its id
        return number

    def _program(self, contents: Contents) -> int:
        """Write a captured program and its contents; return its row."""
        log = self.log
        plain = -1 if contents.plain is None else self._program(contents.plain)
        program = log.add(
            "programs", log.text(contents.name), plain, contents.nbytes, contents.alignment, log.text(contents.device)
        )  # fmt: skip
        first_task, first_slot = log.next_id("tasks"), log.next_id("slots")
        for slot in contents.slots:
            log.add(
                "slots", program, slot.nbytes, SLOT_KINDS.index(slot.kind), CATEGORIES.index(slot.category), slot.begin,
                slot.end, -1 if slot.maker < 0 else first_task + slot.maker, int(slot.outside),
            )  # fmt: skip
        for task in contents.tasks:
            file, line = (-1, 0) if task.place is None else (log.text(task.place[0]), task.place[1])
            row = log.add(
                "tasks", program, log.text(", ".join(task.names)), int(task.again), task.phase,
                round(task.cost * COST_GRAINS), file, line, task.shares + 2 * task.effect + 4 * task.once,
            )  # fmt: skip
            for how, parts in enumerate((task.reads, task.writes, task.temporaries)):
                for number, view in parts:
                    log.add("uses", row, first_slot + number, how, view)
        for number, view in contents.results:
            log.add("uses", -1, first_slot + number, 3, view)
        return program

    def _used(self, buffers: Iterable[Buffer], seq: int, now: int) -> None:
        if now > RECOMPUTE:
            return
        for b in buffers:
            storage = getattr(b.root(), "storage", None)
            if storage is None or not METER.counts(storage):
                continue
            if now == FORWARD or storage.next < 0:
                storage.read, storage.next = (seq, -1) if now == FORWARD else (storage.read, seq)
                self._note_use(storage)

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
            self.log.update(_REPEATS, number, first)
            number = here.parent
            here = calls[number] if number >= 0 else None

    def _call_began(self, call: Call) -> None:
        seq, ns = self._tick(), self._elapsed()
        text = self.log.text
        self.log.put(
            "calls", len(self.frames.calls) - 1, call.kind, text(call.name), text(call.file), call.line, call.parent,
            -1, call.ordinal, call.phase, seq, ns, seq, ns, -1, call.site,
        )  # fmt: skip

    def _touch(self, call: int, seq: int, ns: int) -> None:
        """Let ``call`` go on, unless a backward pass differentiates it, which is not done in the call."""
        if not HERE.walking or HERE.reruns:
            self.log.update(_CALL_ENDS, call, seq, ns)


def digest_of(buffer: Buffer) -> str:
    """Return the digest of the bytes of a value."""
    value = buffer.node.aval.device.numpy(array_of(buffer))
    return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()


class Part:
    """The rows of one step, or of the time between two, or the rest of several: from ``first`` to before ``after``."""

    def __init__(self, first: dict[str, int], seq: int, call: int) -> None:
        self.first = self.after = first
        self.first_seq = self.last_seq = seq
        self.calls = range(call, call)
        self.peak = self.events = 0
        self.full = True
        """False: events of it were deleted."""


class Parts:
    """The rows of events, in parts that end with steps.

    No more than about ``keep`` events are kept, if the first and last steps and the highest one have fewer.  Adjacent
    parts of which events were deleted become one, so that each step costs the same, however many there were.
    """

    _TABLES = "ops", "allocs", "changes", "replays", "reads"

    def __init__(self, journal: Journal, keep: int) -> None:
        self._journal, self._log, self._keep = journal, journal.log, keep
        self.events = self.dropped = 0
        self._before = self._size = 0  # events before the part that is open, and those in the parts that are over
        self._parts: list[Part] = []
        self._open = self._best = Part(dict.fromkeys(self._TABLES, 0), 0, 0)

    def add(self, table: str, *values: int) -> int:
        """Append the row of an event, and return its id."""
        self.events += 1
        return self._log.add(table, *values)

    def close(self, peak: int) -> None:
        """End the part that is open; ``peak``: the most live bytes in it."""
        part, calls = self._open, len(self._journal.frames.calls)
        part.after = {table: self._log.next_id(table) for table in self._TABLES}
        part.last_seq = seq = self._journal.now()
        part.calls = range(part.calls.start, calls)
        part.peak, part.events = peak, self.events - self._before
        if peak > self._best.peak:
            self._best = part
        self._parts.append(part)
        self._open = Part(part.after, seq, calls)
        self._before = self.events
        self._size += part.events
        while self._size > self._keep and self._delete_one():
            pass

    def _delete_one(self) -> bool:
        """Delete the events of one more part; False if there is none, or the file cannot be changed now."""
        for at in range(FIRST_STEPS, len(self._parts) + 1 - LAST_STEPS):  # deleted ones before it are one part, or few
            if self._parts[at].full and self._parts[at] is not self._best:
                return self._delete(at)
        return False

    def _delete(self, at: int) -> bool:
        """Delete the events of a part, but values that came into it or outlive it, and merge it with its neighbors."""
        self._journal.flush()
        parts = self._parts
        first = at if parts[at - 1].full else at - 1
        last = at + 1 if at + 1 < len(parts) and not parts[at + 1].full else at
        begin, end = parts[first], parts[last]
        rows = {table: (begin.first[table], end.after[table]) for table in self._TABLES}
        inside, ended = "id >= ? AND id < ?", "id >= ? AND id < ? AND end_seq <= ?"
        allocs = *rows["allocs"], end.last_seq
        calls: list[tuple[int, ...]] = [(call,) for call in self._journal.frames.forget(parts[at].calls)]
        changes = f"changes WHERE {inside} AND alloc IN (SELECT id FROM allocs WHERE {ended})"
        counts = self._log.delete([
            (f"ops WHERE {inside}", [rows["ops"]]),
            (f"replays WHERE {inside}", [rows["replays"]]),
            (changes, [(*rows["changes"], *allocs)]),
            (f"allocs WHERE {ended}", [allocs]),
            ("calls WHERE id = ?", calls),
            (f"reads WHERE {inside}", [rows["reads"]]),
        ])  # fmt: skip
        if not counts:
            return False
        *others, ends, _, _ = counts
        deleted = sum(others) + 2 * ends  # beginnings and ends of allocations
        begin.after, begin.last_seq, begin.full = end.after, end.last_seq, False
        begin.events = sum(part.events for part in parts[first : last + 1]) - deleted
        parts[first : last + 1] = [begin]
        self._size -= deleted
        self.dropped += deleted
        return True
