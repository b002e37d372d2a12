"""Budgets on a device: the ledger's limit and the pool's, bits, and offloading to pinned memory.

Run as ``test_on_device.py`` is, on a device or by the stand-in.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import BudgetError, DeviceMemoryError

pytestmark = pytest.mark.gpu

SIDE, DEPTH = 128, 12
UNIT = SIDE * SIDE * 4


@pytest.fixture
def step() -> Any:
    with tg.device("cuda"):
        rng = np.random.default_rng(0)
        weights = [tg.Variable(rng.standard_normal((SIDE, SIDE), dtype="float32") / 12) for _ in range(DEPTH)]
        x = tg.asarray(rng.standard_normal((SIDE, SIDE), dtype="float32"))

        def run() -> list[tg.Tensor]:
            with tg.GradientTape() as tape:
                h = x
                for w in weights:
                    h = tg.name(tg.softmax(tg.tanh(h @ w)), "h")
                loss = tg.sum(h * h)
                del h
            return tape.gradient(loss, weights)

        yield run


def live() -> int:
    gc.collect()
    with tg.measure() as m:
        return m.live_bytes


def test_the_budget_is_kept_by_the_ledger_and_by_the_pool(step: Any) -> None:
    import cupy

    wanted = [g.numpy() for g in step()]
    pool, base, before = cupy.get_default_memory_pool(), live(), cupy.get_default_memory_pool().get_limit()
    with tg.measure() as m:
        step()
    plain = m.peak_bytes
    cupy.get_default_memory_pool().free_all_blocks()
    limit = base + (DEPTH + 12) * UNIT
    assert plain > limit, "there is something to do"
    with tg.measure() as m, tg.memory_budget(limit) as kept:
        assert pool.get_limit() == limit
        found = step()
        assert pool.total_bytes() <= limit  # with what is idle or in fragments
    assert kept.peak_bytes <= limit and m.evictions > 0 and m.restored > 0
    assert pool.get_limit() == before
    assert all(np.array_equal(g.numpy(), want) for g, want in zip(found, wanted, strict=True))


def test_too_small_a_budget_says_so_and_leaves_the_device_usable(step: Any) -> None:
    wanted = [g.numpy() for g in step()]
    base = live()
    with pytest.raises((BudgetError, DeviceMemoryError), match="bytes"), tg.memory_budget(base + 3 * UNIT):
        step()
    assert all(np.array_equal(g.numpy(), want) for g, want in zip(step(), wanted, strict=True))


def test_offloading_to_pinned_memory(step: Any) -> None:
    wanted = [g.numpy() for g in step()]
    with tg.memory.policy(tg.policies.offload_names("h")) as m:
        found = step()
    assert m.offloads > 0 and m.fetches > 0
    assert all(np.array_equal(g.numpy(), want) for g, want in zip(found, wanted, strict=True))
