"""What the ledger only passes on: work done, to the open measures, and what each thread is doing."""

from __future__ import annotations

from typing import Any

from tapegrad import locks
from tapegrad.device import phantom
from tapegrad.locks import whole
from tapegrad.memory.figures import Measure
from tapegrad.memory.here import HERE
from tapegrad.memory.journal import Journal
from tapegrad.state import thread


class Telling:
    """The part of the ledger that counts no bytes."""

    def __init__(self) -> None:
        self._lock = locks.lock()
        self._open: list[Measure] = []
        self.journal: Journal | None = None
        """Written while a program is profiled."""

    @whole
    def ran(self, names: tuple[str, ...], read: int, written: int) -> None:
        """A kernel ran."""
        for m in self._open:
            m.kernel_runs += 1
            m.bytes_moved += read + written
            m.nodes_run.update(names)

    def restoring(self, change: int) -> None:
        """Values are made again in this thread."""
        HERE.reruns += change
        HERE.restoring += change

    @whole
    def restored(self) -> None:
        """One value was made again."""
        for m in self._open:
            m.restored += 1

    @whole
    def evicted(self) -> None:
        """One value was dropped."""
        for m in self._open:
            m.evictions += 1

    @whole
    def moved(self, figure: str) -> None:
        """One value went to a tier (``figure``: "offloads"), came back, or started to ("fetches", "prefetches")."""
        for m in self._open:
            setattr(m, figure, getattr(m, figure) + 1)

    @whole
    def rerun_began(self, shift: int) -> Any:
        """A checkpointed function is rerun in this thread."""
        HERE.reruns += 1
        before, HERE.shift = HERE.shift, shift
        for m in self._open:
            m.reruns += 1
        return before

    def rerun_ended(self, token: Any) -> None:
        """The rerun is over."""
        HERE.reruns -= 1
        HERE.shift = token

    @whole
    def scratch(self, nbytes: int) -> None:
        """A kernel took workspace."""
        for m in self._open:
            m.scratch_bytes = max(m.scratch_bytes, nbytes)

    def walk_began(self) -> Any:
        """A gradient walk begins."""
        HERE.walking += 1
        return HERE.source

    def differentiating(self, index: int) -> None:
        """The walk has come to a node."""
        if self.journal is not None:
            self.journal.differentiating(index)

    def walk_ended(self, token: Any) -> None:
        """The walk is over."""
        HERE.walking -= 1
        HERE.source = token
        if not (HERE.walking or HERE.reruns or thread.recorders or phantom.mode.dry):
            HERE.differentiated = True
