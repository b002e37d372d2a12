"""Locks that neither a fork nor an interrupt leaves held.  Every lock of this package is made here.

A forked child has one thread, the one that forked; what another thread of the parent held would stay held in the child
for ever.  So all locks are free in a child, and a module with state to repair there registers a function
(:func:`in_child`).

An interrupt (Ctrl-C) is an exception between any two instructions.  ``with lock:`` is safe, because the interpreter
enters it and leaves it in C; ``__enter__`` and ``__exit__`` written in Python are not, nor is ``lock.acquire()`` before
a ``try``.  A *section* puts even the instructions about the ``with`` block itself into a ``try``: on an exception
:func:`let_go` sees to it that the thread holds the lock no more often than the sections say that it is still in.  No
second ``try`` may stand inside: CPython 3.11 covers its first instruction by no handler.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar
from weakref import ref

F = TypeVar("F", bound=Callable[..., Any])

_all: set[ref[Any]] = set()
_in_child: list[Callable[[], None]] = []
_sections: set[CodeType] = set()
_COUNT = re.compile(r"count=(\d+)")


def lock() -> Any:
    """A lock that its thread may take again, and that is free in a forked child unless the forking thread held it."""
    found: object = threading.RLock()
    _all.add(ref(found, _all.discard))
    return found


def in_child(renew: Callable[[], None]) -> None:
    """Call ``renew`` in every forked child, when all locks are free there."""
    _in_child.append(renew)


def _renew() -> None:
    for weak in list(_all):
        found = weak()
        if found is not None and not found._is_owned():
            found._at_fork_reinit()
    for renew in _in_child:
        renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def section(function: F) -> F:
    """Mark a function that takes a lock in its body and, on an exception, calls :func:`let_go`."""
    _sections.add(function.__code__)
    return function


def whole(method: F) -> F:
    """A method that holds ``self._lock``; on an exception ``self.mend()`` is called, which begins by :func:`let_go`."""

    def run(self: Any, *args: object) -> Any:
        try:
            with self._lock:
                return method(self, *args)
        except BaseException:
            self.mend()
            raise

    run.__doc__, run.__name__, run.__qualname__ = method.__doc__, method.__name__, method.__qualname__
    _sections.add(run.__code__)
    return run  # type: ignore[return-value]


def let_go(held: Any, owner: object = None, besides: int = 0) -> int:
    """A section of ``owner``'s (None: a function's) ends by an exception: release ``held`` if that was not done.

    Returns how many sections of the owner's this thread is in besides; ``besides``: those of generators, which the
    stack does not show.
    """
    inside = besides - 1
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _sections and frame.f_locals.get("self") is owner:
            inside += 1
        frame = frame.f_back
    while held._is_owned() and _count(held) > inside:
        held.release()
    return inside


def _count(held: object) -> int:
    """How often the thread that holds a lock has taken it: only the lock's description tells, in every version."""
    found = _COUNT.search(repr(held))
    return 0 if found is None else int(found[1])
