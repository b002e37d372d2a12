"""A step's communication on its way while the program computes: one channel, in the order in which it is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapegrad.profile.plan.ranks.collectives import Collective


@dataclass(frozen=True)
class Step:
    """A recorded step: ``computation`` seconds without what it waited, ``collectives`` as the program started them."""

    computation: float
    collectives: Sequence[Collective]


@dataclass(frozen=True)
class Passage:
    """When a collective is on its way, in seconds of the step; ``exposed``: how much of it the program waits for."""

    begin: float
    done: float
    exposed: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.done - self.begin


def passages(collectives: Sequence[Collective], seconds: Callable[[Collective], float]) -> list[Passage]:
    """Of each collective: it begins when it is ready and the one before is done, and the program waits where it must.

    While the program waits, it computes nothing: all that follows is later by as much.
    """
    begin, done, exposed = [0.0] * len(collectives), [0.0] * len(collectives), [0.0] * len(collectives)
    moments = [(c.ready, k, 0) for k, c in enumerate(collectives)]
    moments += [(c.wanted, k, 1) for k, c in enumerate(collectives)]
    late = free = 0.0
    for moment, k, waits in sorted(moments):
        now = moment + late
        if not waits:
            begin[k] = max(now, free)
            free = done[k] = begin[k] + seconds(collectives[k])
        elif done[k] > now:
            for j in range(k, -1, -1):  # what is on its way meanwhile
                if done[j] <= now:
                    break
                exposed[j] += done[j] - max(begin[j], now)
            late += done[k] - now
    return [Passage(*times) for times in zip(begin, done, exposed, strict=True)]
