"""A session: from the start of recording to the finished run."""

from __future__ import annotations

import linecache
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapegrad.core.storage import METER
from tapegrad.device import current_device
from tapegrad.memory.ledger.figures import Measure
from tapegrad.memory.ledger.journal import STEP, STOPPED, End, Journal
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import BY_GRADIENT, HERE, STEPS
from tapegrad.memory.ledger.spool import BEGAN, SAMPLE, Spool
from tapegrad.memory.ledger.spool import STEP as STEP_MARK
from tapegrad.profile.recorder.assemble import assemble
from tapegrad.profile.recorder.checking import Checker
from tapegrad.profile.recorder.collectives import Collectives
from tapegrad.profile.runs.model import Run

_COUNTS = ("reruns", "restored", "evictions", "offloads")
LEAST_TO_SHORTEN = 64 << 20
"""A journal on disk of fewer bytes is not worth shortening."""


@dataclass(frozen=True)
class StepMark:
    """The end of a step, as it was seen."""

    seq: int
    ns: int
    kind: int
    cpu_ns: int
    counts: tuple[int, ...]
    peak_bytes: int

    def write(self, spool: Spool) -> None:
        """Put it on disk."""
        spool.put(STEP_MARK, self.seq, self.ns, self.kind, self.cpu_ns, *self.counts, self.peak_bytes)


@dataclass(frozen=True)
class Sample:
    """What the pool says at some moment."""

    seq: int
    used: int
    reserved: int
    outside: int

    def write(self, spool: Spool, checked: int, drift: int) -> None:
        """Put it on disk, with the comparisons made so far."""
        spool.put(SAMPLE, self.seq, self.used, self.reserved, self.outside, checked, drift)


class Session:
    """Records what this process does with memory, between :meth:`start` and :meth:`stop`.

    ``stacks``: "line" (the innermost line of the program), "full" or "none".  ``warmup``: steps to leave out first.
    ``steps``: stop recording after so many (None: never).  ``check``: compare the ledger with the allocator.
    ``gradients``: keep a digest of every gradient.  ``on_step`` is called at the end of each step,
    ``warn`` if the journal on disk cannot go on.
    """

    def __init__(
        self, *, stacks: str = "line", steps: int | None = None, warmup: int = 0, check: bool = False,
        gradients: bool = False, on_step: Callable[[Session], None] | None = None, keep: int = 1_000_000,
        warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.stacks, self.steps, self.warmup = stacks, steps, warmup
        self.measure = Measure(detailed=False)
        self.journal = Journal(stacks, keep, gradients)
        self.collectives = Collectives()
        self.marks: list[StepMark] = []
        self.samples: list[Sample] = []
        self.step = 0
        """Steps that have ended, warm-up included."""
        self.began_cpu_ns = self.ended_ns = 0
        self.recording = False
        self.spool: Spool | None = None
        """The journal on disk, if there is one."""
        self._part = Measure(detailed=False)
        self._alive: dict[int, End] = {}
        self._head: dict[str, Any] = {}
        self._dropped, self._shortest = 0, LEAST_TO_SHORTEN
        self._on_step = on_step
        self._warn = warn
        self._checker = Checker() if check else None

    def start(self) -> None:
        """Begin."""
        STEPS.restart()
        STEPS.listen(self._step_ended)
        LEDGER.open(self.measure)
        LEDGER.open(self._part)
        if not self.warmup:
            self._record()

    def write_to(self, path: str | os.PathLike[str], head: dict[str, Any]) -> None:
        """Keep all that is recorded on disk, too, from the start; ``head``: what the run will tell.  Raises OSError."""
        self._head = {**head, "stacks": self.stacks, "gradients": self.journal.gradients is not None}
        self.spool = Spool(path, self._head)

    def _record(self) -> None:
        self.recording = True
        self.journal.began_ns = time.perf_counter_ns()
        self.began_cpu_ns = time.process_time_ns()
        if self.spool is not None:
            self.spool.put(BEGAN, self.journal.began_ns, self.began_cpu_ns)
            self.journal.spool = self.collectives.spool = self.spool
        self.measure.peak_bytes = LEDGER.live_bytes
        if self._checker is not None:
            self._checker.start(self.journal)
        LEDGER.write(self.journal)
        self.collectives.start()
        self.sample(0)

    def _step_ended(self, kind: int) -> None:
        self.step += 1
        if self.recording:
            peak, self._part.peak_bytes = self._part.peak_bytes, LEDGER.live_bytes
            counts = tuple(getattr(self.measure, name) for name in _COUNTS)
            seq = LEDGER.note(STEP, "", peak)
            ns = time.perf_counter_ns()
            self.marks.append(StepMark(seq, ns, kind, time.process_time_ns(), counts, peak))
            if self.spool is not None:
                METER.locked(self.marks[-1].write, self.spool)
            self.sample(seq)
            self._look_after_spool()
            if self.steps is not None and self.step >= self.steps + self.warmup:
                self._pause()
        if self._on_step is not None:
            self._on_step(self)
        if not self.recording and self.step == self.warmup and not self.marks:
            self._record()

    def _pause(self) -> None:
        """Stop recording; the program goes on."""
        self._alive = self._readings()
        LEDGER.note(STOPPED, f"after {self.steps} steps")
        LEDGER.write(None)
        self.collectives.stop()
        self.recording = False

    def sample(self, seq: int) -> None:
        """Note what the pool has in use, and has reserved."""
        live = LEDGER.live_bytes
        used, idle = current_device().usage()
        known = used >= 0
        self.samples.append(Sample(seq, used if known else live, (used if known else live) + idle,
                                   used - live if known else 0))  # fmt: skip
        if self._checker is not None:
            self._checker.compare()
        if self.spool is not None:
            METER.locked(self.samples[-1].write, self.spool, *self._checks())

    def _checks(self) -> tuple[int, int]:
        return (0, 0) if self._checker is None else self._checker.figures()

    def _look_after_spool(self) -> None:
        """Tell of a problem; write it anew, once half of it is of events that are no longer kept."""
        old = self.spool
        if old is not None and old.problem and self._warn is not None:
            self._warn(f"{old.path} cannot be written any more ({old.problem}): if the program is killed, what comes "
                       "now is not known")  # fmt: skip
            self._warn = None
        if old is None or old.problem or self.journal.parts.dropped == self._dropped or old.size < 2 * self._shortest:
            return
        with LEDGER.held():
            path = f"{old.path}.new"
            try:
                new = Spool(path, self._head)
                self._copy(new)
                os.replace(path, old.path)
            except OSError as error:
                old.problem = old.problem or error.strerror or str(error)
                return
            new.path = old.path
            self.spool = self.journal.spool = self.collectives.spool = new
            self._dropped, self._shortest = self.journal.parts.dropped, max(LEAST_TO_SHORTEN, new.size)

    def _copy(self, spool: Spool) -> None:
        spool.put(BEGAN, self.journal.began_ns, self.began_cpu_ns)
        spool.copy(self.journal, self._readings())
        for mark in self.marks:
            mark.write(spool)
        for sample in self.samples:
            sample.write(spool, *self._checks())
        self.collectives.copy(spool)

    def stop(self) -> None:
        """End; nothing is recorded any more."""
        self.ended_ns = time.perf_counter_ns()
        if HERE.differentiated:
            STEPS.mark(BY_GRADIENT)
        if self.recording:
            self.sample(self.journal.now())
            self._alive = self._readings()
        STEPS.leave(self._step_ended)
        self.collectives.stop()
        self.recording = False
        if LEDGER.journal is self.journal:
            LEDGER.write(None)
        LEDGER.close(self._part)
        LEDGER.close(self.measure)
        if self._checker is not None:
            self._checker.stop()

    def run(self, meta: dict[str, Any], *, source: bool = True) -> Run:
        """What was recorded so far, as a run; ``source``: with the text of the lines that appear."""
        if self.recording:
            self._alive = self._readings()
        meta = meta | {"stacks": self.stacks}
        with LEDGER.held():  # other threads may be at work
            events = list(self.collectives.events)
            recorded = assemble(self.journal, self.marks, self.samples, self._alive, self.began_cpu_ns, events, meta)
        if self.collectives.left_out:
            recorded.meta["collectives_left_out"] = self.collectives.left_out
        recorded.checks["checked"], recorded.checks["drift_bytes"] = self._checks()
        if source:
            recorded.sources = sources_of(recorded)
        return recorded

    def _readings(self) -> dict[int, End]:
        with LEDGER.held() as entries:
            return {e.number: (-1, -1, e.holder, e.read, e.next) for e in entries if e.number >= 0}


AROUND = 3
"""Lines shown before and after a line that appears."""
_WIDTH = 200


def sources_of(run: Run) -> dict[str, dict[str, str]]:
    """By file and line number: the lines in which something was made, and those around them."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for table in (run.frames, run.works):
        for file, line in zip(table["file"], table["line"]):
            if file >= 0:
                wanted[run.text(file)].update(range(max(1, line - AROUND), line + AROUND + 1))
    sources: dict[str, dict[str, str]] = {}
    for name, lines in wanted.items():
        texts = linecache.getlines(name)
        mine = {str(n): texts[n - 1].rstrip("\n")[:_WIDTH] for n in sorted(lines) if n <= len(texts)}
        if mine:
            sources[name] = mine
    return sources
