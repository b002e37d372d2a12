"""A session: from the start of recording to the finished run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tapegrad.core.storage import METER
from tapegrad.device import current_device
from tapegrad.profile.recorder.checking import Checker
from tapegrad.profile.recorder.collectives import Collectives
from tapegrad.tracing.journal import STEP, STOPPED, Journal
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.log import Log
from tapegrad.tracing.metrics import Measure
from tapegrad.tracing.phase import BY_GRADIENT, HERE, STEPS
from tapegrad.tracing.run import Run
from tapegrad.tracing.sources import sources_of

_COUNTS = ("reruns", "restored", "evictions", "offloads")


class Session:
    """Records what this process does with memory, between :meth:`start` and :meth:`stop`.

    ``stacks``: "line" (the innermost line of the program), "full" or "none".  ``warmup``: steps to leave out first.
    ``steps``: stop recording after so many (None: never).  ``check``: compare the ledger with the allocator.
    ``gradients``: keep a digest of every gradient.  ``on_step`` is called at the end of each step.  ``log``: the run
    file to write to (None: memory); ``warn`` is called if it cannot be written any more.
    """

    def __init__(
        self, *, stacks: str = "line", steps: int | None = None, warmup: int = 0, check: bool = False,
        gradients: bool = False, on_step: Callable[[Session], None] | None = None, keep: int = 1_000_000,
        log: Log | None = None, warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.stacks, self.steps, self.warmup = stacks, steps, warmup
        self.measure = Measure(detailed=False)
        self.log = log or Log()
        self.journal = Journal(self.log, stacks, keep, gradients)
        self.collectives = Collectives(self.journal)
        self.step = 0
        """Steps that have ended, warm-up included."""
        self.began_cpu_ns = self.ended_ns = 0
        self.reserved_bytes = 0
        """Bytes that the pool had reserved at the last sample."""
        self.recording = False
        self._part = Measure(detailed=False)
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
            counts = [getattr(self.measure, name) for name in _COUNTS]
            seq = LEDGER.note(STEP, "", peak)
            ns, cpu_ns = time.perf_counter_ns() - self.journal.began_ns, time.process_time_ns() - self.began_cpu_ns
            METER.locked(self.log.add, "boundaries", seq, ns, kind, cpu_ns, *counts, peak)
            self.sample(seq)
            self._report_problem()
            if self.steps is not None and self.step >= self.steps + self.warmup:
                self._pause()
        if self._on_step is not None:
            self._on_step(self)
        if not self.recording and self.step == self.warmup:
            self._record()

    def _pause(self) -> None:
        """Stop recording; the program goes on."""
        LEDGER.note(STOPPED, f"after {self.steps} steps")
        LEDGER.write(None)
        self.collectives.stop()
        self.recording = False
        self.flush()

    def sample(self, seq: int) -> None:
        """Note what the pool has in use, and has reserved."""
        live = LEDGER.live_bytes
        used, idle = current_device().usage()
        outside = used - live if used >= 0 else 0
        self.reserved_bytes = live + outside + idle
        if self._checker is not None:
            self._checker.compare()
            self.journal.compared = self._checker.figures()
        METER.locked(self.log.add, "samples", seq, live + outside, self.reserved_bytes, outside)

    def flush(self) -> None:
        """Write all that was recorded to the run file."""
        METER.locked(self.journal.flush)

    def _report_problem(self) -> None:
        if self.log.problem and self._warn is not None:
            self._warn(f"{self.log.path} cannot be written any more ({self.log.problem}): if the program is killed, "
                       "what comes now is not known")  # fmt: skip
            self._warn = None

    def stop(self) -> None:
        """End; nothing is recorded any more."""
        self.ended_ns = time.perf_counter_ns()
        if HERE.differentiated:
            STEPS.mark(BY_GRADIENT)
        if self.recording:
            self.sample(self.journal.now())
        STEPS.leave(self._step_ended)
        self.collectives.stop()
        self.recording = False
        if LEDGER.journal is self.journal:
            LEDGER.write(None)
        LEDGER.close(self._part)
        LEDGER.close(self.measure)
        if self._checker is not None:
            self._checker.stop()
        self.flush()
        self._report_problem()

    def run(self, meta: dict[str, Any], *, source: bool = True) -> Run:
        """Return what was recorded so far; ``source``: with the text of the lines that appear."""
        with LEDGER.held():  # other threads may be at work
            self.journal.flush()
            recorded = self.log.read(meta | {"stacks": self.stacks})
        if self.collectives.left_out:
            recorded.meta["collectives_left_out"] = self.collectives.left_out
        recorded.checks = self.journal.checks()
        if source:
            recorded.sources = sources_of(recorded)
        return recorded
