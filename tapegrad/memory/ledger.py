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
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from os.path import dirname
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.buffer import Buffer
from tapegrad.device.host_scalar import HostScalar
from tapegrad.node import thread
from tapegrad.variable import everyone

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "temporary", "input", "user",
)  # fmt: skip
GRAIN = 512
_HERE = dirname(dirname(__file__))
_RANK = {"temporary": 0, "user": 0, "input": 0, "activation": 1, "rematerialized": 2, "gradient": 3, "optimizer": 4,
         "parameter": 5}  # fmt: skip


def rounded(nbytes: int) -> int:
    """``nbytes`` rounded up to the grain of CuPy's pool."""
    return -(-nbytes // GRAIN) * GRAIN


@dataclass
class Entry:
    """What the ledger knows of one live buffer."""

    nbytes: int
    category: str
    primitive: str
    line: str
    reference: Any = None


@dataclass
class Measure:
    """Figures of one ``measure`` block; read them in the block or after it."""

    live_bytes: int = 0
    """Bytes alive now (or at the end of the block), whenever they were allocated."""
    peak_bytes: int = 0
    """The most bytes alive at once in the block."""
    allocated_bytes: int = 0
    """Bytes allocated in the block, freed or not."""
    scratch_bytes: int = 0
    """The largest workspace of one kernel on the CPU (registers, on a GPU); not part of the bytes above."""
    kernel_runs: int = 0
    """Kernels and barriers run: a region counts as one."""
    bytes_moved: int = 0
    """Bytes read plus written by them; what one kernel reads twice counts once."""
    nodes_run: Counter[str] = field(default_factory=Counter)
    """How often nodes of each primitive were evaluated."""
    reruns: int = 0
    """Reruns of functions under ``recompute_grad``."""
    evictions: int = 0
    """Buffers dropped under pressure."""
    live_by_category: dict[str, int] = field(default_factory=dict)
    peak_by_category: dict[str, int] = field(default_factory=dict)
    """What was alive, by category, when the peak was reached."""
    peak_by_primitive: dict[str, int] = field(default_factory=dict)
    peak_by_line: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """With ``timeline=True``: (seconds since the start, live bytes, of which kept for rules) after every change."""
    timeline: bool = False
    started: float = field(default_factory=time.perf_counter)


class Ledger:
    """The accountant: live entries, and the open measures to tell."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._open: list[Measure] = []
        self._totals: dict[str, Counter[str]] = {}
        self._wanted: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._lines: weakref.WeakKeyDictionary[Buffer, str] = weakref.WeakKeyDictionary()
        self._live = 0
        self._reruns = threading.local()

    def open(self, measure: Measure) -> None:
        """Start telling ``measure``; the first one takes the census."""
        with self._lock:
            if not self._open:
                self._totals = {"category": Counter(), "primitive": Counter(), "line": Counter()}
                self._census()
                _buffer.set_accountant(self)
            measure.live_bytes = self._live
            self._open.append(measure)
            self._note_peak(measure)

    def close(self, measure: Measure) -> None:
        """Stop telling ``measure``; after the last one the ledger forgets everything."""
        with self._lock:
            measure.live_by_category = self.by("category")
            self._open = [m for m in self._open if m is not measure]
            if not self._open:
                _buffer.set_accountant(None)
                self._entries, self._totals, self._live = {}, {}, 0
                self._wanted.clear()
                self._lines.clear()

    def by(self, what: str) -> dict[str, int]:
        """Live bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        with self._lock:
            return {key: n for key, n in self._totals.get(what, Counter()).most_common() if n}

    def _census(self) -> None:
        alive = [b for b in gc.get_objects() if type(b) is Buffer]
        for b in alive:
            if b.array is not None and not b.keeps:
                self._enter(b, "input" if b.node.prim is None else "user", "(before the measurement)")
        for variable in list(everyone.values()):
            self._relabel(variable._cell._content.root(), variable.category)

    # What the engine tells -------------------------------------------------------------------------------------

    def allocated(self, buffer: Buffer) -> None:
        """A buffer got bytes."""
        if type(buffer.array) is HostScalar:  # a kernel's argument: nothing lies on the device
            return
        with self._lock:
            line = self._lines.pop(buffer, None) or _user_line()
            entry = self._enter(buffer, self._category_of(buffer), line)
            for m in self._open:
                m.allocated_bytes += entry.nbytes
            self._changed()

    def deferred(self, buffer: Buffer) -> None:
        """A buffer was made pending here."""
        with self._lock:
            self._lines[buffer] = _user_line()

    def wanted(self, buffer: Buffer) -> None:
        """A tape keeps a buffer, filled or pending."""
        waiting = [buffer]
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

    def rerun_began(self) -> None:
        """A checkpointed function is rerun in this thread."""
        self._reruns.depth = getattr(self._reruns, "depth", 0) + 1
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
        if getattr(self._reruns, "depth", 0):
            return "rematerialized"
        if buffer in self._wanted:
            return "activation"
        return "temporary" if thread.recorders or thread.deferring is not None else "user"

    def _enter(self, buffer: Buffer, category: str, line: str) -> Entry:
        key = id(buffer)
        prim = buffer.node.prim
        nbytes = rounded(buffer.node.aval.nbytes)
        entry = Entry(nbytes, category, prim.name if prim else "leaf", line)
        entry.reference = weakref.ref(buffer, lambda ref: self._left(key, ref))
        self._entries[key] = entry
        self._add(entry, nbytes)
        return entry

    def _add(self, entry: Entry, nbytes: int) -> None:
        self._live += nbytes
        for what, total in self._totals.items():
            total[getattr(entry, what)] += nbytes

    def _left(self, key: int, reference: Any) -> None:
        """A buffer is gone."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.reference is reference:
                del self._entries[key]
                self._add(entry, -entry.nbytes)
                self._changed()

    def _relabel(self, buffer: Buffer, category: str) -> None:
        entry = self._entries.get(id(buffer))
        if entry is not None and _RANK[category] > _RANK[entry.category]:
            self._totals["category"][entry.category] -= entry.nbytes
            self._totals["category"][category] += entry.nbytes
            entry.category = category

    def _changed(self) -> None:
        for m in self._open:
            m.live_bytes = self._live
            if m.timeline:
                by = self._totals["category"]
                m.samples.append((time.perf_counter() - m.started, self._live, by["activation"] + by["rematerialized"]))
            if self._live > m.peak_bytes:
                self._note_peak(m)

    def _note_peak(self, m: Measure) -> None:
        m.peak_bytes = self._live
        m.peak_by_category = dict(self._totals["category"])
        m.peak_by_primitive = dict(self._totals["primitive"])
        m.peak_by_line = dict(self._totals["line"])


LEDGER = Ledger()


class measure:
    """``with tg.measure() as m:`` counts bytes and work of the block; ``m`` is a :class:`Measure`.

    ``timeline``: also keep a sample after every change.  Blocks may be nested; other threads' bytes count, too.
    """

    def __init__(self, timeline: bool = False) -> None:
        self._measure = Measure(timeline=timeline)

    def __enter__(self) -> Measure:
        self._measure.started = time.perf_counter()
        LEDGER.open(self._measure)
        return self._measure

    def __exit__(self, *exc: object) -> None:
        LEDGER.close(self._measure)


def _user_line() -> str:
    """``file:line`` of the innermost frame outside this package."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return "(unknown)" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
