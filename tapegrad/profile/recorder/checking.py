"""Compares the ledger with the allocator's own counts while a program runs."""

from __future__ import annotations

import tracemalloc

from tapegrad.device import CPU, current_device
from tapegrad.tracing.journal import Journal
from tapegrad.tracing.ledger import LEDGER

PER_ARRAY = 4096 + 512
"""On the CPU, by how many bytes an array's block may exceed what the ledger counts: a page, and alignment."""


class Checker:
    """Compares, and keeps the largest difference.

    On CUDA: bytes in use of CuPy's pool, before every operation, with tolerance 0; what the pool held for others when
    recording began is left out.  With another allocator nothing is compared.  On the CPU: the bytes of NumPy's domain
    in ``tracemalloc``, at the end of each step, with a tolerance of a page and a half per array: bytes that the ledger
    has and NumPy has not (not the other way round, since programs have arrays of their own).
    """

    def __init__(self) -> None:
        self._checked = self._drift = self._others = 0
        self._pooled = False
        self._journal: Journal | None = None
        self._traced = False

    def start(self, journal: Journal) -> None:
        """Begin."""
        self._journal = journal
        used, idle = current_device().usage()
        self._pooled = used >= 0
        if self._pooled:
            self._others = used - LEDGER.live_bytes
            journal.before_op = self._compare_pool
        elif current_device().kind == "cpu":
            self._traced = not tracemalloc.is_tracing()
            tracemalloc.start()
            self._others = traced() - idle - LEDGER.live_bytes

    def compare(self) -> None:
        """Compare now."""
        if self._pooled:
            self._compare_pool()
        elif self._journal is not None and current_device().kind == "cpu" and tracemalloc.is_tracing():
            _, idle = current_device().usage()
            with LEDGER.held() as entries:
                missing, slack = LEDGER.live_bytes - (traced() - idle - self._others), PER_ARRAY * (1 + len(entries))
            self._note(max(0, missing - slack))

    def _compare_pool(self) -> None:
        self._note(abs(current_device().usage()[0] - LEDGER.live_bytes - self._others))

    def _note(self, difference: int) -> None:
        self._checked += 1
        self._drift = max(self._drift, difference)

    def stop(self) -> None:
        """End."""
        if self._journal is not None:
            self._journal.before_op = None
        if self._traced:
            tracemalloc.stop()

    def figures(self) -> tuple[int, int]:
        """Comparisons made, and the largest difference in bytes."""
        return self._checked, self._drift


def traced() -> int:
    """Bytes of NumPy's arrays, as ``tracemalloc`` has counted them since it was started."""
    domain = tracemalloc.DomainFilter(inclusive=True, domain=CPU.xp.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([domain])
    return sum(trace.size for trace in snapshot.traces)
