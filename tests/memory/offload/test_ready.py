"""What waits to be moved to another memory: values that are there and can be moved, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, values

import tapegrad as tg
from tapegrad.errors import OffloadError
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.offload import tiers
from tapegrad.memory.offload.offload import AHEAD, Offloads
from tapegrad.memory.policies import offload_names
from tapegrad.ops.interop.names import name

ROWS, N, LAYERS = 256, 32, 6
BYTES = ROWS * N * 4


class Failing:
    """A tier that takes ``room`` values, and is full then."""

    def __init__(self, tier: Any, room: int) -> None:
        self.tier, self.room, self.asked = tier, room, 0

    def put(self, buffer: Any) -> Any:
        self.asked += 1
        if self.asked > self.room:
            raise OffloadError("the tier is full")
        return self.tier.put(buffer)

    def reclaim(self, nbytes: int | None = None) -> int:
        return 0


def ready() -> list[Any]:
    """The storages that wait; each is resident, and to be moved."""
    found = [recipe for recipe, _ in MANAGER._storages._ready.values()]
    assert all(r.storage.row >= 0 and r.storage.transfer is not None and r.value() is not None for r in found)
    return found


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("room", [0, 2, 100])
def test_what_has_been_moved_or_cannot_be_does_not_wait(room: int, strided: bool, tmp_path: Path) -> None:
    """Of a value that lies by columns the bytes would come back otherwise; a full tier's values are made again."""
    chance = np.random.default_rng(0)
    ws = [tg.asarray((chance.normal(size=(N, N)) * 0.2).astype("f4")) for _ in range(LAYERS)]
    x, disk = tg.asarray(chance.normal(size=(ROWS, N)).astype("f4")), tiers.Disk(tmp_path)
    tier, waiting = Failing(disk, room), list[int]()

    def layer(h: Any, w: Any) -> Any:
        h = tg.softmax(h @ w)
        return name(tg.tanh(h.mT), "h").mT if strided else name(h, "h")  # small values lie as their operands do

    def run(within: Any) -> Any:
        waiting.clear()
        with within, tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h, held = x, None
            for k, w in enumerate(ws):
                h = layer(h, w)
                held = h if k == 0 else held if k < 3 else None  # the first one is in somebody's hands for a while
                waiting.append(len(ready()))
            y = tg.sum(h * h)
            del h
            found = [tape.gradient(y, x) for _ in range(2) if ready() is not None]
            ready()
            del tape, y
        assert not MANAGER._storages._ready
        return values(found)

    with tg.measure() as m:
        base = m.live_bytes
    wanted = run(tg.measure())
    limit = base + 7 * BYTES
    assert bits_equal(run(tg.memory_budget(limit, policy=offload_names("h", tier=tier))), wanted)
    assert tier.asked == 0 if strided else tier.asked >= 1
    assert len(waiting) == LAYERS and max(waiting) > 1
    if room == 100:  # without a limit a full tier is an error
        tier.asked = 0
        assert bits_equal(run(tg.memory.policy(offload_names("h", tier=tier))), wanted)
        assert tier.asked == 0 if strided else tier.asked >= LAYERS - 1
        assert max(waiting) <= 3 and waiting[-1] <= 2, "what has been moved does not wait"


class Away:
    """A value in another memory, made at node ``index``."""

    def __init__(self, index: int, refuses: bool = False) -> None:
        self.node = SimpleNamespace(index=index, aval=SimpleNamespace(nbytes=index))
        self.coming, self.refuses = False, refuses

    def prefetch(self) -> bool:
        self.coming = not self.refuses
        return self.coming

    def cancel(self) -> bool:
        was, self.coming = self.coming, False
        return was


def brought(here: int, room: Callable[[int], bool] = lambda nbytes: True, refuse: tuple[int, ...] = ()) -> list[int]:
    """Of values made at nodes 1 to 8, those that come back where the walk is at node ``here``."""
    away, offloads = [Away(i, i in refuse) for i in range(1, 9)], Offloads()
    for value in away:
        offloads.went(value)  # type: ignore[arg-type]
    offloads.prefetch(here, room)
    offloads.prefetch(here, room)  # what is on its way is not asked for again
    return [value.node.index for value in away if value.coming]


def test_the_next_few_values_come_back_while_there_is_room_the_latest_first() -> None:
    assert AHEAD == 2 and brought(6) == [4, 5] and brought(2) == [1] and brought(1) == [] and brought(100) == [7, 8]
    assert brought(6, lambda nbytes: nbytes != 4) == [5] and brought(6, lambda nbytes: nbytes != 5) == []
    assert brought(6, refuse=(5,)) == [] and brought(6, refuse=(4,)) == [5]


def test_what_is_on_its_way_turns_round_the_last_one_first() -> None:
    """Those that have come, or that nobody wants any more, do not."""
    away, offloads = [Away(i) for i in range(5)], Offloads()
    assert all(offloads.bring(value, lambda nbytes: True) for value in away[:4])  # type: ignore[arg-type]
    away[3].coming = False  # it has come
    assert offloads.bring(away[4], lambda nbytes: True) and len(offloads._coming) == 4  # type: ignore[arg-type]
    turned = []
    del away[2]
    while offloads.give_way(1):
        turned.append([value.node.index for value in away if value.coming])
    assert turned == [[0, 1], [0], []] and not offloads._coming
