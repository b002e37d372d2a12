"""Entries: what the ledger knows of each buffer that owns bytes; events, and what they add up to; what tapes want."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.memory.ledger.figures import Change, Parts
from tapegrad.memory.ledger.frames import Place, by_line

RANK = {"temporary": 0, "user": 0, "input": 0, "communication": 1, "activation": 1, "rematerialized": 2,
        "gradient": 3, "optimizer": 4, "parameter": 5}  # fmt: skip
"""Categories by how much they tell."""
_PARTS = ("category", "primitive", "place")
_change = attrgetter("change")


NEW, CAME, GONE, PASSED_ON, THERE, NO_MORE, LABEL, HANDED, SEVERAL, CALL = range(10)
"""What an event has in its ``state``.  Of an entry:

NEW: its bytes have come, which is not in the sums yet.
CAME: the events that are being added tell that they have come.
GONE, PASSED_ON: and that they have gone, or are another's now.
THERE: they are in the sums.
NO_MORE: its going does not count: its bytes are another's, or an interrupt came before they had come.

The others are those of the classes below.
"""


class Entry(weakref.ref[Any]):
    """What the ledger knows of one live buffer, which refers to it: a weak reference that tells when it goes.

    Of what a gradient walk makes of small values there are no buffers, but arrays, until somebody asks for one.  An
    entry is the event of its coming, too, so as to take little memory: most values of small operations go soon.
    """

    __slots__ = (
        "came_as",
        "category",
        "change",
        "epoch",
        "holder",
        "next",
        "number",
        "place",
        "read",
        "state",
        "wanted",
    )
    state: int
    """One of the above; it is set last."""
    came_as: str
    """Its category when it came; ``category``: now, as soon as it is in the sums."""
    category: str
    change: Change
    """How it came."""
    place: Place
    """Where it was made."""
    wanted: int
    """The last epoch in which it was told that a tape keeps it."""
    epoch: int
    """Of the ledger, when ``category`` was set; it, and what follows, is set when it is in the sums."""
    number: int
    """In the journal (-1: it is not there); what follows is set where one is written."""
    holder: str
    """What keeps it."""
    read: int
    """The last event of the forward pass that read it (-1: none)."""
    next: int
    """The first one of the backward pass after that."""

    @property
    def counts(self) -> bool:
        """Whether its going will count."""
        return getattr(self, "state", NO_MORE) != NO_MORE

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return self.change.net

    @property
    def primitive(self) -> str:
        """The name of the primitive that made it."""
        return self.change.stays[0][1]

    def buffer(self) -> Buffer | None:
        """The buffer; None also of an array without one."""
        thing = self()
        return thing if isinstance(thing, Buffer) else None


class Several:
    """Values of the ``entries`` come at once, and work was done."""

    __slots__ = ("change", "entries")
    state = SEVERAL

    def __init__(self, change: Change, entries: list[Entry]) -> None:
        self.change, self.entries = change, entries


class Handed:
    """The bytes of the entry ``old``, an array's, are those of ``new``, its buffer's, from now on."""

    __slots__ = ("new", "old")
    state = HANDED

    def __init__(self, old: Entry, new: Entry) -> None:
        self.old, self.new = old, new


class Label:
    """The bytes of ``entry`` serve as ``category`` from now on (``before``: what they were, once that is done).

    Often made without ``__init__``.
    """

    __slots__ = ("before", "category", "entry")
    state = LABEL
    before: str

    def __init__(self, entry: Entry, category: str) -> None:
        self.entry, self.category = entry, category


class Call:
    """To be called in its turn: ``f(what)``."""

    __slots__ = ("f", "what")
    state = CALL

    def __init__(self, f: Callable[[Any], None], what: object) -> None:
        self.f, self.what = f, what


class Sums:
    """What events say: ``live`` bytes, if so many are there before, and ``top``, the most at any time.

    ``peak``: the event in which that is reached (None: it is before them all); ``come``: the events that tell of a
    coming (``several``: some tell of several); ``left``: the entries of those that have gone, unless they had only
    come; ``handed``: the events that hand on what was in the sums; ``replaced``: those that hand on what has come;
    ``labels``: those that give a new category; ``calls``: what to call.
    """

    __slots__ = ("calls", "come", "handed", "labels", "left", "live", "peak", "replaced", "several", "top")

    def __init__(self, events: list[Any], live: int = 0) -> None:
        come: list[Entry | Several] = []
        left: list[Entry] = []
        labels: list[Label] = []
        handed: list[Handed] = []
        replaced: list[Handed] = []
        calls: list[Call] = []
        over: set[int] = set()  # ids of entries in the sums that have been handed on
        self.several = False
        top = live
        peak: Any = None
        for event in events:
            try:
                state = event.state
            except AttributeError:  # an interrupt came while it was made
                continue
            if state == NEW:
                event.state = CAME
                come.append(event)
                change = event.change
                high = live + change.top
                if high > top:
                    top, peak = high, event
                live += change.net
            elif state == CAME:
                event.state = GONE
                live -= event.change.net
            elif state == LABEL:
                labels.append(event)
            elif state == THERE:
                if id(event) not in over:
                    left.append(event)
                    live -= event.change.net
            elif state == SEVERAL:
                self.several = True
                come.append(event)
                for entry in event.entries:
                    entry.state = CAME
                high = live + event.change.top
                if high > top:
                    top, peak = high, event
                live += event.change.net
            elif state == HANDED:
                old, new = event.old, event.new
                if old.state == CAME:
                    new.state, old.state = CAME, PASSED_ON
                    replaced.append(event)
                elif old.state == THERE:
                    new.state = THERE
                    over.add(id(old))
                    handed.append(event)
            elif state == CALL:
                calls.append(event)
        self.come, self.left, self.handed, self.replaced = come, left, handed, replaced
        self.labels, self.calls = labels, calls
        self.live, self.top, self.peak = live, top, peak

    def changes(self) -> Iterator[Change]:
        """Of all who have come."""
        return map(_change, self.come)

    def new(self) -> list[Entry]:
        """Those that have come and are still there."""
        for handed in self.replaced:
            handed.old.state = NO_MORE
        new = [entry for entry in self.entries(self.come) if entry.state == CAME]
        return new + [handed.new for handed in self.replaced if handed.new.state == CAME]

    def at_end(self, events: list[Any]) -> bool:
        """Whether what is there after ``events``, from which these are, is what was there at the peak."""
        peak = self.peak
        return events[-1] is peak and peak.state in (CAME, SEVERAL) and peak.change.inside is None

    def entries(self, come: list[Entry | Several]) -> list[Entry]:
        """Those of some events of a coming."""
        entries: list[Any] = come
        if self.several:
            entries = [entry for event in come for entry in (event.entries if type(event) is Several else (event,))]
        return entries


def not_added(events: list[Any]) -> None:
    """An interrupt came while ``events`` were added: they are to be added once more."""
    for event in events:
        if type(event) is Handed and hasattr(event.new, "state"):
            del event.new.state  # it has one as soon as the event is added
    for event in events:
        for entry in event.entries if type(event) is Several else (event,):
            if type(entry) is Entry and getattr(entry, "state", NO_MORE) in (CAME, GONE, PASSED_ON):
                entry.state = NEW


class Peak:
    """What was there when the most was, while ``events`` happened, from which ``sums`` are; ``totals``: before them.

    Most peaks are soon followed by higher ones, and nobody asks: so it is worked out when somebody does.
    """

    def __init__(self, totals: dict[str, Counter[Any]], sums: Sums, events: list[Any]) -> None:
        self._totals = {what: Counter(total) for what, total in totals.items()}
        self._sums: Sums | None = sums
        self._events = events if not sums.calls else [event for event in events if type(event) is not Call]

    def parts(self) -> Parts:
        """Bytes by part; the lock is held."""
        if self._sums is not None:
            self._work_out(self._sums)
            self._sums, self._events = None, []
        return {what: dict(total) for what, total in self._totals.items()}

    def _work_out(self, sums: Sums) -> None:
        totals = {what: Counter(total) for what, total in self._totals.items()}

        def add(nbytes: int, *keys: object) -> None:
            for what, key in zip(_PARTS, keys):
                totals[what][key] += nbytes

        peak = sums.peak
        places = [*map(id, self._events)]
        late = {*places[places.index(id(peak)) + 1 :]}
        new = {id(handed.old): handed.new for handed in sums.replaced}
        known = {*map(id, sums.entries(sums.come)), *map(id, new.values())}
        gone = {id(entry) for entry in sums.left if id(entry) in late}
        labelled: dict[int, str] = {}
        for label in [label for label in sums.labels if id(label) not in late]:
            entry, number = label.entry, id(label.entry)
            if number in known:
                if RANK[label.category] > RANK[labelled.get(number, entry.came_as)]:
                    labelled[number] = label.category
            elif hasattr(label, "before"):
                add(-entry.nbytes, label.before)
                add(entry.nbytes, label.category)
            elif number in gone and RANK[label.category] > RANK[before := labelled.get(number, entry.category)]:
                add(-entry.nbytes, before)
                add(entry.nbytes, label.category)
                labelled[number] = label.category
        for entry in sums.left:
            if id(entry) not in late:
                add(-entry.nbytes, entry.category, entry.primitive, entry.place)
        place = [*map(id, sums.come)].index(id(peak)) + (peak.change.inside is None)
        come = [new.get(id(entry), entry) for entry in sums.entries(sums.come[:place])]
        come = [entry for entry in come if entry.state != GONE or id(entry) in late]
        alike = Counter([(e.change, labelled.get(id(e), e.came_as), e.place) for e in come])
        for (change, category, where), n in alike.items():
            add(n * change.net, category, change.stays[0][1], where)
        of = peak.entries[0] if type(peak) is Several else peak
        for nbytes, primitive in peak.change.inside or ():
            add(nbytes, of.came_as, primitive, of.place)
        self._totals = totals


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

    def present(self, labels: list[Label]) -> list[Label]:
        """Those of ``labels`` whose entry is here."""
        known = self._entries
        return [label for label in labels if id(label.entry) in known]

    def of(self, buffer: Buffer) -> Entry | None:
        """The entry of a buffer."""
        return self._entries.get(id(getattr(buffer, "entry", None)))

    def add(self, entry: Entry, epoch: int) -> None:
        """Its bytes are there."""
        entry.category, entry.epoch, entry.number = entry.came_as, epoch, -1
        self._entries[id(entry)] = entry
        entry.state = THERE
        if self.totals:
            self._add(entry, entry.nbytes)

    def hand_on(self, entry: Entry, to: Entry) -> None:
        """The bytes of one entry are those of another from now on."""
        old, new = id(entry), id(to)
        if old in self._entries:
            _copy(entry, to)
            to.state = THERE
            entry.number = -1
            self._entries[new] = to
            del self._entries[old]  # no call in between: an interrupt leaves one of the two
        entry.state = NO_MORE

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
            entry.state, entry.number = NO_MORE, -1
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
                entry.state = NO_MORE
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
