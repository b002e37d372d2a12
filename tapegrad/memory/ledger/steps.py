"""Where one training step ends and the next begins.

A program marks its steps with ``tg.memory.step()``; optimizers mark them, too, and where there is neither, every
gradient of an outermost tape ends a step.  What a program marks itself takes precedence over what its optimizers
mark, and that over gradients: as soon as a mark of one kind is seen, lesser ones no longer count.
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.state import thread
from tapegrad.memory.ledger.phase import HERE

GRADIENT, OPTIMIZER, PROGRAM = range(3)
Listener = Callable[[int], None]
"""Called with the kind of a mark that counts."""


class Steps:
    """The marks of this process."""

    def __init__(self) -> None:
        self.count = 0
        """How many marks have counted so far."""
        self._kind = GRADIENT
        self._listeners: tuple[Listener, ...] = ()

    def mark(self, kind: int) -> None:
        """A step has ended; in a dry run none does."""
        thread.executor.in_earnest(lambda: self._mark(kind), None)

    def _mark(self, kind: int) -> None:
        HERE.differentiated = False
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
        self._kind = GRADIENT


STEPS = Steps()


def step() -> None:
    """A training step ends here: profiles show it as one, and plans count calls from its start anew.

    Optimizers call it by themselves; call it where a step is more than one ``apply``, or has none.  From the first
    call on, the marks of optimizers no longer count.
    """
    STEPS.mark(PROGRAM)
