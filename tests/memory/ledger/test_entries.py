"""Sums of events: the same in one batch as in several, wherever it is divided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.core.run import Evaluated, Run
from tapegrad.device import CPU
from tapegrad.memory.ledger import entries as entries_module
from tapegrad.memory.ledger.entries import (
    NEW,
    RANK,
    Call,
    Entries,
    Entry,
    Handed,
    Label,
    Peak,
    Several,
    Sums,
    Wanted,
    not_added,
)
from tapegrad.memory.ledger.figures import CATEGORIES, new_of_run, of_bytes


class Thing:
    """What an entry refers to."""


def follow(entries: Entries, events: list[Any]) -> Sums:
    """As the ledger follows a batch."""
    sums = Sums(events, entries.live_bytes)
    follow_sums(entries, sums)
    return sums


def follow_sums(entries: Entries, sums: Sums) -> None:
    entries.live_bytes = sums.live
    for handed in sums.handed:
        entries.hand_on(handed.old, handed.new)
    for gone in sums.left:
        entries.remove(gone)
    for new in sums.new():
        entries.add(new, 0)
    for label in entries.present(sums.labels):
        if RANK[label.category] > RANK[label.entry.category]:
            label.before = label.entry.category
            entries.relabel(label.entry, label.category)


def known(entry: Entry, nbytes: int = 512, name: str = "exp") -> Entry:
    """``entry`` with what it tells of its coming."""
    entry.change, entry.came_as, entry.place = of_bytes(nbytes, name), "temporary", "(here)"
    entry.state = NEW
    return entry


def come(thing: object, events: list[Any], nbytes: int = 512, name: str = "exp", told: bool = True) -> Entry:
    """The entry of what comes, which tells of it (``told``) and of its going."""
    entry = known(Entry(thing, events.append), nbytes, name)
    if told:
        events.append(entry)
    return entry


class Told:
    """An array comes, and a pair; a buffer takes the array's bytes over.  Then some go, in this order."""

    ORDER = ("second of the pair", "buffer", "array")

    def __init__(self, gone: int) -> None:
        self.events: list[Any] = []
        names = "array", "first of the pair", "second of the pair", "buffer"
        self.things = {name: Thing() for name in names}
        array = come(self.things["array"], self.events)
        run = Run((Evaluated("sin", 600, 0), Evaluated("cos", 8, 0)), (0, 1))
        first = come(self.things["first of the pair"], self.events, 1024, "sin", told=False)
        pair = first, come(self.things["second of the pair"], self.events, 512, "cos", told=False)
        self.events.append(Several(new_of_run(run), [*pair]))
        self.events.append(Label(first, "activation"))
        self.events.append(Label(first, "communication"))  # tells no more
        own = Entry(self.things["buffer"], self.events.append)
        own.change, own.came_as, own.place = array.change, array.came_as, array.place
        self.events.append(Handed(array, own))
        self.events.append(Label(own, "gradient"))
        for name in self.ORDER[:gone]:
            del self.things[name]
        assert len(self.events) == 6 + gone

    @staticmethod
    def by(*gone: str) -> dict[str, int]:
        """Bytes by category at the end."""
        by = {"activation": 1024, "temporary": 512, "gradient": 512}
        return {category: n for category, n in by.items() if category not in gone}


@pytest.mark.parametrize("cuts", [(i, k) for k in range(10) for i in range(k + 1)])
@pytest.mark.parametrize("gone", range(4))
def test_a_batch_may_be_divided_anywhere(gone: int, cuts: tuple[int, int]) -> None:
    told = Told(gone)
    events = told.events[:]
    entries = Entries()
    entries.sum_up(True)
    for begin, end in pairwise((0, *cuts, len(events))):
        batch = events[begin:end]
        tried = Sums(batch, entries.live_bytes)
        not_added(batch)  # an interrupt ended the first try
        sums = Sums(batch, entries.live_bytes)
        assert (sums.top, sums.live, sums.peak, [*sums.changes()]) == (
            tried.top, tried.live, tried.peak, [*tried.changes()],
        )  # fmt: skip
        not_added(batch)
        follow(entries, batch)
    by = Told.by(*("temporary", "gradient")[:gone])
    assert entries.by("category") == by and entries.live_bytes == sum(by.values()) == sum(e.nbytes for e in entries)
    assert entries.by("primitive") == {
        name: n for name, n in (("sin", 1024), ("exp", by.get("gradient")), ("cos", by.get("temporary"))) if n
    }


@pytest.mark.parametrize("cut", range(7))
@pytest.mark.parametrize("more", [4096, 1536, 0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("gone", range(4))
def test_what_is_there_at_the_peak_is_told_by_part(gone: int, late: bool, more: int, cut: int) -> None:
    """As if all before it had been followed alone, wherever the batch begins; what is gone by then is not in it.

    What goes after the peak (``late``) has the category that it had then.
    """
    told, last = Told(gone), Thing()
    entry = come(last, told.events, more, "tan") if more else None
    del last
    if late:
        del told.things["first of the pair"]
    events = told.events[:]
    entries, alone = Entries(), Entries()
    entries.sum_up(True)
    alone.sum_up(True)
    follow(entries, events[:cut])
    start, batch = entries.live_bytes, events[cut:]
    sums = Sums(batch, start)
    if sums.peak is None:
        assert sums.top == start
        return
    peak = Peak(entries.totals, sums, batch)
    follow_sums(entries, sums)
    parts = peak.parts()
    assert parts == peak.parts()
    at = [*map(id, events)].index(id(sums.peak))
    for event in events:  # all anew
        for e in event.entries if type(event) is Several else [event]:
            if type(e) is Entry:
                e.state = NEW
    follow(alone, events[: at + 1])
    assert sums.top == alone.live_bytes and (entry is None or sums.peak is entry or more < 4096)
    assert {what: {key: n for key, n in part.items() if n} for what, part in parts.items()} == {
        what: {key: n for key, n in total.items() if n} for what, total in alone.totals.items()
    }


def test_the_top_is_found_where_it_is_reached() -> None:
    told = Told(3)
    events = told.events[:]
    sums = Sums(events, 100)
    assert sums.top == 100 + 512 + 1536 and sums.live == 100 + 1024 and sums.peak is events[1]
    assert Sums(events[2:], 4096).peak is None


def test_a_peak_is_at_the_end_while_its_last_bytes_are_there() -> None:
    events, things = list[Any](), {"array": Thing(), "buffer": Thing()}
    array, buffer = come(things["array"], events), Entry(things["buffer"], events.append)
    assert Sums(events).at_end(events)
    not_added(events)
    buffer.change, buffer.came_as, buffer.place = array.change, array.came_as, array.place
    events.append(Handed(array, buffer))
    del things["buffer"]
    del things["array"]
    sums = Sums(events)
    assert events[-1] is sums.peak is array and not sums.at_end(events), "it has handed its bytes on, and they are gone"


def test_what_an_interrupt_left_of_bytes_that_were_handed_on_counts_once() -> None:
    events, things, entries = list[Any](), {"array": Thing(), "buffer": Thing()}, Entries()
    array, buffer = come(things["array"], events), Entry(things["buffer"], events.append)
    follow(entries, events)
    events.clear()
    buffer.change, buffer.came_as, buffer.place = array.change, array.came_as, array.place
    events.append(Handed(array, buffer))
    del things["buffer"]
    del things["array"]
    Sums(events, 512)
    not_added(events)
    entries.recount()  # the array is gone
    assert entries.live_bytes == Sums(events, entries.live_bytes).live == 0


def test_of_peaks_that_are_as_high_the_first_counts() -> None:
    events: list[Any] = []
    for _ in range(2):
        thing = Thing()
        come(thing, events)
        del thing
    assert len(events) == 4 and Sums(events).peak is events[0]


@pytest.mark.parametrize("stays", [(1,), (1, 2)])
def test_what_happens_inside_the_event_of_the_peak_is_in_its_parts(stays: tuple[int, ...]) -> None:
    """A run takes more than what stays of it."""
    nodes = Evaluated("sin", 1024, 0), Evaluated("cos", 512, 0, (0,)), Evaluated("tan", 512, 0)
    change = new_of_run(Run(nodes[: stays[-1] + 1], stays))
    events, things, entries = list[Any](), [Thing() for _ in range(3)], Entries()
    entries.sum_up(True)
    come(things[0], events)
    entry = come(things[1], events, name="cos", told=False)
    if stays == (1,):
        entry.change = change
        events.append(entry)
    else:
        events.append(Several(change, [entry, come(things[2], events, name="tan", told=False)]))
    sums = Sums(events)
    assert (sums.top, sums.live) == (512 + 1536, 512 + 512 * len(stays)) and sums.peak is events[1]
    parts = Peak(entries.totals, sums, events).parts()
    assert parts["primitive"] == {"exp": 512, "sin": 1024, "cos": 512} and parts["category"] == {"temporary": 2048}


def test_calls_come_in_their_turn() -> None:
    told: list[object] = []
    sums = Sums([Call(told.append, 1), Call(told.append, 2)])
    for call in sums.calls:
        call.f(call.what)
    assert told == [1, 2] and (sums.live, sums.top) == (0, 0)


def test_an_entry_without_its_event_does_not_count() -> None:
    """An interrupt came while it was made."""
    thing, events = Thing(), list[Any]()
    entry = Entry(thing, events.append)
    del thing
    sums = Sums(events, 1024)
    assert events == [entry] and sums.live == 1024 and not sums.left and not sums.new()


def test_who_is_told_from_now_on_is_told_of_all_that_are_left() -> None:
    """Of what has gone already its event tells."""
    things, before, told = [Thing(), Thing(), Thing()], list[Entry](), list[Entry]()
    tell = told.append
    entries = Entries()
    made = [known(Entry(thing, tell if i == 1 else before.append)) for i, thing in enumerate(things)]
    for entry in made:
        entries.add(entry, 0)
    del things[2]
    assert [*map(id, before)] == [id(made[2])]
    entries.tell(tell)
    assert len(entries) == 3 and [entry in entries for entry in made] == [False, True, True]
    (moved,) = [entry for entry in entries if id(entry) not in map(id, made)]
    assert moved() is things[0] and moved.nbytes == 512 and moved.counts and not made[0].counts
    things.clear()
    assert {*map(id, told)} == {id(moved), id(made[1])} and len(told) == 2


def test_what_is_alive_is_counted_anew() -> None:
    """An exception came while sums were changed: of what has gone nothing is left in them."""
    things, events, entries = [Thing() for _ in range(3)], list[Any](), Entries()
    made = [come(thing, events, nbytes, told=False) for thing, nbytes in zip(things, (512, 1024, 4096), strict=True)]
    for entry in made:
        entries.add(entry, 0)
    entries.sum_up(True)
    del things[1]
    entries.live_bytes = 7
    entries.recount()
    assert [entry in entries for entry in made] == [True, False, True] and not made[1].counts
    assert entries.live_bytes == 4608 and +entries.totals["category"] == {"temporary": 4608} == entries.by("category")


def test_a_category_gives_way_to_those_that_tell_more_alone() -> None:
    levels = [
        "temporary user input",
        "communication activation",
        "rematerialized",
        "gradient",
        "optimizer",
        "parameter",
    ]
    level = {category: number for number, names in enumerate(levels) for category in names.split()}
    assert level.keys() == RANK.keys() == set(CATEGORIES)
    assert all((RANK[a] < RANK[b]) == (level[a] < level[b]) for a in level for b in level)


def test_what_late_nodes_have_made_is_forgotten() -> None:
    tg.zeros(1)  # the engine is there
    events, entries = list[Any](), Entries()
    buffers = [Buffer(np.zeros(4), leaf(shaped((4,), np.dtype("float64"), CPU))) for _ in range(3)]
    made = [come(b, events, 512 << number, told=False) for number, b in enumerate(buffers)]
    for number, entry in enumerate(made):
        entries.add(entry, 0)
        entry.number = number
    entries.live_bytes = 512 * 7
    entries.sum_up(True)
    assert entries.forget(buffers[1].node.index) == buffers[1:]
    assert [(e in entries, e.counts, e.number) for e in made] == [
        (True, True, 0),
        (False, False, -1),
        (False, False, -1),
    ]
    assert entries.live_bytes == 512 and +entries.totals["place"] == {"(here)": 512}


def test_pending_buffers_that_are_gone_are_forgotten_when_their_number_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries_module, "_FIRST_PRUNING", 4)
    tg.zeros(1)  # the engine is there
    make = lambda: Buffer(None, leaf(shaped((4,), np.dtype("float32"), CPU)))
    wanted, alive, sizes = Wanted(), [make() for _ in range(3)], list[int]()
    assert all(map(wanted.add, alive)) and not wanted.add(alive[1])
    for _ in range(7):  # each goes at once, but is there while it is added
        assert wanted.add(make())
        sizes.append(len(wanted.found))
    assert sizes == [4, 5, 6, 7, 4, 5, 6]
    assert [wanted.take(b) for b in (alive[0], alive[0], make())] == [True, False, False]
    del alive[2]
    for _ in range(7):
        assert wanted.add(make())
        sizes.append(len(wanted.found))
    assert sizes[7:] == [6, 7, 2, 3, 2, 3, 2]
    wanted.clear()
    assert not wanted.take(alive[1])
