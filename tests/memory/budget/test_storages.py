"""What tapes keep: which values can be dropped, whoever has wanted them before, and what is kept in their place."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, X, wanting
from checks import c64

import tapegrad as tg
from tapegrad.errors import BudgetError
from tapegrad.memory.budget import replay as replay_module
from tapegrad.memory.budget import storages as storages_module
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.budget.recipes import Kept, Residuals
from tapegrad.memory.ledger.costs import cost_of, transfer_of
from tapegrad.memory.policies import OFFLOAD, RECOMPUTE, SAVE


def look() -> None:
    """See what tapes keep, as where room is needed."""
    with tg.memory_budget("1GiB"):
        MANAGER._storages.register_new()


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_value_that_a_later_tape_wants_is_dropped_like_any(looked: bool, lasts: bool, x: tg.Tensor) -> None:
    """Whether the first one has gone or lives on, and whether what it keeps had been looked at."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        wanted = float(tg.sum(h))
        first = wanting(h)
        if looked:
            look()
        if not lasts:
            first = None
        second = wanting(h)
        before = m.live_bytes
        assert not MANAGER.relieve(UNIT) and m.live_bytes == before, "somebody has it in hand"
        del h
        assert MANAGER.relieve(UNIT) and (m.live_bytes, m.evictions) == (before - UNIT, 1)
        assert second() == wanted and m.restored == 1
        assert first is None or first() == wanted


def test_what_a_tape_of_an_earlier_recording_has_made_is_dropped_for_a_later_one(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = tg.softmax(x)
            y = tg.sum(h * h)
        wanted = float(tg.sum(h))
        later = wanting(h)
        del h
        assert MANAGER.relieve(UNIT) and m.evictions == 1
        assert later() == wanted and m.restored == 1 and tape.gradient(y, x) is not None


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("most", [1, 3])
def test_what_tapes_come_to_want_is_looked_at_before_it_is_much(
    most: int, anew: bool, x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages_module, "_MOST_NEW", most)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tapes, waiting = [wanting(h)], []
        look()
        for _ in range(4):
            if anew:
                tapes.clear()
            tapes.append(wanting(h if anew else tg.softmax(x)))
            waiting.append(len(MANAGER._storages._new))
        assert waiting == [k % most for k in range(1, 5)] and tapes[-1]() == float(tg.sum(h))


def test_what_was_dropped_while_somebody_took_it_in_hand_is_kept_as_it_is(x: tg.Tensor) -> None:
    """Another thread may do so just when its bytes are let go of."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        first = wanting(h)
        kept = MANAGER._present().recipes[h._buffer.node.index].keeping()
        kept.buffer = None
        second = wanting(h)
        assert kept.buffer is h._buffer and first() == second() == float(tg.sum(h)) and m.restored == 0


def test_data_of_one_byte_goes_in_place_of_a_value_of_none() -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        data = tg.asarray(np.ones(1, "uint8"))
        h, weak = tg.softmax(tg.astype(data[:0], tg.float64)), weakref.ref(data._buffer)
        tape = wanting(h)
        del data, h
        MANAGER.relieve(1)
        assert weak() is None and m.evictions == 0 and tape() == 0.0


def test_what_two_threads_come_to_keep_at_once_is_kept_once(x: tg.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has been faster."""
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        others = list[Kept]()

        def beside(kind: Any) -> Any:
            others.append(Kept(recipe_of(h), MANAGER._present(), h._buffer))
            recipe_of(h).kept = weakref.ref(others[-1])
            return Kept.__new__(kind)

        monkeypatch.setattr(storages_module, "_new", beside)
        assert MANAGER.keep((h._buffer,)) is others[0] is recipe_of(h).keeping() and len(others) == 1
        others.clear()


@pytest.mark.parametrize(("columns", "evictions"), [(SIDE - 1, 1), (SIDE, 0), (2 * SIDE, 0)])
def test_data_that_takes_as_much_as_what_is_made_from_it_goes_in_its_place(columns: int, evictions: int) -> None:
    """Nobody has the data in hand: it is there only so that the product can be made again."""
    weights = c64(np.ones((columns, SIDE)))
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        data = c64(np.ones((SIDE, columns)))
        gone, h = UNIT if evictions else data.nbytes, data @ weights
        del data
        tape, before = wanting(h), m.live_bytes
        del h
        assert MANAGER._drop_one() and m.live_bytes == before - gone
        assert len(MANAGER._storages.candidates) == 0
        assert tape() == columns * UNIT / 8 and (m.evictions, m.restored) == (evictions, evictions)


def test_what_is_wanted_anew_before_anybody_has_seen_that_it_was_not_is_forgotten_in_the_end(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tapes = [wanting(h)]
        look()

        def again() -> None:
            tapes.clear()
            tapes.append(wanting(h))

        MANAGER._storages.guard.run(again)  # that nobody wants it waits until this has ended
        assert len(MANAGER._storages.candidates) == 1
        tapes.clear()
        assert len(MANAGER._storages.candidates) == 0


def test_nobody_looks_after_what_no_tape_keeps(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        graph = MANAGER._present()
        recipe = graph.recipes[h._buffer.node.index]
        MANAGER._storages._watch(graph, recipe)
        assert recipe.kept is None
        del graph, recipe


def recipe_of(h: Any) -> Any:
    return MANAGER._present().recipes[h._buffer.node.index]


def cost(h: Any) -> float:
    return cost_of(h._buffer.node, [i.node.aval for i in recipe_of(h).inputs])


def test_a_storage_costs_what_lies_between_it_and_those_next_to_it(x: tg.Tensor) -> None:
    """Each once, whoever reads it."""
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        b = tg.softmax(a)
        c = b @ tg.softmax(b)
        d = c @ a
        below = float(cost(b) + cost(tg.softmax(b)))
        tapes = [wanting(h) for h in (a, c, d)]
        look()
        found = {k: recipe_of(h).storage for k, h in zip("acd", (a, c, d), strict=True)}
        index = {k: h._buffer.node.index for k, h in zip("acd", (a, c, d), strict=True)}
        assert {k: sorted(s.near) for k, s in found.items()} == {
            k: sorted(index[i] for i in near) for k, near in {"a": "cd", "c": "ad", "d": "ac"}.items()
        }
        assert (found["a"].cost, found["c"].cost, found["d"].cost) == (cost(a), cost(c) + below, cost(d))
        assert recipe_of(b).storage is None and len(tapes) == 3


@pytest.mark.parametrize(("most", "near"), [(3, 0), (4, 1)])
def test_those_next_to_a_storage_are_looked_for_some_steps_back(
    most: int, near: int, x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages_module, "_MOST_WALKED", most)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        first, h = wanting(a), a
        for _ in range(4):
            h = tg.softmax(h)
        last = wanting(h)
        look()
        assert len(recipe_of(h).storage.near) == near and first is not last


def test_two_views_go_with_the_bytes_that_they_share_however_often_they_are_looked_at(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        views = [tg.reshape(h, (-1,)), tg.reshape(h, (2, -1))]
        total, tapes = float(tg.sum(h)), [wanting(v) for v in (*views, h)]
        for _ in range(3):
            look()
        assert [recipe_of(v).roots for v in (*views, h)] == [(h._buffer.node.index,)] * 2 + [()]
        assert [recipe_of(v).storage for v in views] == [None, None]
        before = m.live_bytes
        assert len(MANAGER._storages.candidates) == 1
        del h, views
        assert MANAGER.relieve(UNIT) and (m.live_bytes, m.evictions) == (before - UNIT, 1)
        np.testing.assert_allclose([tape() for tape in tapes], total, rtol=1e-14)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_replay_reads_is_spared_though_a_tape_has_come_to_want_it_just_before(
    fails: bool, x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer, where the replay fails, too."""
    spared, made = [], replay_module._made

    def noted(recipe: Any, inputs: Any) -> Any:
        spared.append(recipe.inputs[0].storage.spared)
        if fails and len(spared) == 1:
            raise KeyError
        return made(recipe, inputs)

    monkeypatch.setattr(replay_module, "_made", noted)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        b = tg.softmax(a)
        first, index, source = wanting(b), b._buffer.node.index, recipe_of(a)
        del b
        MANAGER.release([index], (), RECOMPUTE)
        second = wanting(a)
        del a
        assert source.storage is None
        if fails:
            with pytest.raises(KeyError):
                first()
            assert source.storage.spared == 0
            spared.clear()
            monkeypatch.setattr(replay_module, "_made", made)
            first()
            spared.append(1)
        assert first() == pytest.approx(SIDE) and spared == [1] and source.storage.spared == 0 and second is not None
        del source


# Released -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [RECOMPUTE, OFFLOAD])
def test_what_is_released_goes_at_once_and_what_it_was_made_from_stays_until_it_is_back(
    answer: Any, x: tg.Tensor
) -> None:
    """What has moved to another memory needs no sources."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        b = tg.softmax(a)
        c = tg.softmax(b)
        tapes, source = [wanting(b), wanting(c)], wanting(a)
        kept = [recipe_of(h).keeping() for h in (a, b, c)]
        indices = [h._buffer.node.index for h in (b, c)]
        sources, before = MANAGER.keep((a._buffer,)), m.live_bytes
        assert sources is kept[0]
        weak = weakref.ref(a._buffer)
        del a, b
        MANAGER.release([1 << 40, *indices], (sources, Residuals((sources, x._buffer))), answer)
        away = answer is OFFLOAD
        assert m.live_bytes == before - UNIT, "c is in somebody's hands"
        assert (m.offloads, m.evictions) == (away, 0), "nothing was dropped for want of room"
        assert [k.buffer is None for k in kept] == [False, True, False]
        assert [k.sources for k in kept] == [(), () if away else (kept[0], kept[0]), ()]
        assert (kept[1].recipe.slot is not None) == away and len(MANAGER._storages.candidates) == 2
        del source, sources
        kept[0] = None
        assert (weak() is None) == away
        assert [t() for t in tapes] == [pytest.approx(SIDE)] * 2 and (m.restored, m.fetches) == (1 - away, away)
        assert kept[1].buffer is not None and kept[1].sources == ()
        storage = kept[1].recipe.storage
        assert storage.transfer == (transfer_of(UNIT, True) if away else None)
        del kept, storage, c


def test_nothing_waits_in_another_memory_for_a_tape_that_has_gone(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tape, index = wanting(h), h._buffer.node.index
        del h
        MANAGER.release([index], (), OFFLOAD)
        assert MANAGER._storages.offloads.any
        assert tape() == pytest.approx(SIDE) and not MANAGER._storages.offloads.any, "it has come back"
        assert MANAGER.relieve(UNIT) and MANAGER._storages.offloads.any
        tape = None
        assert not MANAGER._storages.offloads.any


def test_what_has_no_room_to_come_back_is_named(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tape, index = wanting(h), h._buffer.node.index
        del h
        MANAGER.release([index], (), OFFLOAD)
        with (
            tg.memory_budget(m.live_bytes + UNIT - 512),
            pytest.raises(BudgetError, match=f"bringing back softmax needs {UNIT}"),
        ):
            tape()
        assert tape() == pytest.approx(SIDE)


def test_what_has_come_back_goes_again_once_the_walk_is_past_it(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tape, recipe = wanting(h), recipe_of(h)
        index = recipe.node.index
        del h
        MANAGER.release([index], (), OFFLOAD)
        for here, there in ((index + 1, True), (index, True), (index - 1, False)):
            assert tape() == pytest.approx(SIDE)
            MANAGER._storages.offload(here)
            assert (recipe.value() is not None) == there
        assert m.offloads == 1, "the tier has kept its bytes"
        del recipe


@pytest.mark.parametrize("moving", [False, True])
def test_what_would_come_back_otherwise_is_not_moved_but_made_again(moving: bool, x: tg.Tensor) -> None:
    """It lies by columns.  Under a limit it is offered once more, at the price of making it."""
    with tg.memory_budget("1GiB", policy=lambda value: OFFLOAD) as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.tanh(x.mT)
        tape, recipe, graph = wanting(h), recipe_of(h), MANAGER._present()
        storage, candidates = recipe.storage, MANAGER._storages.candidates
        assert not h._buffer.array.flags.c_contiguous
        assert candidates._numerators[storage.row] == storage.transfer == transfer_of(UNIT, False)
        del h
        assert not MANAGER._storages.drop(recipe, graph, moving)
        assert candidates._numerators[storage.row] == storage.cost and storage.transfer is None
        assert candidates.pass_over(recipe) == moving
        candidates.refresh(recipe, graph)
        assert candidates.pass_over(recipe) and not MANAGER._storages._ready
        assert MANAGER._storages.drop(recipe, graph, moving) and recipe.value() is None and m.offloads == 0
        assert tape() == pytest.approx(float(tg.sum(tg.tanh(x))))
        del recipe, graph, storage


def test_what_is_released_stays_where_the_policy_saves_it(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB", policy=lambda value: SAVE), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        tape, index, weak = wanting(h), h._buffer.node.index, weakref.ref(h._buffer)
        del h
        MANAGER.release([index], (), RECOMPUTE)
        assert weak() is not None and tape() == pytest.approx(SIDE)


# Pending values -----------------------------------------------------------------------------------------------------


def test_what_pends_is_made_again_from_the_rest_which_stays(x: tg.Tensor, lazy: None) -> None:
    data = c64(X + 1.0)
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        a, b = tg.softmax(x), tg.softmax(x * 2.0)
        h = a * 2.0 + b * data
        tape, index = wanting(h), a._buffer.node.index
        kept = recipe_of(h).keeping()
        total = float(tg.sum(a * 2.0 + b * data))
        assert h._buffer.array is None
        there = weakref.ref(b._buffer)
        del a, b, h
        MANAGER.release([index], (), RECOMPUTE)
        assert kept.buffer is None and [k.recipe.value() for k in kept.sources] == [there()] != [None]
        assert tape() == pytest.approx(total) and m.restored == 4 and kept.sources == ()
        del kept


def test_what_has_got_bytes_of_its_own_stays_where_what_it_was_made_from_is_released(x: tg.Tensor, lazy: None) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        h = a * 2.0
        tapes = [wanting(h), wanting(a)]
        look()
        kept, source = recipe_of(h).keeping(), recipe_of(a)
        assert h._buffer.array is None and source.storage.holders == {source.node.index, kept.recipe.node.index}
        h.numpy()
        other = tg.softmax(x * 3.0)
        tapes.append(wanting(other))
        del a
        MANAGER.release([source.node.index], (recipe_of(other).keeping(),), RECOMPUTE)
        assert source.value() is None and source.keeping().sources == (recipe_of(other).keeping(),)
        assert kept.buffer is h._buffer and kept.sources == () and len(tapes) == 3
        del kept, source


@pytest.mark.parametrize("wanted", [False, True])
def test_bytes_that_a_pending_value_has_got_are_held_by_what_is_to_be_made_from_it(
    wanted: bool, x: tg.Tensor, lazy: None
) -> None:
    """Whether a tape wants that value, too."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        a = tg.softmax(x)
        b = a * 2.0
        c = tg.exp(b)
        tapes = [wanting(c), wanting(b)][: 1 + wanted]
        look()
        indices = [h._buffer.node.index for h in (b, c)]
        assert recipe_of(a).storage.holders == set(indices[1 - wanted :])
        b.numpy()
        assert recipe_of(b).storage.holders == set(indices[1 - wanted :]) and c._buffer.array is None
        del a, b, c
        before = m.live_bytes
        assert MANAGER.relieve(UNIT) and (m.live_bytes, m.evictions) == (before - UNIT, 1)
        assert tapes[0]() == pytest.approx(float(tg.sum(tg.exp(tg.softmax(x) * 2.0))))
