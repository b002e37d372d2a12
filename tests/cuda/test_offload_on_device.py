"""Activations leave a CUDA device and come back while kernels run: the CPU's bits, no race, and the pool's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shim import standin
from shim.happens import races

import tapegrad as tg
from tapegrad.device import pinned
from tapegrad.ops.interop.names import name
from tapegrad.remat import policies
from tapegrad.remat.offload import offload, tiers
from tapegrad.remat.policies import offload_names
from tapegrad.tensor import from_array

pytestmark = pytest.mark.sampled(1 / 2)

N, ROWS, LAYERS = 32, 256, 5
BYTES = N * ROWS * 4


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.2).astype(np.float32)


@pytest.fixture(autouse=True)
def no_default_tiers(monkeypatch):
    """A tier belongs to the stand-in of one test."""
    monkeypatch.setattr(offload, "default_tiers", {})
    monkeypatch.setattr(pinned, "CHUNK", 1)


class Model:
    """Layers on a device; gradients of all weights as arrays."""

    def __init__(self, device: Any) -> None:
        self.x = from_array(device.array(array(ROWS, N, seed=99)), device)
        with tg.device(str(device)):
            self.weights = [tg.Variable(array(N, N, seed=i)) for i in range(LAYERS)]

    def __call__(self, x: tg.Tensor) -> tg.Tensor:
        for w in self.weights:
            x = name(tg.tanh(x @ w), "h")
        return tg.sum(x * x)

    def gradients(self, f: Any = None) -> list[np.ndarray]:
        with tg.GradientTape() as tape:
            y = (f or self)(self.x)
        return [g.numpy() for g in tape.gradient(y, self.weights)]


def same(got: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return all(g.tobytes() == w.tobytes() for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("done", [False, True])
def test_a_plain_tape(cuda, done) -> None:
    """Copies that are never seen to be done, and such that are done at once."""
    model = Model(cuda)
    plain = model.gradients()
    standin.configure(stream_done=lambda mark: done)
    tier = tiers.Host(cuda)
    standin.events.clear()
    with tg.memory.policy(offload_names("h", tier=tier)) as m:
        assert same(model.gradients(), plain)
    assert races() == []
    assert m.offloads == m.fetches == LAYERS - 1 and m.prefetches


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("share", [0.88, 0.75])
def test_a_budget(cuda, cupy, done, share) -> None:
    """The pool never holds more than the budget: memory that copies still use counts."""
    model = Model(cuda)
    with tg.measure() as m:
        base = m.live_bytes
        plain = model.gradients()
    limit = base + int((m.peak_bytes - base) * share)
    standin.configure(stream_done=lambda mark: done)
    tier = tiers.Host(cuda)
    standin.events.clear()
    with tg.memory_budget(limit, policy=offload_names("h", tier=tier)) as m:
        assert same(model.gradients(), plain)
        assert m.offloads and m.peak_bytes <= limit
    assert races() == []
    tier.reclaim()


@pytest.mark.parametrize("done", [False, True])
def test_a_checkpoint(cuda, done) -> None:
    model = Model(cuda)
    plain = model.gradients()
    standin.configure(stream_done=lambda mark: done)
    f = tg.recompute_grad(model, policy=policies.any_of(offload_names("h"), policies.save_matmuls))
    standin.events.clear()
    with tg.measure() as m:
        assert same(model.gradients(f), plain)
    assert races() == []
    assert m.offloads == m.fetches == LAYERS and m.prefetches == LAYERS
    assert isinstance(offload.default_tier(cuda), tiers.Host)


def test_the_ledger_is_the_pool(cuda, cupy) -> None:
    """Also while values are on their way back: what the pool lends is what the ledger counts and what copies keep."""
    model = Model(cuda)
    tier = tiers.Host(cuda)
    pool = cupy.get_default_memory_pool()
    seen = []

    def check() -> None:
        seen.append(pool.used_bytes() - tg.memory.LEDGER.live_bytes - tier.kept_bytes)

    def f(x: tg.Tensor) -> tg.Tensor:
        for w in model.weights:
            x = name(tg.tanh(x @ w), "h")
            check()
        return tg.sum(x * x)

    with tg.measure() as m:
        check()
        g = model.gradients(tg.recompute_grad(f, policy=offload_names("h", tier=tier)))
        tier.reclaim(10**9)
        check()
    assert m.prefetches and len(seen) == 2 * LAYERS + 2
    assert len(set(seen[-LAYERS - 1 :])) == 1 and len(g) == LAYERS
