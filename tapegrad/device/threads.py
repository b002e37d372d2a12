"""Threads for tiles.  NumPy releases the GIL inside its loops, so plain threads are enough.

Helpers wait on queues of their own: handing over a job costs a few microseconds and the waking of a thread, with an
executor's futures twice that, and a training step hands over hundreds of jobs.
"""

from __future__ import annotations

import _thread
import contextvars
import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tapegrad.core import locks
from tapegrad.errors import TapegradError

Job = Callable[[], None]

NAME = "tapegrad"
"""The name of every helper thread."""


def _available() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


class _Crew:
    """The helper threads beside the caller, by their queues; made at first use, made anew after a fork."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("TAPEGRAD_NUM_THREADS", 0)) or _available()
        self.idle: list[SimpleQueue[Job | None]] = []

    def forget(self) -> None:
        self.idle = []

    def hire(self) -> SimpleQueue[Job | None]:
        """The queue of an idle helper, which is the caller's until it is put back."""
        try:
            return self.idle.pop()
        except IndexError:
            queue: SimpleQueue[Job | None] = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name=NAME, daemon=True).start()
            return queue

    def dismiss(self) -> None:
        """Let idle helpers end."""
        while self.idle:
            self.idle.pop().put(None)


def _serve(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job


crew = _Crew()
locks.in_child(crew.forget)


def get_num_threads() -> int:
    """How many threads evaluate tiles, the caller included."""
    return crew.count


def set_num_threads(n: int) -> None:
    """Evaluate tiles with ``n`` threads; no result depends on it.  Raises TapegradError for n < 1."""
    if n < 1:
        raise TapegradError(f"set_num_threads: need at least 1 thread, got {n}")
    crew.dismiss()
    crew.count = n


def run(workers: list[Callable[[int], None]], tasks: int) -> None:
    """Run every task number once; each worker (a callable with scratch of its own) takes the next free one.

    NumPy's error state of the caller holds in every thread.  The first exception is raised after all have stopped.
    """
    if len(workers) == 1:
        for i in range(tasks):
            workers[0](i)
        return
    take = itertools.count().__next__
    failures: list[BaseException] = []

    def loop(worker: Callable[[int], None]) -> None:
        try:
            while (i := take()) < tasks:
                worker(i)
        except BaseException as e:
            failures.append(e)

    hired = []
    for worker in workers[1:]:
        done = _thread.allocate_lock()
        done.acquire()
        queue = crew.hire()
        queue.put(_job(contextvars.copy_context(), loop, worker, done))
        hired.append((queue, done))
    loop(workers[0])
    for queue, done in hired:
        done.acquire()
        crew.idle.append(queue)
    if failures:
        raise failures[0]


def _job(
    context: contextvars.Context, loop: Callable[..., None], worker: Callable[[int], None], done: _thread.LockType
) -> Job:
    def job() -> None:
        try:
            context.run(loop, worker)
        finally:
            done.release()

    return job
