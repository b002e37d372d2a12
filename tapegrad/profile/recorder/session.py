"""A session: from the start of recording to the finished run."""

from __future__ import annotations

import linecache
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapegrad.device import current_device
from tapegrad.memory.ledger.figures import Measure
from tapegrad.memory.ledger.journal import STEP, STOPPED, End, Journal
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import BY_GRADIENT, HERE, STEPS
from tapegrad.profile.recorder.assemble import assemble
from tapegrad.profile.recorder.checking import Checker
from tapegrad.profile.recorder.collectives import Collectives
from tapegrad.profile.runs.model import Run

_COUNTS = ("reruns", "restored", "evictions", "offloads")


@dataclass(frozen=True)
class StepMark:
    """The end of a step, as it was seen."""

    seq: int
    ns: int
    kind: int
    cpu_ns: int
    counts: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Sample:
    """What the pool says at some moment."""

    seq: int
    used: int
    reserved: int
    outside: int


class Session:
    """Records what this process does with memory, between :meth:`start` and :meth:`stop`.

    ``stacks``: "line" (the innermost line of the program), "full" or "none".  ``warmup``: steps to leave out first.
    ``steps``: stop recording after so many (None: never).  ``check``: compare the ledger with the allocator.
    ``gradients``: keep a digest of every gradient.  ``on_step`` is called at the end of each step.
    """

    def __init__(
        self, *, stacks: str = "line", steps: int | None = None, warmup: int = 0, check: bool = False,
        gradients: bool = False, on_step: Callable[[Session], None] | None = None, keep: int = 1_000_000,
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
        self._part = Measure(detailed=False)
        self._alive: dict[int, End] = {}
        self._on_step = on_step
        self._checker = Checker() if check else None

    def start(self) -> None:
        """Begin."""
        STEPS.restart()
        STEPS.listen(self._step_ended)
        LEDGER.open(self.measure)
        LEDGER.open(self._part)
        if not self.warmup:
            self._record()

    def _record(self) -> None:
        self.recording = True
        self.journal.began_ns = time.perf_counter_ns()
        self.began_cpu_ns = time.process_time_ns()
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
            self.sample(seq)
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
        if self._checker is not None:
            recorded.checks["checked"], recorded.checks["drift_bytes"] = self._checker.figures()
        if source:
            recorded.sources = sources_of(recorded)
        return recorded

    def _readings(self) -> dict[int, End]:
        with LEDGER.held() as entries:
            return {e.number: (-1, -1, e.holder, e.read, e.next) for e in entries}


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
