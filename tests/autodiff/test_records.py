"""Records: who else may ask for what an operation made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapegrad.autodiff.records import Applied, Called, reachable
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node, leaf
from tapegrad.core.rule import OUT, Plan
from tapegrad.device import CPU

AVAL = shaped((2,), np.dtype("float32"), CPU)


def applied(inputs: tuple[Node, ...] = (), slots: tuple[int, ...] = (), residuals: Any = ()) -> Applied:
    record = Applied()
    record.node, record.inputs, record.plan, record.residuals = leaf(AVAL), inputs, Plan(slots, (), ()), residuals
    return record


def keeping(*before: Buffer) -> Applied:
    """A record whose rule reads the result, after other values."""
    record = applied(slots=(*range(len(before)), OUT))
    record.residuals = (*before, Buffer(None, record.node))
    return record


def test_a_value_is_held_by_whoever_names_its_node() -> None:
    record = applied()
    assert not record.held() and not record.keeps_result
    other = applied(inputs=(record.node,))
    assert record.held()
    del other
    assert not record.held()
    pending = Buffer(None, record.node)
    assert record.held()
    del pending
    assert not record.held()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_value_that_its_own_record_keeps_is_held_by_whoever_names_its_buffer_or_its_node(before: int) -> None:
    others = [Buffer(None, leaf(AVAL)) for _ in range(before)]
    record = keeping(*others)
    assert record.keeps_result and not record.held()
    assert isinstance(record.residuals, tuple)
    handle = record.residuals[-1]
    assert record.held()
    del handle
    assert not record.held()
    node = record.node
    assert record.held()
    del node
    assert not record.held()


def test_within_a_budget_a_record_cannot_tell_of_what_it_keeps() -> None:
    there = (Buffer(None, leaf(AVAL)),)
    dropped: Any = SimpleNamespace(there=lambda: there, restored=lambda: there)
    assert applied(slots=(OUT,), residuals=dropped).held()
    record = applied(slots=(0,), residuals=dropped)
    assert not record.held() and record.there() is there
    assert applied(slots=(0,), residuals=there).there() is there


def test_of_a_call_each_value_counts_unless_it_is_known_of() -> None:
    call: Any = None
    record = Called(call, (None,), (leaf(AVAL), leaf(AVAL)))
    assert not record.keeps_result and not record.held() and not record.held([None, None])
    second = record.results[1]
    assert record.held() and record.held([None, None]) and record.held([False, None])
    assert not record.held([None, False]), "a recipe names the node, and says that nobody asks"
    del second
    assert not record.held()


def test_what_is_followed_leads_to_what_is_reachable() -> None:
    call: Any = None
    x, y, far = leaf(AVAL), leaf(AVAL), leaf(AVAL)
    first = applied(inputs=(x, y))
    called = Called(call, (None, first.node), (leaf(AVAL), leaf(AVAL)))
    aside = applied(inputs=(far,))
    last = applied(inputs=(called.results[1], far))
    assert first.followed == (x, y) and called.followed == (first.node,)
    assert first.results == (first.node,)
    records = [first, called, aside, last]
    made = {n.index for record in (first, called, last) for n in record.results}
    assert reachable(records, [y.index]) == {y.index, *made}
    assert reachable(records, [far.index]) == {far.index, aside.node.index, last.node.index}
    assert reachable(records, []) == set()
