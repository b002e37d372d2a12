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

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tapegrad import buffer as _buffer
from tapegrad.buffer import Buffer
from tapegrad.device.host_scalar import HostScalar
from tapegrad.memory.costs import cost_of
from tapegrad.memory.entries import RANK, Entries, Entry, with_bytes
from tapegrad.memory.figures import Measure
from tapegrad.memory.here import HERE
from tapegrad.memory.journal import Journal
from tapegrad.memory.places import Place, user_place
from tapegrad.memory.steps import GRADIENT, STEPS
from tapegrad.memory.telling import Telling
from tapegrad.memory.wanted import Wanted
from tapegrad.node import Node, thread
from tapegrad.variable import everyone

_BEFORE, _JOURNAL_KNOWS = "(before the measurement)", "(in the journal)"


class Ledger(Telling):
    """The accountant: live entries, and the open measures to tell."""

    def __init__(self) -> None:
        super().__init__()
        self._entries = Entries()
        self._wanted = Wanted()
        self._places: weakref.WeakKeyDictionary[Buffer, Place] = weakref.WeakKeyDictionary()
        self._peaked: list[Measure] = []
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
            measure.peak_bytes = self.live_bytes
            if measure.detailed:
                self._peaked.append(measure)

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
                self.journal = None
                self._wanted.clear()
                self._places.clear()

    def write(self, journal: Journal | None) -> None:
        """Keep ``journal`` from now on, from what is alive; None: no longer.  A measure must be open."""
        with self._lock:
            if journal is not None:
                journal.census(self._entries)
            self.journal = journal
            self._label_variables()

    def note(self, kind: int, text: str, peak: int = 0) -> int:
        """Put a mark into the journal, if there is one, and return its seq (-1: there is none)."""
        with self._lock:
            return -1 if self.journal is None else self.journal.mark(kind, text, peak)

    @contextmanager
    def held(self) -> Iterator[Entries]:
        """In the block nothing is counted by other threads."""
        with self._lock:
            yield self._entries

    def by(self, what: str) -> dict[str, int]:
        """Live bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        with self._lock:
            return self._entries.by(what)

    def _census(self) -> None:
        for b in with_bytes():
            self._enter(b, "input" if b.node.prim is None else "user", _BEFORE)
        self._label_variables()

    def _label_variables(self) -> None:
        for variable in list(everyone.values()):
            self._relabel(variable._cell._content.root(), variable.category, variable.name)

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
            place: Place | None
            if self.detailed:
                place = self._places.pop(buffer, None) or user_place()
            else:
                place = user_place() if self.journal is None else _JOURNAL_KNOWS
            entry = self._enter(buffer, self._category_of(buffer), place)
            nbytes, live = entry.nbytes, self._entries.live_bytes
            for m in self._open:
                m.allocated_bytes += nbytes
                m.live_bytes = live
                if live > m.peak_bytes:
                    m.peak_bytes = live
                    if m.detailed:
                        self._peaked.append(m)
                if m.timeline:
                    self._note_sample(m)

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """A node was applied."""
        if HERE.differentiated and thread.recorders:
            STEPS.mark(GRADIENT)
        journal = self.journal
        if journal is not None and not (HERE.optimizing and journal.before_op is None):
            with self._lock:
                journal.applied(node, inputs, self._entries.of)
        if self.detailed:
            cost = cost_of(node, [b.node.aval for b in inputs])
            again = HERE.restoring
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

    def wanted(self, buffer: Buffer, by: str) -> None:
        """A tape keeps a buffer, filled or pending."""
        waiting = [buffer] if self.detailed or self.journal is not None else []
        with self._lock:
            while waiting:
                b = waiting.pop()
                if b.array is not None:
                    self._relabel(b.root(), "activation", f"vjp of {by}")
                elif self._wanted.add(b):
                    waiting += b.keeps  # what a pending buffer is to be made from is kept for the rule's sake, too

    def labelled(self, buffer: Buffer, category: str, name: str = "") -> None:
        """A buffer's bytes serve as ``category``; a more telling category stays."""
        with self._lock:
            self._relabel(buffer, category, name)
        if category == "gradient" and self.journal is not None:
            self.journal.gradient(buffer, name)

    def read(self, buffers: Sequence[Buffer]) -> None:
        """A kernel reads buffers."""
        if self.journal is not None:
            with self._lock:
                self.journal.read([self._entries.of(b.root()) for b in buffers])

    def called(self, node: Node) -> None:
        """A call with a derivative of its own was made."""
        if self.journal is not None:
            with self._lock:
                self.journal.called(node)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._entries.live_bytes

    @contextmanager
    def apart(self, measure: Measure) -> Iterator[None]:
        """Only ``measure``, an open one, is told of what happens in the block."""
        self.settle()
        before, self._open = self._open, [measure]
        journal, self.journal = self.journal, None
        try:
            yield
        finally:
            with self._lock:
                self._open, self.journal = before, journal
                if journal is not None:
                    journal.catch_up(self._entries)

    def forget(self, since: int) -> list[Buffer]:
        """The live buffers of nodes from index ``since`` on have no bytes after all."""
        with self._lock:
            return self._entries.forget(since)

    # Entries ---------------------------------------------------------------------------------------------------

    def _category_of(self, buffer: Buffer) -> str:
        if buffer.node.prim is None:
            return "temporary" if HERE.optimizing else "input"
        if HERE.reruns:
            return "rematerialized"
        if self._wanted.take(buffer):
            return "activation"
        return "temporary" if thread.recorders or thread.deferring is not None or HERE.optimizing else "user"

    def _enter(self, buffer: Buffer, category: str, place: Place) -> Entry:
        entry = self._entries.enter(buffer, category, place, self._left)
        if self.journal is not None:
            self.journal.allocated(entry, buffer.node)
        return entry

    def _left(self, entry: Entry) -> None:
        """A buffer is gone."""
        with self._lock:
            entries = self._entries
            if entries.has(entry):
                if self._peaked:
                    self.settle()
                entries.remove(entry)
                if self.journal is not None:
                    self.journal.left(entry)
                live = entries.live_bytes
                for m in self._open:
                    m.live_bytes = live
                    if m.timeline:
                        self._note_sample(m)

    def _relabel(self, buffer: Buffer, category: str, holder: str) -> None:
        entry = self._entries.of(buffer)
        if entry is None:
            return
        if RANK[category] > RANK[entry.category]:
            self.settle()
            self._entries.relabel(entry, category)
            if self.journal is not None:
                self.journal.changed(entry)
        elif category != entry.category:
            return
        if self.journal is not None:
            entry.holder = holder

    def _note_sample(self, m: Measure) -> None:
        by = self._entries.totals["category"]
        kept = by["activation"] + by["rematerialized"]
        m.samples.append((time.perf_counter() - m.started, self._entries.live_bytes, kept))

    def settle(self) -> None:
        """Note what makes up a new peak, before it changes: while memory only grows, that need not be told."""
        if self._peaked:
            with self._lock:
                parts = {what: dict(total) for what, total in self._entries.totals.items()}
                for m in self._peaked:
                    m.peak_parts = parts
                self._peaked = []


LEDGER = Ledger()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LEDGER.renew_lock)
