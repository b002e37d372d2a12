"""Lazy values that a tape keeps: when they get bytes, these are activations."""

from __future__ import annotations

import weakref

from tapegrad.core.buffer import Buffer

_FIRST_PRUNING = 1024


class Wanted:
    """A set of pending buffers, by node; those that are gone are forgotten when it has doubled."""

    def __init__(self) -> None:
        self.found: dict[int, weakref.ref[Buffer]] = {}
        self._prune_at = _FIRST_PRUNING

    def add(self, buffer: Buffer) -> bool:
        """Whether ``buffer`` is new here."""
        if buffer.node.index in self.found:
            return False
        self.found[buffer.node.index] = weakref.ref(buffer)
        if len(self.found) >= self._prune_at:
            for i, b in self.found.copy().items():  # other threads may add to it
                if b() is None:
                    self.found.pop(i, None)
            self._prune_at = max(_FIRST_PRUNING, 2 * len(self.found))
        return True

    def take(self, buffer: Buffer) -> bool:
        """Whether ``buffer``, which is filled now, was here."""
        return bool(self.found) and self.found.pop(buffer.node.index, None) is not None

    def clear(self) -> None:
        """Nobody asks any more."""
        self.found.clear()
