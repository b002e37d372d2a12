"""Recipes: whose they are, what is kept in their place, and what they say of who holds a value."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from budget_cases import UNIT, X, wanting
from checks import c64

import tapegrad as tg
from tapegrad.errors import RecomputeError
from tapegrad.memory.budget import recipes as recipes_module
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.budget.recipes import Index, Recipe, bytes_held_for, releasable


def test_values_that_have_gone_are_not_noted_for_long_and_others_own_no_recipe_after_the_recording(
    x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other value goes; the list of values is gone through when it has doubled since."""
    monkeypatch.setattr(recipes_module, "_FIRST_PRUNING", 4)
    held, noted, numbers = [], [], []
    with tg.memory_budget("1GiB"):
        with tg.GradientTape(watch_accessed_variables=False):
            for step in range(12):
                h = tg.softmax(x)
                if step % 2:
                    held.append(h)
                del h
                graph = MANAGER._present()
                noted.append(len(graph._live))
                numbers.append(len(graph.recipes.refs))
                if step == 0:
                    graph.recipes._clear_at = 3
                del graph
            owned = [b.recipe.node.index for b in (h._buffer for h in held)]
        assert all(h._buffer.recipe is None for h in held) and owned == [h._buffer.node.index for h in held]
    assert noted == [1, 2, 3, 2, 3, 3, 4, 5, 5, 6, 7, 8] and numbers == [1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("filled", [False, True])
def test_a_value_of_an_earlier_recording_is_kept_in_place_of_its_history_once_it_is_there(
    filled: bool, x: tg.Tensor, lazy: None
) -> None:
    with tg.memory_budget("1GiB"):
        data = c64(X)
        with tg.GradientTape(watch_accessed_variables=False):
            h = tg.tanh(tg.softmax(data))
            first = wanting(h)
        del data
        if filled:
            h.numpy()
        with tg.memory_budget("1GiB"):
            assert len(MANAGER._storages.candidates) == 1
        recipe = MANAGER._present().recipes[h._buffer.node.index]
        later = wanting(h)
        assert (recipe.pinned is not None) == filled
        if filled:
            assert not MANAGER.relieve(UNIT) and len(MANAGER._storages.candidates) == 0
        assert first() == later() == float(tg.sum(tg.tanh(tg.softmax(c64(X)))))
        del recipe


@pytest.mark.parametrize("again", [False, True])
def test_shared_memory_is_that_of_its_first_reading(again: bool) -> None:
    array = X.copy()
    x = tg.asarray(array, copy=False)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        first = wanting(h)
        array[0] += 1.0
        if again:
            tg.softmax(x)
        del h
        assert MANAGER.relieve(UNIT)
        with pytest.raises(RecomputeError):
            first()


def test_another_recordings_rule_may_still_ask_for_a_value(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        graph, node = MANAGER._present(), h._buffer.node
        assert graph.held(node, False), "the user may"
        tapes = [wanting(h)]
        assert graph.held(node, True) and graph.held(node, False)
        tapes.append(wanting(h))
        del h
        for _ in range(2):
            assert graph.held(node, True) and graph.held(node, False)
            MANAGER.relieve(UNIT)  # and of a value that was dropped, too
        tapes.pop()
        for _ in range(2):
            assert not graph.held(node, True) and graph.held(node, False)
            tapes[0]()  # it is made again
        assert graph.held(x._buffer.node, True) is None
        del graph


def test_numbers_of_recipes_that_are_gone_are_dropped_where_a_recording_ends(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"):
        with tg.GradientTape(watch_accessed_variables=False):
            lasting = [wanting(tg.softmax(x))]
        recipes = MANAGER._present().recipes
        recipes._clear_at = 8
        with tg.GradientTape(watch_accessed_variables=False):
            for _ in range(8):
                tg.softmax(x)
            assert len(recipes.refs) > 8
        assert len(recipes.refs) == len(recipes) == len(lasting)
        del recipes


def test_a_tape_goes_on_in_a_block_apart_in_which_a_budget_begins(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB"), tg.GradientTape() as tape:
        tape.watch(x)
        h = tg.softmax(x)
        with MANAGER.apart():
            assert MANAGER.limit == inf
            with tg.memory_budget("1MiB"):
                assert MANAGER.limit == 1 << 20
                y = tg.sum(tg.softmax(h))
        assert MANAGER.limit == 1 << 30 and tape.gradient(y, x) is not None


def test_what_reads_a_value_in_a_block_apart_does_not_take_its_recipe_away(x: tg.Tensor) -> None:
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        total = float(tg.sum(h))
        with MANAGER.apart(), tg.memory_budget("1GiB"):
            assert wanting(h)() == total
        first = wanting(h)
        del h
        assert MANAGER.relieve(UNIT) and m.evictions == 1 and first() == total


HISTORIES: dict[str, tuple[Callable[[Any], Any], bool, int]] = {
    "held": (lambda d: d, True, 0),
    "let go": (lambda d: d, False, 1),
    "read twice": (lambda d: tg.softmax(d) * d, False, 1),
    "read by two": (lambda d: tg.sin(tg.softmax(d)) * tg.cos(tg.softmax(d)), False, 1),
    "a diamond": (lambda d: (lambda a: tg.sin(a) * tg.cos(a))(tg.softmax(d)), False, 1),
    "a diamond of what is held": (lambda d: (lambda a: tg.sin(a) * tg.cos(a))(tg.softmax(d)), True, 0),
    "two": (lambda d: tg.softmax(d) @ c64(X + 1.0), False, 2),
    "one of two": (lambda d: tg.softmax(d) @ c64(X + 1.0), True, 1),
}


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(("history", "held", "count"), HISTORIES.values(), ids=HISTORIES)
def test_bytes_of_data_that_are_there_only_so_that_a_value_can_be_made_again(
    history: Callable[[Any], Any], held: bool, count: int, wanted: bool
) -> None:
    """None is where a tape wants a value that is made from the data: that has to be made again, too."""
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        data = c64(X)
        user = data if held else None
        below = tg.softmax(history(data))
        del data
        tape = wanting(below) if wanted else None
        with tg.memory_budget("1GiB"):  # what tapes keep is looked at
            h = tg.softmax(below)
        del below
        recipe = MANAGER._present().recipes[h._buffer.node.index]
        assert bytes_held_for(recipe) == (0 if wanted else count * UNIT)
        del recipe
        assert (user is None) != held and (tape is None) != wanted


@pytest.mark.parametrize(("most", "found"), [(4, 0), (5, UNIT)])
def test_data_is_looked_for_some_steps_back(most: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes_module, "_MOST_WALKED", most)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = c64(X)
        for _ in range(5):
            h = tg.softmax(h)
        assert bytes_held_for(MANAGER._present().recipes[h._buffer.node.index]) == found


@pytest.mark.parametrize("pending", [False, True])
def test_bytes_that_others_own_are_not_there_for_a_value_alone(pending: bool, lazy: None) -> None:
    """Those of a view, and of what has none yet."""
    x = c64(X)
    with tg.memory_budget("1GiB"):
        d = tg.exp(x) if pending else tg.reshape(x, (-1,))
        assert d._buffer.keeps and (d._buffer.array is None) == pending
        with tg.GradientTape(watch_accessed_variables=False):
            h = tg.sin(d) if pending else tg.softmax(d)
            h.numpy()
            assert (d._buffer.array is None) == pending
            del d
            assert bytes_held_for(MANAGER._present().recipes[h._buffer.node.index]) == 0


def test_numbers_of_those_that_are_gone_are_dropped_where_the_rest_may_have_doubled() -> None:
    for kept, clear_at in ((3000, 6002), (100, 4096)):
        index, made = Index(), [Recipe.__new__(Recipe) for _ in range(4096)]
        for number, recipe in enumerate(made):
            index[number] = recipe
        del made[kept:], recipe
        index.clear_gone()
        assert len(index.refs) == 4096 and len(index) == kept
        index[4096] = made[0]
        index.clear_gone()
        assert list(index.refs) == [*range(kept), 4096] and index._clear_at == clear_at


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("held", [None, 0, 3, 6])
def test_a_value_goes_with_all_that_is_made_from_it_and_waits(turned: bool, held: int | None) -> None:
    """Unless somebody holds one of them; of these, however they lie in memory, each is made from the one before."""
    buffers = [SimpleNamespace(node=None, keeps=()) for _ in range(8)]
    if turned:
        buffers.reverse()
    for number, b in enumerate(buffers):
        b.node, b.keeps = SimpleNamespace(index=number + 5), tuple(buffers[number - 1 : number])
    target: Any = SimpleNamespace(node=buffers[0].node)
    other = SimpleNamespace(node=SimpleNamespace(index=7), keeps=())
    kept: list[Any] = [SimpleNamespace(buffer=b) for b in (buffers[6], other, None)]
    user = None if held is None else buffers[held]
    del buffers, b, other
    found = releasable(target, kept)
    assert found == (kept[:1] if user is None else None)
    assert releasable(target, kept[1:2]) == [] and releasable(target, kept[2:]) is None
