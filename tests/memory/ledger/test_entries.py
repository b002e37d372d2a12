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
from tapegrad.memory.ledger.entries import RANK, Entries, Entry, Handed, Rise, Sums, Wanted
from tapegrad.memory.ledger.figures import CATEGORIES, new_of_run, of_bytes


class Thing:
    """What an entry refers to."""


def follow(entries: Entries, events: list[Any]) -> None:
    """As the ledger follows a batch."""
    sums = Sums(events, entries.live_bytes)
    entries.live_bytes = sums.live
    for handed in sums.handed:
        entries.hand_on(handed.old, handed.new)
    for gone in sums.left:
        entries.remove(gone)
    for primitive, category, place, new in sums.new():
        entries.add(new, primitive, category, place, 0)
    for label in entries.present(sums.labels):
        entries.relabel(*label)


class Told:
    """An array comes, and a pair; a buffer takes the array's bytes over.  Then some go, in this order."""

    ORDER = ("second of the pair", "buffer", "array")

    def __init__(self, gone: int) -> None:
        self.events: list[Any] = []
        self.things: dict[str, Thing] = {}
        self.entries: list[Entry] = []
        array = self.entry("array", 512)
        self.events.append((of_bytes(512, "exp"), "temporary", "(here)", array))
        run = Run((Evaluated("sin", 600, 0), Evaluated("cos", 8, 0)), (0, 1))
        pair = self.entry("first of the pair", 1024), self.entry("second of the pair", 512)
        self.events.append((new_of_run(run), "temporary", "(here)", *pair))
        self.events.append([pair[0], "activation"])
        own = self.entry("buffer", 512)
        self.events.append(Handed(array, own))
        self.events.append([own, "gradient"])
        for name in self.ORDER[:gone]:
            del self.things[name]
        assert len(self.events) == 5 + gone

    def entry(self, name: str, nbytes: int) -> Entry:
        self.things[name] = Thing()
        found = Entry(self.things[name], self.events.append)
        found.nbytes = nbytes
        self.entries.append(found)
        return found


@pytest.mark.parametrize("cuts", [(i, k) for k in range(9) for i in range(k + 1)])
@pytest.mark.parametrize("gone", range(4))
def test_a_batch_may_be_divided_anywhere(gone: int, cuts: tuple[int, int]) -> None:
    told = Told(gone)
    events = told.events[:]
    entries = Entries()
    entries.sum_up(True)
    Sums(events)  # looked at as a whole, to find the peak, and then in parts
    for begin, end in pairwise((0, *cuts, len(events))):
        rise = Rise(events[begin:end], entries.live_bytes)
        sums = Sums(events[begin:end], entries.live_bytes)
        assert (rise.top, rise.live, rise.changes) == (sums.top, sums.live, sums.changes)
        assert Rise(events[begin:end], entries.live_bytes).live == sums.live, "also when they have been looked at"
        follow(entries, events[begin:end])
    by = {"activation": 1024, "temporary": 512, "gradient": 512}
    for category in ("temporary", "gradient")[:gone]:
        del by[category]
    assert entries.by("category") == by and entries.live_bytes == sum(by.values()) == sum(e.nbytes for e in entries)
    assert entries.by("primitive") == {
        name: n for name, n in (("sin", 1024), ("exp", by.get("gradient")), ("cos", by.get("temporary"))) if n
    }


def test_the_top_is_found_where_it_is_reached() -> None:
    told = Told(3)
    events = told.events[:]
    sums = Sums(events, 100)
    assert sums.top == 100 + 512 + 1536 and sums.live == 100 + 1024
    rise = Rise(events, 100)
    assert rise.event is events[1] and (rise.top, rise.live) == (sums.top, sums.live)
    assert Rise(events[2:], 4096).event is None
    come, goes = (of_bytes(512, "exp"), "user", "(here)", Entry(told, print)), told.entries[0]
    goes.nbytes = 512
    assert Rise([come, goes, (*come,), goes], 0).event is come, "of those that are as high the first"
    assert len(sums.changes) == 2 and not sums.left and not sums.handed


def test_an_entry_without_its_event_does_not_count() -> None:
    """An interrupt came while it was made."""
    thing, events = Thing(), []
    entry = Entry(thing, events.append)
    entry.nbytes = 512
    del thing
    sums = Sums(events, 1024)
    assert events == [entry] and sums.live == 1024 and not sums.left and not list(sums.new())


def test_who_is_told_from_now_on_is_told_of_all_that_are_left() -> None:
    """Of what has gone already its event tells."""
    things, before, told = [Thing(), Thing(), Thing()], list[Entry](), list[Entry]()
    tell = told.append
    entries = Entries()
    made = [Entry(thing, tell if i == 1 else before.append) for i, thing in enumerate(things)]
    for entry in made:
        entry.nbytes = 512
        entries.add(entry, "exp", "user", "(here)", 0)
    del things[2]
    assert [*map(id, before)] == [id(made[2])]
    entries.tell(tell)
    assert len(entries) == 3 and [entry in entries for entry in made] == [False, True, True]
    (moved,) = [entry for entry in entries if id(entry) not in map(id, made)]
    assert moved() is things[0] and moved.nbytes == 512 and made[0].nbytes == 0
    things.clear()
    assert {*map(id, told)} == {id(moved), id(made[1])} and len(told) == 2


def test_what_is_alive_is_counted_anew() -> None:
    """An exception came while sums were changed: of what has gone nothing is left in them."""
    things, events, entries = [Thing() for _ in range(3)], list[Any](), Entries()
    made = [Entry(thing, events.append) for thing in things]
    for entry, nbytes in zip(made, (512, 1024, 4096), strict=True):
        entry.nbytes = nbytes
        entries.add(entry, "exp", "user", "(here)", 0)
    entries.sum_up(True)
    del things[1]
    entries.live_bytes = 7
    entries.recount()
    assert [entry in entries for entry in made] == [True, False, True] and made[1].nbytes == 0
    assert entries.live_bytes == 4608 and +entries.totals["category"] == {"user": 4608} == entries.by("category")


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
    made = [Entry(b, events.append) for b in buffers]
    for number, entry in enumerate(made):
        entry.nbytes = 512 << number
        entries.add(entry, "exp", "user", "(here)", 0)
        entry.number = number
    entries.live_bytes = 512 * 7
    entries.sum_up(True)
    assert entries.forget(buffers[1].node.index) == buffers[1:]
    assert [(e in entries, e.nbytes, e.number) for e in made] == [(True, 512, 0), (False, 0, -1), (False, 0, -1)]
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
