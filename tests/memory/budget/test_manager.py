"""The limits that are in force, and in which order what tapes want is looked at where room is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, X, live, wanting
from checks import c64

import tapegrad as tg
from tapegrad.core import account
from tapegrad.device.pool import POOL
from tapegrad.errors import BudgetError
from tapegrad.memory import policies
from tapegrad.memory.budget import manager as manager_module
from tapegrad.memory.budget.budget import MANAGER, watched, yielding
from tapegrad.memory.budget.storages import Storages
from tapegrad.memory.ledger.figures import Measure
from tapegrad.memory.ledger.journal import Journal
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.offload.offload import Offloads
from tapegrad.memory.policies import RECOMPUTE


def test_the_pools_of_devices_hold_no_more_than_the_limit_in_force() -> None:
    base = live()
    with tg.memory_budget("1MiB"):
        assert POOL.limit == 1 << 20
        with tg.memory_budget("2MiB"), tg.memory_budget(1 << 19):
            assert POOL.limit == 1 << 19
            with MANAGER.apart():
                assert POOL.limit is None
            assert POOL.limit == 1 << 19
        assert POOL.limit == 1 << 20
        with tg.memory.policy(policies.save_everything):
            assert POOL.limit == 1 << 20
    assert POOL.limit is None
    room = yielding(UNIT)
    with room:
        assert POOL.limit == MANAGER.limit == base + UNIT
        made = c64(np.ones((3, SIDE, SIDE)))
        assert POOL.limit == MANAGER.limit == base + 3 * UNIT
        room.has_read(UNIT)
        assert POOL.limit == MANAGER.limit == base + 2 * UNIT
        del made
    assert POOL.limit is None


def test_who_watches_is_told_in_a_block_apart_too_but_no_policy_is_in_force_there(x: tg.Tensor) -> None:
    told: list[str] = []
    with watched(lambda node, inputs: told.append(node.prim.name)):
        with MANAGER.apart():
            tg.softmax(x)
        assert told == ["softmax"]
        tg.sin(x)
    tg.cos(x)
    assert told == ["softmax", "sin"]
    with tg.memory.policy(policies.save_everything):
        assert account.current is MANAGER
        with MANAGER.apart():
            assert account.current is LEDGER
        assert account.current is MANAGER


def test_exactly_what_is_needed_is_enough_where_all_room_is_asked_for(
    x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where copies to another memory may keep some."""
    monkeypatch.setattr(manager_module, "keeps_memory", lambda: True)
    with tg.memory_budget(live() + UNIT) as m:
        tg.softmax(x)
        c64(X)
        with pytest.raises(BudgetError):
            c64(np.ones(SIDE * SIDE + 1))
        assert m.peak_bytes == MANAGER.limit


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("count", [2, 31, 32, 40])
def test_what_was_in_somebodys_hands_is_looked_at_again_before_room_is_refused(
    count: int, held: bool, x: tg.Tensor
) -> None:
    """The earliest values come first; where many were passed over, the next round leaves them out at first."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        hs = [tg.softmax(x) for _ in range(count)]
        tapes = [wanting(h) for h in hs]
        tapes += [wanting(tg.softmax(x)) for _ in range(2)]
        for k in range(2):
            assert MANAGER.relieve(UNIT) and m.evictions == k + 1 and len(MANAGER._passed) == count
        if not held:
            hs.clear()
        assert MANAGER.relieve(UNIT) == (not held) and m.evictions == 3 - held and not MANAGER._passed
        assert len({tape() for tape in tapes}) == 1 and m.restored == m.evictions


def test_a_budget_begins_with_nothing_passed_over(x: tg.Tensor) -> None:
    """What another program has held would change the order in which this one's values are looked at."""
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        held = [tg.softmax(x) for _ in range(40)]
        tapes = [wanting(h) for h in [*held, tg.softmax(x)]]
        assert MANAGER.relieve(UNIT) and len(MANAGER._passed) == len(held)
    assert len({tape() for tape in tapes}) == 1
    with tg.memory_budget("1GiB"):
        assert not MANAGER._passed


@pytest.mark.parametrize("count", [31, 32])
def test_what_was_passed_over_is_looked_at_in_every_round_or_if_it_is_much_in_every_32nd(
    count: int, x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, drop = [0], Storages.drop

    def counted(*args: Any) -> bool:
        looks[-1] += 1
        return drop(*args)

    monkeypatch.setattr(Storages, "drop", counted)
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        hs = [tg.softmax(x) for _ in range(count)]
        tapes = [wanting(h) for h in (*hs, *(tg.softmax(x) for _ in range(34)))]
        for _ in range(34):
            assert MANAGER.relieve(UNIT)
            looks.append(0)
        assert m.evictions == 34 and len(tapes) == count + 34
    often = count < 32
    assert looks == [count + 1 if often or k in (1, 32) else 1 for k in range(1, 35)] + [0]


def test_when_all_room_is_asked_for(x: tg.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what a policy offloads has to be seen, copies may keep some, or somebody makes room; not for each value."""
    with tg.memory_budget("1MiB", policy=policies.save_everything):
        assert LEDGER._limit == 1 << 20
        with watched(lambda node, inputs: None):
            assert LEDGER._limit == 1 << 20
    with watched(lambda node, inputs: None):
        assert LEDGER._limit == inf
    with tg.memory.policy(policies.save_everything):
        assert LEDGER._limit == -inf
    assert LEDGER._limit == inf
    monkeypatch.setattr(manager_module, "keeps_memory", lambda: True)
    with tg.memory_budget("1MiB"):
        assert LEDGER._limit == -inf
    assert LEDGER._limit == inf


def test_who_makes_room_is_alone_until_it_has_ended_however_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, bool]] = []

    def state() -> None:
        found.append((LEDGER._limit, MANAGER._asked))

    def make_room(manager: Any, nbytes: int, names: Any) -> None:
        state()

    def take() -> None:
        MANAGER.leave(object())  # as another budget that ends meanwhile
        state()
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(type(MANAGER), "_decide", fail)
            MANAGER.leave(object())
        state()
        raise KeyError

    def fail(*_: Any) -> None:
        raise KeyError

    with tg.memory_budget("1MiB"):
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(type(MANAGER), "_make_room", make_room)
            MANAGER._with_room(0, (), take)
        assert found == [(-inf, True)] * 3
        state()
        MANAGER._asked = True
        LEDGER.limit(-inf)
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(type(MANAGER), "_decide", fail)
            MANAGER.leave(object())  # an interrupt, say
        state()
        assert found[3:] == [(1 << 20, False)] * 2


def test_what_is_made_again_owns_its_recipe_until_the_recording_ends(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"):
        with tg.GradientTape(watch_accessed_variables=False):
            h = tg.softmax(x)
            tape, index = wanting(h), h._buffer.node.index
            del h
            MANAGER.release([index], (), RECOMPUTE)
            tape()
            recipe = MANAGER._present().recipes[index]
            assert recipe.value().recipe is recipe
        assert recipe.value().recipe is None
        del recipe


def test_nothing_of_a_block_apart_is_a_candidate_after_it(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tape = wanting(h)
        state = dict(MANAGER.__dict__)
        with MANAGER.apart(), tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
            inner = tg.softmax(x)
            inner_tape = wanting(inner)
            recipe = MANAGER._present().recipes[inner._buffer.node.index]
            assert not MANAGER.relieve(UNIT) and recipe.storage.row >= 0
        assert recipe.storage.row < 0 and inner_tape is not None
        assert all(MANAGER.__dict__[name] is value for name, value in state.items())
        del recipe, inner, inner_tape, h, state
        assert MANAGER.relieve(UNIT) and m.evictions == 1 and tape() > 0.0


@pytest.mark.parametrize("recording", [False, True])
def test_what_is_told_of_a_value_that_cannot_be_made_again_changes_nothing(recording: bool, x: tg.Tensor) -> None:
    told: list[Callable[[Any], object]] = [
        MANAGER.replaced, MANAGER.accompanied, lambda b: MANAGER.named(b, "h"), lambda b: MANAGER.filled(b, ()),
        lambda b: MANAGER.renamed(tg.reshape(x, (-1,))._buffer, b),
        lambda b: MANAGER.release([b.node.index], (), RECOMPUTE),
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(tg.memory_budget("1GiB"))
        if recording:
            stack.enter_context(tg.GradientTape(watch_accessed_variables=False))
        for tell in told:
            tell(x._buffer)
            graph = MANAGER._present()
            assert (graph is not None) == recording and (graph is None or not len(graph.recipes))
            del graph


def test_a_device_is_relieved_by_what_copies_have_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reclaim(nbytes: int) -> int:
        asked.append(nbytes)
        return len(asked) - 1

    monkeypatch.setattr(manager_module, "reclaim", reclaim)
    with tg.memory_budget("1GiB"):
        assert [MANAGER.relieve(n) for n in (UNIT, 1, 0)] == [False, True, True] and asked == [UNIT, 1, 0]


@pytest.mark.parametrize("journal", [False, True])
def test_a_measurement_or_a_profile_within_a_budget_tells_what_tapes_keep(journal: bool, x: tg.Tensor) -> None:
    def kept() -> int:
        measure = Measure(detailed=not journal)
        LEDGER.open(measure)
        try:
            LEDGER.write(Journal("none") if journal else None)
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = tg.sum(tg.softmax(tg.softmax(x)))
            found = LEDGER.by("category")["activation"]
            assert tape.gradient(y, x) is not None
        finally:
            LEDGER.close(measure)
        return found

    wanted = kept()
    with tg.memory_budget("1GiB"):
        assert kept() == wanted == 2 * UNIT


def test_in_a_forked_child_budgets_of_other_threads_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever was making room there is not, nor does anything come back that was on its way."""
    entered, over, forgotten = threading.Event(), threading.Event(), list[bool]()
    monkeypatch.setattr(Offloads, "in_child", lambda offloads: forgotten.append(offloads is MANAGER._storages.offloads))

    def other() -> None:
        with tg.memory_budget("1MiB"):
            entered.set()
            over.wait(20)

    thread = threading.Thread(target=other)
    with tg.memory_budget("2MiB"):
        thread.start()
        assert entered.wait(20) and MANAGER.limit == LEDGER._limit == 1 << 20
        MANAGER._asked = True
        LEDGER.limit(-inf)
        MANAGER.in_child()
        assert MANAGER.limit == LEDGER._limit == 2 << 20 and forgotten == [True] and not MANAGER._asked
        over.set()
        thread.join(20)
        assert MANAGER.limit == LEDGER._limit == 2 << 20
