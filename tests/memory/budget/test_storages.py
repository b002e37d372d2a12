"""What tapes keep: which values can be dropped, whoever has wanted them before, and what is kept in their place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checks import c64

import tapegrad as tg
from tapegrad.memory.budget import storages as storages_module
from tapegrad.memory.budget.budget import MANAGER

SIDE = 16
UNIT = SIDE * SIDE * 8
X = np.random.default_rng(1).normal(size=(SIDE, SIDE))


@pytest.fixture
def x() -> tg.Tensor:
    return c64(X)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    yield
    assert MANAGER._present() is None and len(MANAGER._storages.candidates) == 0


def wanting(h: Any) -> Any:
    """A tape that wants ``h`` alone; called, it gives a gradient, which is the sum of ``h``."""
    s = c64(1.0)
    with tg.GradientTape() as tape:
        tape.watch(s)
        y = tg.sum(h * s)
    return lambda: tape.gradient(y, s).item()


def look() -> None:
    """See what tapes keep, as where room is needed."""
    with tg.memory_budget("1GiB"):
        pass


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


@pytest.mark.parametrize("most", [1, 3])
def test_what_is_wanted_anew_is_looked_at_before_it_is_much(
    most: int, x: tg.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages_module, "_MOST_NEW", most)
    with tg.memory_budget("1GiB"), tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        first, waiting = wanting(h), []
        look()
        MANAGER._storages.register_new()
        for _ in range(4):
            first = None
            first = wanting(h)
            waiting.append(len(MANAGER._storages._new))
        assert waiting == [k % most for k in range(1, 5)] and first() == float(tg.sum(h))


def test_what_was_dropped_while_somebody_took_it_in_hand_is_kept_as_it_is(x: tg.Tensor) -> None:
    """Another thread may do so just when its bytes are let go of."""
    with tg.memory_budget("1GiB") as m, tg.GradientTape(watch_accessed_variables=False):
        h = tg.softmax(x)
        first = wanting(h)
        kept = MANAGER._present().recipes[h._buffer.node.index].keeping()
        kept.buffer = None
        second = wanting(h)
        assert kept.buffer is h._buffer and first() == second() == float(tg.sum(h)) and m.restored == 0


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
        assert MANAGER.relieve(1) and m.live_bytes == before - gone
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
