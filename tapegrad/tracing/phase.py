"""What each thread is doing (reruns, restorations, walks, an optimizer's step), and where the program's steps end.

A program marks its steps with ``tg.memory.step()``; optimizers mark them, too, and where there is neither, every
gradient of an outermost tape ends a step.  What a program marks itself takes precedence over what its optimizers
mark, and that over gradients: as soon as a mark of one kind is seen, lesser ones no longer count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tapegrad.core.state import holding, thread

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = range(5)
"""Phases: a tape records; its walk back; a rerun or restoration; an optimizer changes variables; anything else."""


class _Here(threading.local):
    reruns = False
    """Whether a rerun or a restoration is under way."""
    restoring = False
    """Whether a restoration is."""
    walking = False
    """Whether a gradient walk is under way."""
    cuts: Any = None
    """Within a budget: states that the innermost walk keeps; none while a restoration is under way."""
    source: tuple[int, int] | None = None
    """Stack and call (of the journal) of what the innermost walk is differentiating."""
    node = -1
    """The index of the node that it is differentiating."""
    location: Any = None
    """Where the program asked for the innermost walk."""
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


def set_differentiated(ended: bool) -> None:
    """Whether a walk of an outermost tape has ``ended`` in this thread since its last step did."""
    HERE.differentiated = ended


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


BY_GRADIENT, BY_OPTIMIZER, BY_PROGRAM = range(3)
"""Kinds of marks: who has told that a step ends."""
Listener = Callable[[int], None]
"""Called with the kind of a mark that counts."""


class Steps:
    """The marks of this process."""

    def __init__(self) -> None:
        self.count = 0
        """How many marks have counted so far."""
        self._kind = BY_GRADIENT
        self._listeners: tuple[Listener, ...] = ()

    def mark(self, kind: int) -> None:
        """A step has ended; in a dry run none does."""
        thread.executor.happened(partial(self._mark, kind))

    def _mark(self, kind: int) -> None:
        set_differentiated(False)
        if kind >= self._kind:
            self._kind = kind
            self.count += 1
            for listener in self._listeners:
                listener(kind)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` at every mark from now on, until :meth:`leave`."""
        self._listeners = (*self._listeners, listener)

    def leave(self, listener: Listener) -> None:
        """Do not call ``listener`` any more."""
        self._listeners = tuple(x for x in self._listeners if x != listener)

    def restart(self) -> None:
        """Another program begins: any kind of mark counts."""
        self._kind = BY_GRADIENT


STEPS = Steps()


def step() -> None:
    """A training step ends here: profiles show it as one, and plans count calls from its start anew.

    Optimizers call it by themselves; call it where a step is more than one ``apply``, or has none.  From the first
    call on, the marks of optimizers no longer count.
    """
    STEPS.mark(BY_PROGRAM)
