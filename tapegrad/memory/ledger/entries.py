"""Entries: what the ledger knows of each buffer that owns bytes, the sums of that, and pending buffers tapes want."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.memory.ledger.figures import Change, of_bytes
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
        "came",
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
    came: int
    """The number of its event among those that are being added, where that tells of its coming; else -1."""
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


class Handed:
    """The bytes of the entry ``old``, an array's, are those of ``new``, its buffer's, from now on."""

    __slots__ = ("new", "old")

    def __init__(self, old: Entry, new: Entry) -> None:
        self.old, self.new = old, new


_GONE_BY = -2
"""The number of an entry that has handed on its bytes."""


class Sums:
    """What events say: ``live`` bytes, if so many are there before, and ``top``, the most at any time.

    ``changes`` of all who have come; ``left``: the entries of those that have gone, unless they had only come;
    ``labels``: entries with new categories; ``handed``: what has been handed on, unless it had only come
    (``replaced``: those that had); ``calls``: what to call.
    """

    __slots__ = ("_came", "calls", "changes", "handed", "labels", "left", "live", "replaced", "top")

    def __init__(self, events: list[Any], live: int = 0) -> None:
        came: list[Any] = []
        changes: list[Change] = []
        left: list[Entry] = []
        labels: list[list[Any]] = []
        handed: list[Handed] = []
        replaced: list[Entry] = []
        calls: list[Callable[[], None]] = []
        top, count = live, 0
        for event in events:
            kind = type(event)
            if kind is tuple:
                try:
                    change, _, _, entry = event  # most often: one value stays
                    came.append(event)
                    entry.came = count
                    count += 1
                except ValueError:
                    change = event[0]
                    for (nbytes, primitive), entry in zip(change.stays, event[3:], strict=True):
                        came.append((of_bytes(nbytes, primitive), *event[1:3], entry))
                        entry.came = count
                        count += 1
                changes.append(change)
                high = live + change.top
                if high > top:
                    top = high
                live += change.net
            elif kind is Entry:
                try:
                    number = event.came
                except AttributeError:  # an interrupt came while it was made
                    continue
                if number >= 0:
                    came[number] = None
                elif number == -1:
                    left.append(event)
                else:
                    continue
                live -= event.nbytes
            elif kind is list:
                labels.append(event)
            elif kind is Handed:
                number = event.old.came
                if number >= 0:
                    came[number] = *came[number][:3], event.new
                    replaced.append(event.old)
                else:
                    handed.append(event)
                event.new.came = max(number, -1)
                event.old.came = _GONE_BY
            else:
                calls.append(event)
        self._came, self.changes, self.left, self.handed = came, changes, left, handed
        self.labels, self.calls, self.replaced = labels, calls, replaced
        self.live, self.top = live, top

    def new(self) -> Iterator[tuple[str, str, Place, Entry]]:
        """Of those that have come and are still there: primitive, category, place, entry."""
        for entry in self.replaced:
            entry.nbytes = 0  # as `Entries.hand_on` does: its going does not count
        for event in self._came:
            if event is not None:
                change, category, place, entry = event
                yield change.stays[0][1], category, place, entry


class Rise:
    """The same of events of which nobody has to know who has come and gone: it takes half the time of :class:`Sums`.

    ``event``: the one in which ``top`` is reached (None: it is before them all).
    """

    __slots__ = ("changes", "event", "live", "top")

    def __init__(self, events: list[Any], live: int) -> None:
        self.event: Any = None
        self.changes: list[Change] = []
        changes, top = self.changes, live
        handed: set[int] = set()
        for event in events:
            kind = type(event)
            if kind is tuple:
                change = event[0]
                changes.append(change)
                high = live + change.top
                if high > top:
                    top, self.event = high, event
                live += change.net
            elif kind is Entry:
                if not handed or id(event) not in handed:
                    try:
                        live -= event.nbytes
                    except AttributeError:  # an interrupt came while it was made
                        continue
            elif kind is Handed:
                handed.add(id(event.old))
        self.live, self.top = live, top


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

    def present(self, labels: list[list[Any]]) -> list[list[Any]]:
        """Those of ``labels`` whose entry is here."""
        known = self._entries
        return [label for label in labels if id(label[0]) in known]

    def of(self, buffer: Buffer) -> Entry | None:
        """The entry of a buffer."""
        return self._entries.get(id(getattr(buffer, "entry", None)))

    def add(self, entry: Entry, primitive: str, category: str, place: Place, epoch: int) -> None:
        """Its bytes are there."""
        entry.primitive = primitive
        entry.category = category
        entry.place = place
        entry.epoch = epoch
        entry.number = entry.came = -1
        self._entries[id(entry)] = entry
        if self.totals:
            self._add(entry, entry.nbytes)

    def hand_on(self, entry: Entry, to: Entry) -> None:
        """The bytes of one entry are those of another from now on."""
        if self._entries.pop(id(entry), None) is not None:
            _copy(entry, to)
            to.came = entry.number = -1
            self._entries[id(to)] = to
        entry.nbytes = 0

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
            entry.nbytes, entry.number = 0, -1
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
