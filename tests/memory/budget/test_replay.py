"""Making again: what a replay reads is spared until it has been read for the last time, and not longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE
from checks import bits_equal, c64

import tapegrad as tg
from tapegrad.memory.budget import replay as replay_module
from tapegrad.memory.budget import storages as storages_module
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.budget.storages import Storages
from tapegrad.memory.ledger.phase import HERE, during
from tapegrad.memory.policies import RECOMPUTE


class Told:
    """What becomes of spared values, and what is made meanwhile, by the number of steps of the chain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[int, int] = {}
        self.found: list[tuple[str, list[int]]] = []
        spare, unspare, made = Storages.spare, Storages.unspare, replay_module._made

        def spared(storages: Any, recipes: Iterable[Any]) -> None:
            self.note("spared", recipes)
            spare(storages, recipes)

        def unspared(storages: Any, graph: Any, recipes: Iterable[Any]) -> None:
            self.note("free", recipes)
            unspare(storages, graph, recipes)

        def noted(recipe: Any, inputs: Any) -> Any:
            self.note("made", [recipe])
            return made(recipe, inputs)

        monkeypatch.setattr(Storages, "spare", spared)
        monkeypatch.setattr(Storages, "unspare", unspared)
        monkeypatch.setattr(replay_module, "_made", noted)

    def note(self, what: str, recipes: Iterable[Any]) -> None:
        steps = sorted(self.steps[r.node.index] for r in recipes if r.node.index in self.steps)
        if steps:
            self.found.append((what, steps))


def test_what_has_been_read_for_the_last_time_may_go_before_the_replay_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told, x = Told(monkeypatch), c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))

    def run(within: Any, drops: bool) -> Any:
        with within, tg.GradientTape() as tape:
            tape.watch(x)
            hs, indices = [x], list[int]()
            for step in range(6):
                h = tg.softmax(hs[-1]) if step < 4 else tg.softmax(hs[step]) * hs[step - 2]
                hs.append(h)
                told.steps[h._buffer.node.index] = step
                indices.append(h._buffer.node.index)
            y = tg.sum(h)
            del h, hs
            if drops:
                MANAGER.release([indices[3]], (), RECOMPUTE)
                told.found.clear()
            return tape.gradient(y, x)

    wanted = run(tg.measure(), False)
    assert bits_equal([run(tg.memory_budget("1GiB"), True)], [wanted])
    assert told.found[:3] == [("spared", [2]), ("made", [3]), ("free", [2])]
    told.steps.clear()


def test_several_dropped_values_are_made_in_order_and_each_source_is_free_after_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, x = Told(monkeypatch), c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))
    with tg.memory_budget("1GiB"), tg.GradientTape() as tape:
        tape.watch(x)
        a = tg.softmax(x)
        b = tg.softmax(a)
        c = tg.softmax(x * 0.5)
        d = tg.matmul(b, c)
        y = tg.matmul(d, tg.softmax(d))
        for step, t in enumerate((a, b, c, d)):
            told.steps[t._buffer.node.index] = step
        indices = [t._buffer.node.index for t in (b, d)]
        z = tg.sum(y)
        del a, b, c, d, y, t
        MANAGER.release(indices, (), RECOMPUTE)
        told.found.clear()
        assert tape.gradient(z, x) is not None
    assert told.found[:5] == [("spared", [0, 2]), ("made", [1]), ("free", [0]), ("made", [3]), ("free", [2])]


def test_a_value_tells_how_often_it_was_made_again() -> None:
    x = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))
    with tg.memory_budget("1GiB"), tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        h = tg.softmax(x)
        index = h._buffer.node.index
        y = tg.sum(h * h)
        del h
        times = []
        for _ in range(3):
            times.append([row.times for row in tg.memory.saved(tape).rows if row.op == "softmax"])
            MANAGER.release([index], (), RECOMPUTE)
            tape.gradient(y, x)
    assert times == [[0], [1], [2]]


@pytest.mark.parametrize("within", [False, True])
def test_what_is_made_again_is_a_rerun_wherever_it_is_made(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkpoint's rerun, say; and what runs on afterwards is what it was."""
    x, made, found = c64(np.ones((SIDE, SIDE))), replay_module._made, []

    def noted(recipe: Any, inputs: Any) -> Any:
        found.append((HERE.reruns, HERE.restoring, HERE.special))
        return made(recipe, inputs)

    def run() -> None:
        with tg.memory_budget("1GiB"), tg.GradientTape() as tape:
            tape.watch(x)
            h = tg.softmax(x)
            y, index = tg.sum(h * h), h._buffer.node.index
            del h
            MANAGER.release([index], (), RECOMPUTE)
            assert tape.gradient(y, x) is not None and HERE.reruns is HERE.restoring is within

    monkeypatch.setattr(replay_module, "_made", noted)
    during(run, reruns=within, restoring=within)
    assert found == [(True, True, True)]


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("policy", [None, lambda value: RECOMPUTE])
def test_what_tapes_keep_is_looked_at_before_it_is_much(
    most: int, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decided otherwise than if it were looked at where room is needed."""
    x = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))

    def run() -> Any:
        with tg.measure() as m:
            base = m.live_bytes
        new = []
        with tg.memory_budget(base + 8 * SIDE * SIDE * 8, policy) as m, tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(12):
                h = tg.softmax(h) * tg.tanh(h)
                new.append(len(MANAGER._storages._new))
            g = tape.gradient(tg.sum(h), x).numpy().tobytes()
        return (g, m.evictions, m.restored), max(new)

    wanted, often = run()
    monkeypatch.setattr(storages_module, "_MOST_NEW", most)
    found, seldom = run()
    assert found == wanted and seldom < most and (policy is not None or seldom < often)
