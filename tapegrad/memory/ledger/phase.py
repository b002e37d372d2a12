"""What each thread is doing, as far as the ledger wants to know: reruns, restorations, walks, an optimizer's step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tapegrad.core.state import holding, thread
from tapegrad.memory.ledger.places import Place

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = range(5)
"""Phases: a tape records; its walk back; a rerun or restoration; an optimizer changes variables; anything else."""


class _Here(threading.local):
    reruns = 0
    """Reruns and restorations under way, one within another."""
    restoring = 0
    """Restorations alone."""
    walking = 0
    """Gradient walks under way."""
    source: tuple[int, int] | None = None
    """Stack and call (of the journal) of what the innermost walk is differentiating."""
    place: Place | None = None
    """Where the program asked for the innermost walk, where places are noted."""
    shift = 0
    """What to add to the index of a node of the innermost rerun for that of the node it repeats; 0: not known."""
    optimizing = False
    update: tuple[int, int] | None = None
    """Stack and call in which the optimizer was asked."""
    differentiated = False
    """Whether a walk of an outermost tape has ended since the last step did."""


HERE = _Here()
T = TypeVar("T")


def during(f: Callable[..., T], *args: Any, **changes: Any) -> T:
    """What ``f(*args)`` returns; while it runs, :data:`HERE` holds the ``changes``.  Interrupts: see ``state.py``."""
    return holding(HERE, f, *args, **changes)


def phase() -> int:
    """What this thread is doing now."""
    if HERE.reruns:
        return RECOMPUTE
    if HERE.walking:
        return BACKWARD
    if HERE.optimizing:
        return OPTIMIZER
    return FORWARD if thread.recorders or thread.hidden else OTHER


@contextmanager
def optimizing() -> Iterator[None]:
    """In the block this thread changes variables by their gradients."""
    before, HERE.optimizing = HERE.optimizing, True
    try:
        yield
    finally:
        HERE.optimizing, HERE.update = before, None
