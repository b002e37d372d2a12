"""Which value is dropped first: numbers that are kept up to date, against the same made anew from all there is."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapegrad.memory.budget import eviction
from tapegrad.memory.budget.eviction import Candidates
from tapegrad.memory.budget.recipes import Storage


class Model:
    """Storages in a random graph, some of which are dropped, with what the paper's formula says of each."""

    def __init__(self, seed: int, count: int = 60) -> None:
        self.rng = np.random.default_rng(seed)
        self.candidates = Candidates()
        self.storages: list[Any] = []
        self.graph: Any = SimpleNamespace(recipes=dict[int, Any]())
        for i in range(count):
            recipe = SimpleNamespace(node=SimpleNamespace(index=i), storage=Storage())
            recipe.storage.cost = float(self.rng.integers(1, 50))
            for j in {int(j) for j in self.rng.integers(max(0, i - 6), i, 2)} if i else ():
                recipe.storage.near.append(j)
                self.storages[j].storage.near.append(i)
            self.storages.append(recipe)
            self.graph.recipes[i] = recipe
        self.sizes = [int(n) for n in self.rng.integers(1, 9, count) * 512]
        self.dropped: set[int] = set()
        for i in range(count):
            self.add(i)

    def add(self, i: int) -> None:
        self.candidates.add(self.storages[i], self.graph, self.sizes[i])

    def change(self) -> None:
        """Something is dropped or made again."""
        i = int(self.rng.integers(len(self.storages)))
        if i in self.dropped:
            self.dropped.discard(i)
            self.candidates.returned(self.storages[i], self.graph)
            self.add(i)
        else:
            self.dropped.add(i)
            self.candidates.evicted(self.storages[i], self.graph)

    def neighbourhood(self, i: int) -> float:
        """What all dropped storages cost that hang together with ``i``, or would, were it dropped."""
        seen, stack = {i}, [i]
        while stack:
            for j in self.storages[stack.pop()].storage.near:
                if j in self.dropped and j not in seen:
                    seen.add(j)
                    stack.append(j)
        return sum(self.storages[j].storage.cost for j in seen)

    def scores(self, here: int) -> dict[int, float]:
        """Of the candidates."""
        return {
            i: self.neighbourhood(i) / (self.sizes[i] * sqrt(max(here - i, 1)))
            for i in range(len(self.storages))
            if i not in self.dropped
        }

    def best(self, here: int) -> int | None:
        found = self.candidates.best(here)
        return None if found is None else found[0].node.index


def steps(seed: int, count: int = 150) -> Iterator[Model]:
    model = Model(seed)
    for _ in range(count):
        model.change()
        yield model


@pytest.mark.parametrize("seed", range(4))
def test_the_one_with_the_least_score_goes_first(seed: int) -> None:
    for model in steps(seed):
        here = int(model.rng.integers(80))
        scores = model.scores(here)
        found = model.best(here)
        assert len(model.candidates) == len(scores)
        assert found is not None and scores[found] == pytest.approx(min(scores.values()), rel=1e-12)


def test_sets_too_large_to_be_divided_keep_the_cost_of_those_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's h_DTR-eq: what is made again takes its own cost out, and the set stays one."""
    monkeypatch.setattr(eviction, "_MOST_DIVIDED", 3)
    model = Model(0, 0)
    for i in range(7):  # a chain
        recipe = SimpleNamespace(node=SimpleNamespace(index=i), storage=Storage())
        recipe.storage.cost = 10.0**i
        recipe.storage.near = [j for j in (i - 1, i + 1) if 0 <= j < 7]
        model.storages.append(recipe)
        model.graph.recipes[i] = recipe
        model.sizes.append(512)
        model.add(i)
    for i in range(1, 6):
        model.candidates.evicted(model.storages[i], model.graph)
    column = model.candidates._numerators

    def numerator(i: int) -> float:
        return float(column[model.storages[i].storage.row])

    assert (numerator(0), numerator(6)) == (111111, 1111110)
    model.candidates.returned(model.storages[3], model.graph)
    model.add(3)
    assert (numerator(0), numerator(6), numerator(3)) == (110111, 1110110, 111110)
    model.candidates.returned(model.storages[2], model.graph)  # three are left: divided
    model.add(2)
    assert (numerator(0), numerator(2), numerator(3), numerator(6)) == (11, 110, 111000, 1110000)


def test_what_is_held_or_about_to_be_read_is_not_offered() -> None:
    model = Model(5)
    first = model.best(100)
    assert first is not None and model.candidates.pass_over(model.storages[first])
    second = model.best(100)
    assert second not in (None, first)
    model.candidates.refresh(model.storages[first], model.graph)
    assert model.best(100) == first
    model.candidates.spare([model.storages[first], model.storages[first]])
    model.candidates.refresh(model.storages[first], model.graph)
    assert model.best(100) == second
    model.candidates.unspare(model.storages[first], model.graph)  # one of two replays is over
    assert model.best(100) == second
    model.candidates.unspare(model.storages[first], model.graph)
    assert model.best(100) == first
    model.candidates.spare(model.storages)
    assert model.best(100) is None and model.candidates.offer_spared() and model.best(100) == first
    assert not model.candidates.offer_spared()


def test_what_is_no_candidate_is_passed_over_in_vain() -> None:
    model = Model(6, 3)
    model.candidates.remove(model.storages[1])
    assert not model.candidates.pass_over(model.storages[1]) and len(model.candidates) == 2
    model.candidates.remove(model.storages[1])
    assert len(model.candidates) == 2
    model.candidates.clear()
    assert len(model.candidates) == 0 and model.best(10) is None
    assert all(recipe.storage.row == -1 for recipe in model.storages)
    assert (Storage().row, Storage().spared) == (-1, 0)
    model.add(1)
    assert model.best(10) == 1


def test_every_row_can_be_passed_over_and_offered_again() -> None:
    model = Model(9, 5)
    for recipe in model.storages:
        assert model.candidates.pass_over(recipe)
    assert model.best(10) is None
    for recipe in model.storages:
        model.candidates.refresh(recipe, model.graph)
    assert model.best(10) is not None


def test_what_tapes_have_stopped_wanting_is_nobodys_neighbour() -> None:
    model = Model(10, 4)
    chain = [recipe.storage for recipe in model.storages]
    for i, storage in enumerate(chain):
        storage.cost, storage.near = 10.0**i, [j for j in (i - 1, i + 1) if 0 <= j < 4]
    model.candidates.evicted(model.storages[1], model.graph)
    model.candidates.remove(model.storages[0])
    del model.graph.recipes[0]
    model.candidates.evicted(model.storages[2], model.graph)
    assert model.candidates._numerators[chain[3].row] == 1110
    nothing: Any = SimpleNamespace(storage=None)  # a recipe whose value no tape wants
    model.candidates.remove(nothing)
    model.candidates.spare([nothing])
    model.candidates.unspare(nothing, model.graph)


def test_what_is_offloaded_costs_its_way_whatever_is_dropped_beside_it() -> None:
    model = Model(7, 2)
    model.storages[0].storage.near, model.storages[1].storage.near = [1], [0]
    model.storages[0].storage.transfer = 3.0
    model.candidates.refresh(model.storages[0], model.graph)
    model.candidates.evicted(model.storages[1], model.graph)
    assert model.candidates._numerators[model.storages[0].storage.row] == 3.0
    assert sorted(model.candidates._numerators)[1] == inf


def test_there_is_room_for_any_number() -> None:
    model = Model(8, 3 * eviction._FIRST + 1)
    assert len(model.candidates) == 3 * eviction._FIRST + 1
    scores = model.scores(0)
    found = model.best(0)
    assert found is not None and scores[found] == min(scores.values())


def test_budgets_one_after_another_take_the_same_rows_and_no_more_memory() -> None:
    """Between equal scores the first row decides: it is not to depend on earlier budgets."""
    model = Model(0)
    for i in range(len(model.storages)):
        model.candidates.remove(model.storages[i])
    places, sizes = [], []
    for _ in range(3):
        model.candidates.begin()
        for i in (5, 3, 8):
            model.add(i)
        places.append([model.storages[i].storage.row for i in (5, 3, 8)])
        sizes.append(model.candidates._sizes.size)
        for i in (3, 5, 8):
            model.candidates.remove(model.storages[i])
    assert places == [[0, 1, 2]] * 3 and sizes == [256] * 3
