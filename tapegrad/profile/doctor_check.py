"""The self-test of ``tapegrad doctor``: does the ledger count what the allocators give?

A small training step with a checkpoint runs under the ledger, which is compared with the allocator's own counts after
the forward pass, after the gradient, and when all is freed again.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain

SLACK = 4096 + 64 + 512
"""Bytes by which an array on the CPU may differ: its block is whole pages and aligned, the ledger counts in 512."""
MOST_ARRAYS = 8
"""The most arrays that are alive when the counts are compared."""


def cpu() -> dict[str, object]:
    """The ledger against the bytes in NumPy's domain of ``tracemalloc``."""
    from tapegrad.device.pool import POOL
    from tapegrad.profile.recorder.checking import traced

    def held() -> int:
        POOL.free_all_blocks()  # idle blocks are nobody's
        return traced()

    running = tracemalloc.is_tracing()
    POOL.free_all_blocks()
    tracemalloc.start()
    try:
        return _verdict(_compared("cpu", held, 4096, 256), SLACK * MOST_ARRAYS, "tracemalloc")
    finally:
        if not running:
            tracemalloc.stop()


def cuda(index: int) -> dict[str, object] | str:
    """The ledger against the bytes in use of CuPy's pool, where memory comes from it."""
    from tapegrad.device import cuda as devices
    from tapegrad.device.oom_retry import other_allocator

    device = devices.get(index)
    with device.active():
        if (name := other_allocator(device.xp)) is not None:
            return f"not compared: memory comes from the allocator {name}"
        pool = device.xp.get_default_memory_pool()
        step = (str(device), pool.used_bytes, 256, 64)
        _compared(*step)  # the libraries take their workspaces before anything is counted
        return _verdict(_compared(*step), 0, "the pool")


def _compared(name: str, held: Callable[[], int], rows: int, width: int) -> list[tuple[int, int]]:
    """Bytes since the beginning by the ledger, and by the allocator, at each of the moments."""
    import tapegrad as tg

    moments = []
    with tg.device(name), tg.measure() as m:
        live, others = m.live_bytes, held()
        for _ in chain(_step(rows, width), (None,)):  # once more when all is freed
            moments.append((m.live_bytes - live, held() - others))
    return moments


def _step(rows: int, width: int) -> Iterator[None]:
    """A step of training, which stops where the counts are compared."""
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


def _verdict(moments: list[tuple[int, int]], tolerance: int, oracle: str) -> dict[str, object]:
    most, drift = max(ledger for ledger, _ in moments), max(abs(a - b) for a, b in moments)
    return {
        "ok": most > tolerance and drift <= tolerance,
        "against": oracle,
        "comparisons": len(moments),
        "most bytes": most,
        "drift bytes": drift,
        "tolerance bytes": tolerance,
    }
