"""Threads for tiles.  NumPy releases the GIL inside its loops, so plain threads are enough."""

from __future__ import annotations

import contextvars
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tapegrad.errors import TapegradError


def _available() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


class _Crew:
    """The helper threads beside the caller; made at first use, made anew after a fork."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("TAPEGRAD_NUM_THREADS", 0)) or _available()
        self.executor: ThreadPoolExecutor | None = None

    def forget(self) -> None:
        self.executor = None

    def helpers(self) -> ThreadPoolExecutor:
        if self.executor is None:
            self.executor = ThreadPoolExecutor(max(1, self.count - 1), thread_name_prefix="tapegrad")
        return self.executor


_crew = _Crew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.forget)


def get_num_threads() -> int:
    """How many threads evaluate tiles, the caller included."""
    return _crew.count


def set_num_threads(n: int) -> None:
    """Evaluate tiles with ``n`` threads; no result depends on it.  Raises TapegradError for n < 1."""
    if n < 1:
        raise TapegradError(f"set_num_threads: need at least 1 thread, got {n}")
    if _crew.executor is not None:
        _crew.executor.shutdown()
    _crew.count = n
    _crew.executor = None


def run(workers: list[Callable[[int], None]], tasks: int) -> None:
    """Run every task number once; each worker (a callable with scratch of its own) takes the next free one.

    NumPy's error state of the caller holds in every thread.  The first exception is raised after all have stopped.
    """
    if len(workers) == 1:
        for i in range(tasks):
            workers[0](i)
        return
    take = itertools.count().__next__

    def loop(worker: Callable[[int], None]) -> None:
        while (i := take()) < tasks:
            worker(i)

    helpers = _crew.helpers()
    futures = [helpers.submit(contextvars.copy_context().run, loop, w) for w in workers[1:]]
    try:
        loop(workers[0])
    finally:
        failures = [f.exception() for f in futures]
    for failure in failures:
        if failure is not None:
            raise failure
