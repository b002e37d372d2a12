"""Tiers that are full, and values that cannot be moved: they are recomputed, and the tier is asked once for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, values

import tapegrad as tg
from tapegrad.errors import OffloadError
from tapegrad.ops.interop.names import name
from tapegrad.remat.offload import tiers
from tapegrad.remat.policies import offload_names

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


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("room", [0, 2, 100])
def test_a_full_tier_and_values_that_cannot_be_moved(room: int, strided: bool, tmp_path: Path) -> None:
    """Of a value that lies by columns the bytes would come back otherwise; a full tier's values are recomputed."""
    chance = np.random.default_rng(0)
    ws = [tg.asarray((chance.normal(size=(N, N)) * 0.2).astype("f4")) for _ in range(LAYERS)]
    x, disk = tg.asarray(chance.normal(size=(ROWS, N)).astype("f4")), tiers.Disk(tmp_path)
    tier = Failing(disk, room)

    def layer(h: Any, w: Any) -> Any:
        h = tg.softmax(h @ w)
        return name(tg.tanh(h.mT), "h").mT if strided else name(h, "h")  # small values lie as their operands do

    def run(within: Any) -> Any:
        with within, tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h, held = x, None
            for k, w in enumerate(ws):
                h = layer(h, w)
                held = h if k == 0 else held if k < 3 else None  # the first one is in somebody's hands for a while
            y = tg.sum(h * h)
            del h
            found = [tape.gradient(y, x) for _ in range(2)]
            del tape, y
        return values(found)

    with tg.measure() as m:
        base = m.live_bytes
    wanted = run(tg.measure())
    limit = base + 7 * BYTES
    assert bits_equal(run(tg.memory_budget(limit, policy=offload_names("h", tier=tier))), wanted)
    assert tier.asked == 0 if strided else tier.asked >= 1
    assert disk.bytes_held == 0
    if room == 100:  # without a limit a full tier is an error
        tier.asked = 0
        assert bits_equal(run(tg.memory.policy(offload_names("h", tier=tier))), wanted)
        assert tier.asked == 0 if strided else tier.asked >= LAYERS - 1
        assert tier.asked <= LAYERS, "what has been moved is not moved again"
