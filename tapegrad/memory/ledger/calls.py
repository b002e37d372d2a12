"""Numbers of calls: the how-many-th call of a function it is in its step, so that a plan can name single calls.

Profiles count with it, and plans that are applied: so both number the same calls alike.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

from tapegrad.core.state import thread
from tapegrad.memory.ledger.steps import STEPS


class Ordinals:
    """Counts calls, by key, from 0; anew in every step, and under every new outermost tape; for one thread.

    ``by_step``: anew in every step alone, as calls of reruns are, which have tapes of their own.
    """

    def __init__(self, by_step: bool = False) -> None:
        self._by_step = by_step
        self._seen: Counter[Hashable] = Counter()
        self._step = -1
        self._tape: Any = lambda: None

    def next(self, key: Hashable) -> int:
        """The number of the call of ``key`` that begins now."""
        tape = None if self._by_step else _outermost()
        if self._step != STEPS.count or self._tape() is not tape:
            self._seen.clear()
            self._step = STEPS.count
            self._tape = weakref.ref(tape) if tape is not None else lambda: None
        number = self._seen[key]
        self._seen[key] += 1
        return number

    def take_back(self, key: Hashable) -> None:
        """The last call of ``key`` did not count after all."""
        if self._seen[key]:
            self._seen[key] -= 1


def _outermost() -> Any:
    """The outermost recorder; in a checkpoint, whose look-out hides the tapes outside, the outermost of those."""
    recorders = thread.recorders or thread.hidden
    while recorders:
        found = recorders[0]
        recorders = getattr(found, "outer", ())
        if not recorders:
            return found
    return None
