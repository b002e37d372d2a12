"""Entries: what the ledger knows of each buffer that owns bytes, the sums of that, and pending buffers tapes want."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.memory.ledger.figures import Change
from tapegrad.memory.ledger.frames import Place, by_line

RANK = {"temporary": 0, "user": 0, "input": 0, "communication": 1, "activation": 1, "rematerialized": 2,
        "gradient": 3, "optimizer": 4, "parameter": 5}  # fmt: skip
"""Categories by how much they tell."""
_PARTS = ("category", "primitive", "place")


class Entry(weakref.ref[Any]):
    """What the ledger knows of one live buffer, which refers to it: a weak reference that tells when it goes.

    Of what a gradient walk makes of small values there are no buffers, but arrays, until somebody asks for one.

    Most values of small operations go soon: until the event of its coming is added, an entry has ``nbytes`` and
    ``wanted`` alone.
    """

    __slots__ = (
        "category",
        "epoch",
        "holder",
        "nbytes",
        "next",
        "number",
        "place",
        "primitive",
        "read",
        "wanted",
    )
    epoch: int
    """Of the ledger, when ``category`` and ``place`` were set."""
    nbytes: int
    """Zero: its going does not count."""
    category: str
    primitive: str
    place: Place
    wanted: int
    """The last epoch in which it was told that a tape keeps it."""
    number: int
    """In the journal (-1: it is not there); what follows is set where one is written."""
    holder: str
    """What keeps it."""
    read: int
    """The last event of the forward pass that read it (-1: none)."""
    next: int
    """The first one of the backward pass after that."""

    def buffer(self) -> Buffer | None:
        """The buffer; None also of an array without one."""
        thing = self()
        return thing if isinstance(thing, Buffer) else None


class Sums:
    """What events say: ``live`` and ``top`` bytes, if ``live`` are there before, and the event ``at`` it (-1: none).

    ``changes`` of all who have come; ``left``: the entries of those that have gone, unless they had only come;
    ``others``: the remaining events, in order.
    """

    __slots__ = ("_new", "at", "changes", "left", "live", "others", "top")

    def __init__(self, events: list[Any], live: int = 0) -> None:
        changes: list[Change] = []
        new: dict[int, Any] = {}
        left: list[Entry] = []
        others: list[Any] = []
        top, at = live, -1
        for i, event in enumerate(events):
            kind = type(event)
            if kind is Entry:
                try:
                    live -= event.nbytes
                except AttributeError:  # an interrupt came while it was made
                    continue
                if new.pop(id(event), None) is None:
                    left.append(event)
            elif kind is tuple:
                change = event[0]
                changes.append(change)
                if live + change.top > top:
                    top, at = live + change.top, i
                live += change.net
                if len(event) == 4:
                    new[id(event[3])] = event
                else:
                    for k, entry in enumerate(event[3:]):
                        new[id(entry)] = *event[:3], entry, k
            else:
                others.append(event)
        self.changes, self._new, self.left, self.others = changes, new, left, others
        self.live, self.top, self.at = live, top, at

    def new(self) -> Iterator[tuple[str, str, Place, Entry]]:
        """Of those that have come and are still there: primitive, category, place, entry."""
        for change, category, place, entry, *k in self._new.values():
            yield change.stays[k[0] if k else 0][1], category, place, entry


def _copy(entry: Entry, to: Entry) -> None:
    for name in Entry.__slots__:
        if hasattr(entry, name):
            setattr(to, name, getattr(entry, name))


class Entries:
    """The live entries; not safe for threads by itself.  ``totals``: bytes by part, kept only while asked for."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.totals: dict[str, Counter[Any]] = {}
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def of(self, buffer: Buffer) -> Entry | None:
        """The entry of a buffer."""
        return self._entries.get(id(getattr(buffer, "entry", None)))

    def add(self, entry: Entry, primitive: str, category: str, place: Place, epoch: int) -> None:
        """Its bytes are there."""
        entry.primitive = primitive
        entry.category = category
        entry.place = place
        entry.epoch = epoch
        entry.number = -1
        self._entries[id(entry)] = entry
        if self.totals:
            self._add(entry, entry.nbytes)

    def hand_on(self, entry: Entry, to: Entry) -> None:
        """The bytes of one entry are those of another from now on."""
        _copy(entry, to)
        entry.nbytes = 0
        self._entries[id(to)] = to
        del self._entries[id(entry)]

    def remove(self, entry: Entry) -> None:
        """Its bytes are gone."""
        if self._entries.pop(id(entry), None) is not None and self.totals:
            self._add(entry, -entry.nbytes)

    def forget(self, since: int) -> list[Buffer]:
        """Remove what nodes from index ``since`` on have made, and return it."""
        late = [
            (entry, buffer) for entry in self if (buffer := entry.buffer()) is not None and buffer.node.index >= since
        ]
        for entry, _ in late:
            self.remove(entry)
            self.live_bytes -= entry.nbytes
            entry.nbytes = 0
        return [buffer for _, buffer in late]

    def tell(self, left: Callable[[Entry], None]) -> None:
        """Call ``left`` from now on when a buffer goes."""
        for entry in self:
            thing = entry()
            if thing is not None and entry.__callback__ is not left:
                copy = Entry(thing, left)
                self.hand_on(entry, copy)
                if isinstance(thing, Buffer):
                    thing.entry = copy

    def recount(self) -> None:
        """Work out the sums from what is alive: an exception came while they were changed."""
        for entry in self:
            if entry() is None:
                entry.nbytes = 0
                del self._entries[id(entry)]
        self.live_bytes = sum([entry.nbytes for entry in self])
        self.sum_up(bool(self.totals))

    def relabel(self, entry: Entry, category: str) -> None:
        """Its bytes serve as ``category``."""
        if self.totals:
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
            totals[getattr(entry, what)] += entry.nbytes
        return totals

    def _add(self, entry: Entry, nbytes: int) -> None:
        totals = self.totals
        totals["category"][entry.category] += nbytes
        totals["primitive"][entry.primitive] += nbytes
        totals["place"][entry.place] += nbytes


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
            self.found = {i: b for i, b in self.found.items() if b() is not None}
            self._prune_at = max(_FIRST_PRUNING, 2 * len(self.found))
        return True

    def take(self, buffer: Buffer) -> bool:
        """Whether ``buffer``, which is filled now, was here."""
        return bool(self.found) and self.found.pop(buffer.node.index, None) is not None

    def clear(self) -> None:
        """Nobody asks any more."""
        self.found.clear()
