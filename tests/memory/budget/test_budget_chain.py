"""Chains of unit layers under budgets, against the optimum; and the parts of the rule that chooses what to drop."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from math import comb, log2
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT
from checks import c64

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF, NO_PARAMS, Node
from tapegrad.device import asdevice
from tapegrad.memory.budget.eviction import Candidates, Part
from tapegrad.memory.budget.manager import MANAGER
from tapegrad.memory.budget.recipes import Graph, Kept, Recipe, Storage, asked_of
from tapegrad.memory.budget.replay import replay


def optimum(length: int, slots: int) -> int:
    """Forward steps to reverse a chain with so many checkpoints (Griewank & Walther 2000, Algorithm 799, eq. 2)."""
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - comb(slots + repeats, slots + 1)


class Chain:
    """``count`` layers, each with a barrier that keeps its result for its rule."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.x = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))
        self.wanted = self.step().numpy()
        with tg.measure() as m:
            self.base = m.live_bytes

    def step(self) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(self.x)
            h = self.x
            for _ in range(self.count):
                h = tg.softmax(h)
            loss = tg.sum(h)
            del h
        return tape.gradient(loss, self.x)

    def within(self, units: int) -> tg.memory.Measure:
        """The figures of a step that has room for so many layers' values, and for some numbers."""
        with tg.memory_budget(limit := self.base + units * UNIT + 4 * 512) as b, tg.measure() as m:
            g = self.step()
        assert np.array_equal(g.numpy(), self.wanted) and b.peak_bytes <= limit
        return m


@pytest.mark.parametrize(
    ("count", "fraction", "most"),
    [
        (n, f, most)
        for n in (100, 256, 1024)
        for f, most in ((0.5, 1.05), (0.3, 1.05), (0.2, 1.05), (0.1, 1.3), (0, 1.5))
    ],
)
def test_forward_steps_are_near_the_optimum(count: int, fraction: float, most: float) -> None:
    units = int(fraction * count) or int(log2(count)) + 5
    m = Chain(count).within(units)
    best = optimum(count + 1, units - 2)
    assert m.nodes_run["softmax"] <= most * best, (m.nodes_run["softmax"], best)
    assert m.restored == m.evictions == m.nodes_run["softmax"] - count


def test_what_fits_is_not_dropped() -> None:
    m = Chain(40).within(43)
    assert (m.evictions, m.restored, m.nodes_run["softmax"]) == (0, 0, 40)


def test_an_infeasible_chain_says_what_would_do() -> None:
    chain = Chain(40)
    with pytest.raises(tg.errors.BudgetError) as caught, tg.memory_budget(chain.base + UNIT):
        chain.step()
    assert caught.value.needed_bytes > chain.base + UNIT
    with tg.memory_budget(chain.base + 6 * UNIT):
        assert np.array_equal(chain.step().numpy(), chain.wanted)


def test_long_chains_neither_recurse_nor_grow_quadratically() -> None:
    m = Chain(5_000).within(200)
    assert m.nodes_run["softmax"] <= 1.3 * optimum(5_001, 198)


# The rule of choice -----------------------------------------------------------------------------------------------


class Line:
    """Storages one after another, each made from the one before: their graph and the candidates."""

    def __init__(self, costs: Iterable[float]) -> None:
        self.candidates = Candidates()
        self.graph = Graph(lambda kept: {})
        self.recipes: list[Recipe] = []
        self.buffers = []
        aval = shaped((8,), np.dtype("float64"), asdevice("cpu"))
        for cost in costs:
            node = Node(LEAF, NO_PARAMS, aval)
            buffer = Buffer(np.zeros(8), node)
            recipe = Recipe(node, tuple(self.recipes[-1:]), buffer)
            storage = recipe.storage = Storage()
            storage.cost = cost
            if self.recipes:
                storage.near.append(self.recipes[-1].node.index)
                self.recipes[-1].storage.near.append(node.index)
            self.graph.recipes[node.index] = recipe
            self.recipes.append(recipe)
            self.buffers.append(buffer)
        for r in self.recipes:
            self.candidates.add(r, self.graph, 64)

    @property
    def here(self) -> int:
        return self.recipes[-1].node.index + 1

    def numerator(self, number: int) -> float:
        """What the candidates have noted for a storage that is there."""
        return float(self.candidates._numerators[self.recipes[number].storage.row])

    def searched(self, number: int) -> float:
        """Its cost, and the costs of all dropped storages that are joined to it, by search."""
        storage = self.recipes[number].storage
        found, stack = {}, [i for i in storage.near if self.graph.recipes[i].storage.part is not None]
        while stack:
            index = stack.pop()
            if index not in found:
                other = self.graph.recipes[index].storage
                found[index] = other.cost
                stack += [i for i in other.near if self.graph.recipes[i].storage.part is not None]
        return storage.cost + sum(found.values())

    def drop(self, number: int) -> None:
        self.candidates.evicted(self.recipes[number], self.graph)

    def back(self, number: int) -> None:
        self.candidates.returned(self.recipes[number], self.graph)
        self.candidates.add(self.recipes[number], self.graph, 64)


def test_numerators_count_the_evicted_neighbourhood() -> None:
    line = Line([1.0, 2.0, 4.0, 8.0, 16.0])
    line.drop(1), line.drop(3)
    assert [line.numerator(i) for i in (0, 2, 4)] == [3.0, 14.0, 24.0]
    line.drop(2)
    assert [line.numerator(i) for i in (0, 4)] == [15.0, 30.0]
    line.back(2)
    assert [line.numerator(i) for i in (0, 2, 4)] == [3.0, 14.0, 24.0]


def test_random_evictions_and_returns_agree_with_a_search() -> None:
    rng = np.random.default_rng(3)
    line = Line(rng.integers(1, 100, size=60).astype(float))
    gone: set[int] = set()
    for _ in range(500):
        number = int(rng.integers(60))
        if number in gone:
            gone.remove(number), line.back(number)
        elif len(gone) < 55:
            gone.add(number), line.drop(number)
        there = [i for i in range(60) if i not in gone]
        assert [line.numerator(i) for i in there] == [line.searched(i) for i in there]
        assert len(line.candidates) == len(there)


def test_the_cheapest_far_away_goes_first() -> None:
    line = Line([5.0] * 9)
    assert line.candidates.best(line.here)[0] is line.recipes[0]
    line.drop(0)
    best = line.candidates.best(line.here)[0]
    assert best is line.recipes[2]  # its neighbour would have to be made from what is gone
    for r in line.recipes[1:]:
        assert line.candidates.pass_over(r)
    assert line.candidates.best(line.here) is None and not line.candidates.pass_over(line.recipes[0])
    line.candidates.refresh(line.recipes[4], line.graph)
    assert line.candidates.best(line.here)[0] is line.recipes[4]
    line.candidates.clear()
    assert len(line.candidates) == 0 and line.candidates.best(line.here) is None


def test_a_larger_set_than_is_divided_loses_what_comes_back() -> None:
    line = Line([1.0] * 302)
    for i in range(1, 301):
        line.drop(i)
    assert line.numerator(0) == line.numerator(301) == 301.0
    line.back(150)
    assert line.numerator(0) == line.numerator(301) == 300.0 and line.numerator(150) == 300.0


def test_rows_of_candidates_are_used_again() -> None:
    line = Line([1.0] * 300)
    rows = len(line.candidates._rows)
    for _ in range(5):
        for i in range(300):
            line.candidates.remove(line.recipes[i])
        assert len(line.candidates) == 0 and line.candidates.best(line.here) is None
        for i in range(300):
            line.candidates.add(line.recipes[i], line.graph, 64)
    assert len(line.candidates._rows) == rows


def test_parts_join_into_one() -> None:
    a, b, c = (Part(float(i), {i}) for i in (1, 2, 4))
    b.edge, c.edge = {7, 8}, {8, 9}
    a.join(b), c.join(a)
    assert a.all() is b.all() is c.all() is c
    assert (c.cost, c.members, c.edge) == (7.0, {1, 2, 4}, {7, 8, 9})
    c.join(c)
    assert c.cost == 7.0


def test_what_a_replay_will_read_goes_last() -> None:
    line = Line([1.0, 1.0, 1.0])
    first, second, third = line.recipes
    candidates = line.candidates

    def best() -> Recipe:
        found = candidates.best(line.here)
        return found[0] if found is not None else None

    assert best() is first
    candidates.spare([first, second]), candidates.spare([first])
    assert best() is third
    candidates.refresh(first, line.graph)  # a neighbour's coming and going does not offer it
    candidates.unspare(first, line.graph)
    assert best() is third  # another replay reads it
    candidates.unspare(first, line.graph)
    assert best() is first
    candidates.remove(first), candidates.remove(third)
    assert best() is None
    assert candidates.offer_spared() and best() is second
    assert not candidates.offer_spared()


# Replays ----------------------------------------------------------------------------------------------------------


class Keeper:
    """Drops nothing."""

    def registered(self, *_: Any) -> None: ...

    spare = unspare = registered


class Broken:
    """A place in a tier that fails."""

    def fetch(self, node: Node) -> Buffer:
        raise OSError


def test_what_a_tier_has_not_is_made_again_and_what_others_wait_for_stays() -> None:
    """The replay did not plan that the value's sources are read for it."""
    x = c64(np.eye(SIDE))
    with tg.memory_budget("1GiB"), tg.GradientTape():
        y = tg.softmax(x)
        wanted = tg.matmul(tg.softmax(y), y)
        recipe = MANAGER._present().recipes[wanted._buffer.node.index]
        there = wanted.numpy(copy=True)
        del y, wanted
        recipe.inputs[0].slot = Broken()
        assert [i.value() for i in recipe.inputs] == [None, None]
        with tg.measure() as m:
            made = replay(MANAGER._present(), [recipe], Keeper())
        assert m.restored == 3 and np.array_equal(made[recipe.node.index].array, there)


# Pending values ---------------------------------------------------------------------------------------------------


def test_what_pends_is_asked_of_only_where_somebody_else_holds_it_too() -> None:
    """What only a tape, and another pending value of a tape's, hold need not be computed."""
    line = Line([1.0])
    aval = line.buffers[0].node.aval
    pending = [Buffer(None, Node(LEAF, NO_PARAMS, aval), (line.buffers[0],))]
    pending.append(Buffer(None, Node(LEAF, NO_PARAMS, aval), (pending[0],)))
    recipes = [Recipe(b.node, (line.recipes[0],), b) for b in pending]
    kept = [Kept(r, line.graph, b) for r, b in zip(recipes, pending, strict=True)]
    for recipe, k in zip(recipes, kept, strict=True):
        recipe.kept = weakref.ref(k)
    held = pending.pop()
    user = Buffer(None, Node(LEAF, NO_PARAMS, aval), (line.buffers[0],))
    assert asked_of([*recipes, Recipe(user.node, (line.recipes[0],), user)]) == [pending[0], held, user]
    kept[1].buffer = None  # it was dropped just when somebody took it in hand
    assert asked_of(recipes) == [pending[0], held]
    kept[1].buffer = held
    pending.clear()
    assert asked_of([line.recipes[0], *recipes]) == [held]
    del held
    assert asked_of(recipes) == []


def laplacian(u: Any) -> Any:
    """Minus the sum of second differences, to fourth order: eight slices of one padded field, and the field."""
    n, m = u.shape
    p = tg.pad(u, 2)
    two = p[:n, 2:-2] + p[4:, 2:-2] + p[2:-2, :m] + p[2:-2, 4:]
    one = p[1 : n + 1, 2:-2] + p[3 : n + 3, 2:-2] + p[2:-2, 1 : m + 1] + p[2:-2, 3 : m + 3]
    return -(1.0 / 12.0 * two + -4.0 / 3.0 * one + 5.0 * u)


def wave_step(cells: int, steps: int) -> Any:
    """A step of leapfrog in a velocity.  What its rule reads is a pending value made from three fields."""
    at = cells // 10
    source = np.zeros((cells, cells), "float32")
    source[at, cells // 2] = 1.0
    depth = np.tile(np.arange(cells, dtype="float32")[:, None] / cells, (1, cells))
    velocity, impulse = tg.asarray(1.5 + depth), tg.asarray(source)

    def step() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(velocity)
            factor = tg.square(velocity * 0.1)
            before = now = tg.zeros((cells, cells), dtype="float32")
            found = []
            for i in range(steps):
                amplitude = float(np.sin(0.2 * i))
                before, now = now, 2.0 * now - before + factor * laplacian(now) + amplitude * impulse
                found.append(1e3 * now[at, 2:-2])
            loss = tg.sum(tg.square(tg.stack(found)))
        return tape.gradient(loss, velocity)

    return step


def test_dropping_one_field_of_a_pending_value_does_not_lose_the_others(lazy: None) -> None:
    step = wave_step(cells=32, steps=120)
    step()
    with tg.measure() as plain:
        wanted = step().numpy()
    activations = plain.peak_by_category["activation"]
    rest = plain.peak_bytes - activations
    for fraction, most in ((0.3, 0.3), (0.2, 0.35), (0.1, 0.6)):
        limit = int(rest + fraction * activations)
        with tg.memory_budget(limit) as b, tg.measure() as m:
            found = step().numpy()
        assert np.array_equal(found, wanted) and b.peak_bytes <= limit
        assert m.restored_cost <= most * plain.cost, (fraction, m.restored_cost / plain.cost)
