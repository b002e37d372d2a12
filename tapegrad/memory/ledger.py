"""The ledger: every byte the engine's buffers hold, by category, primitive and source line; and the work done.

It counts only while a :func:`measure` block is open; opening the first takes a census of the buffers alive (their
number, not their contents, costs time then), so that live bytes are right from the start, and otherwise it is
free.  Sizes are rounded up to 512 bytes, as CuPy's pool rounds them.

Categories are facts, because the tape knows: *parameter* and *optimizer* (values of variables), *gradient* (results of
``tape.gradient``), *activation* (kept by a tape for a rule), *rematerialized* (made by the rerun of a checkpointed
function), *input* (arrays and numbers given by the user), *temporary* (made while something records or differentiates,
and neither kept nor asked for), *user* (made by the user's own operations, with nothing recording).
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from tapegrad import buffer as _buffer
from tapegrad.buffer import Buffer
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.phantom import Phantom
from tapegrad.memory.costs import cost_of
from tapegrad.memory.entries import RANK, Entries, Entry
from tapegrad.memory.figures import Measure
from tapegrad.memory.places import Place, user_place
from tapegrad.node import Node, thread
from tapegrad.variable import everyone

_BEFORE = "(before the measurement)"


class _Reruns(threading.local):
    """Of this thread: reruns and restorations under way, one within another."""

    depth = 0
    restoring = 0


class Ledger:
    """The accountant: live entries, and the open measures to tell."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries = Entries()
        self._open: list[Measure] = []
        self._wanted: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._places: weakref.WeakKeyDictionary[Buffer, Place] = weakref.WeakKeyDictionary()
        self._peaked: list[Measure] = []
        self._reruns = _Reruns()
        self.detailed = False

    def open(self, measure: Measure) -> None:
        """Start telling ``measure``; the first one takes the census."""
        with self._lock:
            if not self._open:
                self._census()
                _buffer.set_accountant(self)
            measure.live_bytes = self.live_bytes
            self._open.append(measure)
            if measure.detailed and not self.detailed:
                self._entries.sum_up(True)
                self.detailed = True
            measure.settle = self.settle
            self._note_peak(measure)

    def close(self, measure: Measure) -> None:
        """Stop telling ``measure``; after the last one the ledger forgets everything."""
        with self._lock:
            self.settle()
            if measure.detailed:
                measure.live_by_category = self.by("category")
            measure.settle = None
            self._open = [m for m in self._open if m is not measure]
            if self.detailed and not any(m.detailed for m in self._open):
                self._entries.sum_up(False)
                self.detailed = False
            if not self._open:
                _buffer.set_accountant(None)
                self._entries = Entries()
                self._wanted.clear()
                self._places.clear()

    def by(self, what: str) -> dict[str, int]:
        """Live bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        with self._lock:
            return self._entries.by(what)

    def _census(self) -> None:
        alive = [b for b in gc.get_objects() if type(b) is Buffer]
        for b in alive:
            if b.array is not None and not b.keeps and type(b.array) not in (HostScalar, Phantom):
                self._enter(b, "input" if b.node.prim is None else "user", _BEFORE)
        for variable in list(everyone.values()):
            self._relabel(variable._cell._content.root(), variable.category)

    # What the engine tells -------------------------------------------------------------------------------------

    def allocated(self, buffer: Buffer) -> None:
        """A buffer got bytes."""
        if type(buffer.array) is HostScalar:  # a kernel's argument: nothing lies on the device
            return
        if _buffer.keeper is None:
            self._count(buffer)
        else:
            _buffer.keeper.admit(buffer, self._count)

    def _count(self, buffer: Buffer) -> None:
        with self._lock:
            place = self._places.pop(buffer, None) if self.detailed else None
            entry = self._enter(buffer, self._category_of(buffer), place or user_place())
            for m in self._open:
                m.allocated_bytes += entry.nbytes
            self._changed()

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """A node was applied."""
        if self.detailed:
            cost = cost_of(node, [b.node.aval for b in inputs])
            again = self._reruns.restoring
            with self._lock:
                for m in self._open:
                    m.cost += cost
                    if again:
                        m.restored_cost += cost

    def deferred(self, buffer: Buffer) -> None:
        """A buffer was made pending here."""
        if self.detailed:
            with self._lock:
                self._places[buffer] = user_place()

    def place(self) -> Place | None:
        """Where the user's program is (None: without details)."""
        return user_place() if self.detailed else None

    def place_of(self, buffer: Buffer) -> Place | None:
        """Where a buffer, filled or pending, was made (None: not known)."""
        with self._lock:
            entry = self._entries.of(buffer)
            return self._places.get(buffer) if entry is None else entry.place

    def wanted(self, buffer: Buffer) -> None:
        """A tape keeps a buffer, filled or pending."""
        waiting = [buffer] if self.detailed else []
        while waiting:
            b = waiting.pop()
            if b.array is not None:
                self.labelled(b.root(), "activation")
            elif b not in self._wanted:  # what a pending buffer is to be made from is kept for the rule's sake, too
                self._wanted.add(b)
                waiting += b.keeps

    def labelled(self, buffer: Buffer, category: str) -> None:
        """A buffer's bytes serve as ``category``; a more telling category stays."""
        with self._lock:
            self._relabel(buffer, category)

    def ran(self, names: tuple[str, ...], read: int, written: int) -> None:
        """A kernel ran."""
        with self._lock:
            for m in self._open:
                m.kernel_runs += 1
                m.bytes_moved += read + written
                m.nodes_run.update(names)

    def restoring(self, change: int) -> None:
        """Values are made again in this thread."""
        self._reruns.depth += change
        self._reruns.restoring += change

    def restored(self) -> None:
        """One value was made again."""
        with self._lock:
            for m in self._open:
                m.restored += 1

    def evicted(self) -> None:
        """One value was dropped."""
        with self._lock:
            for m in self._open:
                m.evictions += 1

    def moved(self, figure: str) -> None:
        """One value went to a tier (``figure``: "offloads"), came back, or started to ("fetches", "prefetches")."""
        with self._lock:
            for m in self._open:
                setattr(m, figure, getattr(m, figure) + 1)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._entries.live_bytes

    @contextmanager
    def apart(self, measure: Measure) -> Iterator[None]:
        """Only ``measure``, an open one, is told of what happens in the block."""
        self.settle()
        before, self._open = self._open, [measure]
        try:
            yield
        finally:
            self._open = before

    def forget(self, since: int) -> list[Buffer]:
        """The live buffers of nodes from index ``since`` on have no bytes after all."""
        with self._lock:
            found = []
            for entry in self._entries:
                buffer = entry()
                if buffer is not None and buffer.node.index >= since:
                    self._entries.remove(entry)
                    found.append(buffer)
            return found

    def rerun_began(self) -> None:
        """A checkpointed function is rerun in this thread."""
        self._reruns.depth += 1
        with self._lock:
            for m in self._open:
                m.reruns += 1

    def rerun_ended(self) -> None:
        """The rerun is over."""
        self._reruns.depth -= 1

    def scratch(self, nbytes: int) -> None:
        """A kernel took workspace."""
        with self._lock:
            for m in self._open:
                m.scratch_bytes = max(m.scratch_bytes, nbytes)

    # Entries ---------------------------------------------------------------------------------------------------

    def _category_of(self, buffer: Buffer) -> str:
        if buffer.node.prim is None:
            return "input"
        if self._reruns.depth:
            return "rematerialized"
        if self.detailed and buffer in self._wanted:
            return "activation"
        return "temporary" if thread.recorders or thread.deferring is not None else "user"

    def _enter(self, buffer: Buffer, category: str, place: Place) -> Entry:
        return self._entries.enter(buffer, category, place, self._left)

    def _left(self, entry: Entry) -> None:
        """A buffer is gone."""
        with self._lock:
            if self._entries.has(entry):
                self.settle()
                self._entries.remove(entry)
                self._changed()

    def _relabel(self, buffer: Buffer, category: str) -> None:
        entry = self._entries.of(buffer)
        if entry is not None and RANK[category] > RANK[entry.category]:
            self.settle()
            self._entries.relabel(entry, category)

    def _changed(self) -> None:
        live = self._entries.live_bytes
        for m in self._open:
            m.live_bytes = live
            if m.timeline:
                by = self._entries.totals["category"]
                m.samples.append((time.perf_counter() - m.started, live, by["activation"] + by["rematerialized"]))
            if live > m.peak_bytes:
                self._note_peak(m)

    def _note_peak(self, m: Measure) -> None:
        m.peak_bytes = self._entries.live_bytes
        if m.detailed:
            self._peaked.append(m)

    def settle(self) -> None:
        """Note what makes up a new peak, before it changes: while memory only grows, that need not be told."""
        if self._peaked:
            with self._lock:
                parts = {what: dict(total) for what, total in self._entries.totals.items()}
                for m in self._peaked:
                    m.peak_parts = parts
                self._peaked = []


LEDGER = Ledger()
