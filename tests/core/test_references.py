"""References: what else refers to a thing."""

from __future__ import annotations

import sys
import threading

from tapegrad.core.references import ASKED, count, elsewhere


class Thing:
    pass


def test_what_only_the_collection_names_has_no_other_references():
    assert elsewhere([Thing(), Thing()]) == [0, 0]
    assert elsewhere((Thing(),)) == [0]
    assert elsewhere({1: Thing(), 2: Thing()}.values()) == [0, 0]
    assert elsewhere(()) == []


def test_every_other_reference_counts_once():
    things = [Thing(), Thing(), Thing()]
    held = [things[1], (things[2],), {0: things[2]}]
    assert elsewhere(things) == [0, 1, 2]
    local = things[0]
    assert elsewhere(things) == [1, 1, 2]
    del local, held
    assert elsewhere(things) == [0, 0, 0]


def test_an_attribute_and_an_item_count_once_and_others_besides():
    holder, items, position = Thing(), (Thing(), Thing()), 1
    holder.thing = Thing()
    found = [count(holder.thing) - ASKED, count(items[position]) - ASKED]
    also = holder.thing
    found.append(count(holder.thing) - ASKED)
    del also
    found.append(count(holder.thing) - ASKED)
    assert found == [1, 1, 2, 1]


def test_the_count_does_not_depend_on_who_asks_or_looks_on():
    """By way of C functions, in other threads, under a tracer and a profiler: the same."""
    answers = []
    holder = Thing()
    holder.thing = Thing()
    threads = [threading.Thread(target=lambda: answers.append((elsewhere([Thing()]), count(holder.thing) - ASKED)))]
    for t in threads:
        t.start()
        t.join()
    before = sys.gettrace(), sys.getprofile()
    try:
        sys.settrace(lambda *_: None)
        sys.setprofile(lambda *_: None)
        answers.append((elsewhere([Thing()]), count(holder.thing) - ASKED))
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert list(map(elsewhere, [[Thing()]])) == [[0]]
    assert answers == [([0], 1)] * 2
