"""Locks that neither a fork nor an interrupt leaves held.  Every lock of this package is made here.

A forked child has one thread, the one that forked; what another thread of the parent held would stay held in the child
for ever.  So all locks are free in a child, and a module with state to repair there registers a function
(:func:`in_child`).

An interrupt (Ctrl-C) leaves none held, because locks are taken by ``with``, which the interpreter enters and leaves in
C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import ref

F = TypeVar("F", bound=Callable[..., Any])

_all: set[ref[Any]] = set()
_in_child: list[Callable[[], None]] = []


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


def synchronized(method: F) -> F:
    """A method that holds ``self._lock``."""

    @wraps(method)
    def run(self: Any, *args: object) -> Any:
        with self._lock:
            return method(self, *args)

    return run  # type: ignore[return-value]
