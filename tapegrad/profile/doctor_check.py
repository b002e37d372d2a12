"""The self-test of ``tapegrad doctor``: does the ledger count what the allocators give?

A small training step with a checkpoint runs under the ledger, which is compared with the allocator's own books after
the forward pass, after the gradient, and when all is freed again.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

SLACK = 4096 + 64 + 512
"""Bytes by which an array on the CPU may differ: its block is whole pages and aligned, the ledger counts in 512."""
MOST_ARRAYS = 8
"""More arrays are not alive where the books are compared."""


def cpu() -> dict[str, Any]:
    """The ledger against the bytes in NumPy's domain of ``tracemalloc``."""
    from tapegrad.device import CPU
    from tapegrad.device.pool import POOL

    only = tracemalloc.DomainFilter(inclusive=True, domain=CPU.xp.lib.tracemalloc_domain)

    def traced() -> int:
        POOL.free_all_blocks()  # idle blocks are nobody's
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([only]).traces)

    running = tracemalloc.is_tracing()
    POOL.free_all_blocks()
    tracemalloc.start()
    try:
        return _verdict(_compared("cpu", traced, 4096, 256), SLACK * MOST_ARRAYS, "tracemalloc")
    finally:
        if not running:
            tracemalloc.stop()


def cuda(index: int) -> dict[str, Any]:
    """The ledger against the bytes in use of CuPy's pool."""
    from tapegrad.device import cuda as devices

    device = devices.get(index)
    with device.active():
        pool = device.xp.get_default_memory_pool()
        step = (str(device), pool.used_bytes, 256, 64)
        _compared(*step)  # the libraries take their workspaces before anything is counted
        return _verdict(_compared(*step), 0, "the pool")


def _compared(name: str, held: Callable[[], int], rows: int, width: int) -> list[tuple[int, int]]:
    """Bytes since the beginning by the ledger, and by the allocator, at each of the moments."""
    import tapegrad as tg

    found = []
    with tg.device(name), tg.measure() as m:
        live, others = m.live_bytes, held()
        for _ in _moments(rows, width):
            found.append((m.live_bytes - live, held() - others))
    return found


def _moments(rows: int, width: int) -> Iterator[None]:
    """A step of training, which stops where the books are compared."""
    yield from _step(rows, width)
    yield  # all is freed


def _step(rows: int, width: int) -> Iterator[None]:
    import tapegrad as tg

    w = tg.Variable(tg.full((width, width), 1 / width, dtype="float32"))
    x = tg.full((rows, width), 0.5, dtype="float32")
    part = tg.recompute_grad(lambda h: tg.tanh(tg.tanh(h @ w) @ w))
    with tg.GradientTape() as tape:
        y = tg.sum(part(tg.tanh(part(x) @ w)))
        y.numpy()
    yield
    tape.gradient(y, w).numpy()
    yield


def _verdict(found: list[tuple[int, int]], tolerance: int, oracle: str) -> dict[str, Any]:
    most, drift = max(ledger for ledger, _ in found), max(abs(a - b) for a, b in found)
    return {
        "ok": most > tolerance and drift <= tolerance,
        "against": oracle,
        "comparisons": len(found),
        "most bytes": most,
        "drift bytes": drift,
        "tolerance bytes": tolerance,
    }
