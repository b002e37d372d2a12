"""What the steps of a checkpointed loop draw from the host's generators: checked when a step is rerun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tapegrad.device.numerics import bits
from tapegrad.remat.checkpoint.checkpoint import HostDraws
from tapegrad.remat.checkpoint.snapshot import Position


class LoopDraws(HostDraws):
    """What the steps of a loop draw from the host's generators.  Of the state before each step a hash is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hashes: list[tuple[int, ...]] = []
        self._last: tuple[int, ...] = ()
        self._python = True

    def next_step(self) -> None:
        """The first run comes to a step, or to the end.

        Python's generator costs much to look at, so that is done only in loops whose first step draws from it.
        """
        step = len(self._hashes)
        if step < 2 or self._python:
            self._hashes.append(self._hash())
            self._python = step < 1 or self._python and self._hashes[0][1] != self._hashes[1][1]
        else:
            self._hashes.append((hash(bits.words_mark()),))

    def steps_without(self, steps: int) -> None:
        """So many steps more have drawn nothing."""
        self._hashes += self._hashes[-1:] * steps

    def _hash(self) -> tuple[int, ...]:
        return hash(bits.words_mark()), hash(bits.python_mark())

    def resumed(self, here: Position) -> AbstractContextManager[None]:
        """Steps rerun from ``here``, which moves on; afterwards the generators are as they were."""
        return self._resumed(here) if self.moved else self.repeated()

    @contextmanager
    def _resumed(self, here: Position) -> Iterator[None]:
        now = bits.set_host_state(here.random or self._begun, self.moved)
        try:
            self._last = self._hash()
            yield
            here.random = bits.host_state()
        finally:
            bits.set_host_state(now, self.moved)

    def compare(self, step: int) -> None:
        """A step has been rerun.  Raises RecomputeError unless it has drawn what it drew first, or nothing."""
        if self.moved:
            before, self._last, wanted = self._last, self._hash(), self._hashes[step + 1]
            wrong = [i for i in self.moved if i < len(wanted) and self._last[i] not in (before[i], wanted[i])]
            if wrong:
                raise self.another(tuple(wrong), f"the rerun of step {step}")
