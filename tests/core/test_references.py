"""References: what else refers to a thing."""

from __future__ import annotations

import sys
import threading

from tapegrad.core.references import elsewhere, together


class Thing:
    pass


def test_what_only_the_collection_names_has_no_other_references():
    assert elsewhere([Thing(), Thing()]) == [0, 0]
    assert elsewhere((Thing(),)) == [0]
    assert elsewhere({1: Thing(), 2: Thing()}.values()) == [0, 0]
    assert together([Thing(), Thing()]) == together((Thing(),)) == together({1: Thing()}.values()) == 0
    assert elsewhere(()) == [] and together(()) == 0


def test_every_other_reference_counts_once():
    things = [Thing(), Thing(), Thing()]
    held = [things[1], (things[2],), {0: things[2]}]
    assert elsewhere(things) == [0, 1, 2] and together(things) == 3
    local = things[0]
    assert elsewhere(things) == [1, 1, 2] and together(things) == 4
    del local, held
    assert elsewhere(things) == [0, 0, 0] and together(things) == 0


def test_the_count_does_not_depend_on_who_asks_or_looks_on():
    """By way of C functions, in other threads, under a tracer and a profiler: the same."""
    answers = []
    threads = [threading.Thread(target=lambda: answers.append((elsewhere([Thing()]), together([Thing()]))))]
    for t in threads:
        t.start()
        t.join()
    before = sys.gettrace(), sys.getprofile()
    try:
        sys.settrace(lambda *_: None)
        sys.setprofile(lambda *_: None)
        answers.append((elsewhere([Thing()]), together([Thing()])))
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert [*map(elsewhere, [[Thing()]]), *map(together, [[Thing()]])] == [[0], 0]
    assert answers == [([0], 0)] * 2
