"""The ledger's entries: one for each buffer that owns bytes, and their sums by category, primitive and place."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.memory.ledger.figures import GRAIN
from tapegrad.memory.ledger.places import Place, by_line

RANK = {"temporary": 0, "user": 0, "input": 0, "activation": 1, "rematerialized": 2, "gradient": 3, "optimizer": 4,
        "parameter": 5}  # fmt: skip
"""Categories by how much they tell."""
_PARTS = ("category", "primitive", "place")


class Entry(weakref.ref[Buffer]):
    """What the ledger knows of one live buffer: a weak reference that tells when it goes."""

    __slots__ = (
        "category",
        "counted",
        "epoch",
        "holder",
        "key",
        "nbytes",
        "next",
        "number",
        "place",
        "primitive",
        "read",
    )
    key: int
    counted: bool
    """Whether its bytes are in the sums."""
    epoch: int
    """Of the ledger, when ``category`` and ``place`` were set."""
    nbytes: int
    category: str
    primitive: str
    place: Place
    number: int
    """In the journal; it and what follows are set where one is written."""
    holder: str
    """What keeps it."""
    read: int
    """The last event of the forward pass that read it (-1: none)."""
    next: int
    """The first one of the backward pass after that."""


class Entries:
    """The live entries; not safe for threads by itself.  ``totals``: bytes by part, kept only while asked for."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.totals: dict[str, Counter[Any]] = {}
        self.by_key: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.by_key.values()))

    def of(self, buffer: Buffer) -> Entry | None:
        """The entry of a buffer."""
        ref = self.by_key.get(id(buffer))
        return ref if ref is not None and ref() is buffer else None

    def enter(self, buffer: Buffer, category: str, place: Place, epoch: int, left: Callable[[Entry], None]) -> Entry:
        """A new entry, not yet counted; ``left`` is called with it when the buffer goes."""
        node = buffer.node
        prim = node.prim
        entry = Entry(buffer, left)
        entry.key = key = id(buffer)
        entry.nbytes = -(-node.aval.nbytes // GRAIN) * GRAIN
        entry.counted = False
        entry.number = -1
        entry.epoch = epoch
        entry.category = category
        entry.place = place
        entry.primitive = prim.name
        self.by_key[key] = entry
        return entry

    def count(self, entry: Entry) -> bool:
        """Add its bytes to the sums; False if that is done."""
        if entry.counted:
            return False
        entry.counted = True
        self.live_bytes += entry.nbytes
        if self.totals:
            self._add(entry, entry.nbytes)
        return True

    def remove(self, entry: Entry) -> bool:
        """Its bytes are gone; False if that is known."""
        if not entry.counted:
            return False
        entry.counted = False
        if self.by_key.get(entry.key) is entry:  # another buffer may lie at the same address by now
            del self.by_key[entry.key]
        self.live_bytes -= entry.nbytes
        if self.totals:
            self._add(entry, -entry.nbytes)
        return True

    def forget(self, since: int) -> list[Buffer]:
        """Remove what nodes from index ``since`` on have made, and return it."""
        late = [(entry, buffer) for entry in self if (buffer := entry()) is not None and buffer.node.index >= since]
        for entry, _ in late:
            self.remove(entry)
        return [buffer for _, buffer in late]

    def tell(self, left: Callable[[Entry], None]) -> None:
        """Call ``left`` from now on when a buffer goes."""
        for key, entry in list(self.by_key.items()):
            buffer = entry()
            if buffer is not None and entry.__callback__ is not left:
                copy = Entry(buffer, left)
                for name in Entry.__slots__:
                    if hasattr(entry, name):
                        setattr(copy, name, getattr(entry, name))
                self.by_key[key] = copy

    def recount(self) -> None:
        """Work out the sums from what is alive: an exception came between an entry and its sum."""
        for key, entry in list(self.by_key.items()):
            entry.counted = entry() is not None
            if not entry.counted:
                del self.by_key[key]
        self.live_bytes = sum([entry.nbytes for entry in self])
        self.sum_up(bool(self.totals))

    def relabel(self, entry: Entry, category: str) -> None:
        """Its bytes serve as ``category``."""
        if self.totals and entry.counted:
            self.totals["category"][entry.category] -= entry.nbytes
            self.totals["category"][category] += entry.nbytes
        entry.category = category

    def sum_up(self, wanted: bool) -> None:
        """Keep totals from now on, or no longer."""
        self.totals = {what: self._total(what) for what in _PARTS} if wanted else {}

    def by(self, what: str) -> dict[str, int]:
        """Bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        if what == "line":
            return by_line(self._total("place"))
        return {key: n for key, n in self._total(what).most_common() if n}

    def _total(self, what: str) -> Counter[Any]:
        totals: Counter[Any] = Counter()
        for entry in self:
            if entry.counted:
                totals[getattr(entry, what)] += entry.nbytes
        return totals

    def _add(self, entry: Entry, nbytes: int) -> None:
        for what, total in self.totals.items():
            total[getattr(entry, what)] += nbytes
