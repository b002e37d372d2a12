"""The threads that use this package: whether a value may be overwritten, though somebody might read it meanwhile.

A thread is *known* from when it first asks for its state (see ``state``) or for what a cell holds until it ends.  Most
threads of a process, such as those of a notebook's kernel, never are.  While a value is overwritten, a new thread waits
before it becomes known: so it reads the old value or the new one, never half of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import ref

from tapegrad.core import locks

_gate = locks.lock()
_known: set[ref[_Mark]] = set()


class _Mark:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


class _Own(threading.local):
    def __init__(self) -> None:
        self.mark = _Mark()
        with _gate:
            _known.add(ref(self.mark, _known.discard))


_own = _Own()


class Local(threading.local):
    """What each thread has for itself; who asks for it is known."""

    def __init__(self) -> None:
        _ = _own.mark


def unshared(may: Callable[[], bool], overwrite: Callable[[], object]) -> bool:
    """Call ``overwrite``, if ``may()`` and only this thread is known, while none becomes so; whether it was called.

    Both must take no lock and no memory: a thread that waits to become known may hold any lock.
    """
    with _gate:
        if len(_known) > 1 or not may():
            return False
        overwrite()
        return True
