"""Changes: what one event adds to the ledger's sums, worked out once for all events that are alike."""

from __future__ import annotations

from collections import Counter

from tapegrad.core.run import Run
from tapegrad.memory.ledger.costs import units
from tapegrad.memory.ledger.figures import rounded


class Change:
    """Bytes that come in one event, and the work that was done.

    ``stays``: sizes and primitives of the values that are there afterwards; ``net``: their sum; ``top``: the most
    bytes that came at once; ``back``: those of them that are gone afterwards; ``inside``: sizes and primitives of what
    was there then, unless it is what stays.
    """

    __slots__ = ("allocated", "back", "cost", "inside", "kernels", "moved", "names", "net", "stays", "top")

    def __init__(self, run: Run | None = None, nbytes: int = 0) -> None:
        self.names: Counter[str] = Counter()
        self.kernels = self.moved = self.cost = 0
        self.allocated = self.net = self.top = nbytes
        self.stays: list[tuple[int, str]] = []
        self.inside: list[tuple[int, str]] | None = None
        if run is not None:
            self._follow(run)
        self.back = self.top - self.net

    def _follow(self, run: Run) -> None:
        alive: dict[int, tuple[int, str]] = {}
        at_top = alive
        live = 0
        for i, node in enumerate(run.nodes):
            size = rounded(node.nbytes)
            alive[i] = size, node.name
            live += size
            self.allocated += size
            if live > self.top:
                self.top, at_top = live, dict(alive)
            for gone in node.last_read:
                live -= alive.pop(gone)[0]
            self.names[node.name] += 1
            self.moved += node.moved
            self.cost += units(1.0 + node.nbytes)
        self.kernels = len(run.nodes)
        self.net = live
        self.stays = [alive[i] for i in run.results]
        if at_top.keys() != alive.keys():
            self.inside = list(at_top.values())


_MOST_KNOWN = 1024
_of_bytes: dict[int, Change] = {}
of_bytes = _of_bytes.get
"""A buffer gets so many bytes, rounded ones; None: see :func:`new_of_bytes`."""


def new_of_bytes(nbytes: int) -> Change:
    """The change that :func:`of_bytes` is to return from now on."""
    if len(_of_bytes) >= _MOST_KNOWN:
        _of_bytes.clear()
    change = _of_bytes[nbytes] = Change(nbytes=nbytes)
    return change


def new_of_run(run: Run) -> Change:
    """What ``run`` is to have as its change from now on."""
    run.change = change = Change(run)
    return change
