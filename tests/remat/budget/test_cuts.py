"""Whole states that long replays keep: loops whose rules do not read the state that the next step needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

Step = Callable[[], list[Any]]


def normal(*shape: int, seed: int = 0) -> Any:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def gradients(loss: Callable[[], Any], variables: list[Any]) -> Step:
    def step() -> list[Any]:
        with tg.GradientTape() as tape:
            value = loss()
        return [g.numpy().copy() for g in tape.gradient(value, variables)]

    return step


def leapfrog(steps: int, cells: int = 32) -> Step:
    """A wave: its rules read the Laplacian alone, the next step reads two fields."""
    speed = tg.Variable(np.full((cells, cells), 0.1, "float32"))
    damping, start = tg.asarray(np.full((cells, cells), 0.999, "float32")), normal(cells, cells)

    def loss() -> Any:
        before = now = start
        for _ in range(steps):
            p = tg.pad(now, 1)
            spread = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4.0 * now
            before, now = now, damping * (2.0 * now - damping * before + speed * spread)
        return tg.sum(tg.square(now))

    return gradients(loss, [speed])


def bodies(steps: int, count: int = 16) -> Step:
    """Velocity Verlet of masses that attract each other: rules read views of what is computed."""
    mass, start = tg.Variable(np.linspace(0.5, 1.5, count, dtype="float32")), normal(count, 3)

    def acceleration(x: Any) -> Any:
        d = x[:, None, :] - x[None, :, :]
        r = tg.sum(tg.square(d), axis=2) + 0.1
        return -tg.sum(d * (mass[None, :] / (r * tg.sqrt(r)))[:, :, None], axis=1)

    def loss() -> Any:
        x, v, dt = start, tg.zeros((count, 3)), 0.001
        a = acceleration(x)
        for _ in range(steps):
            x = x + dt * v + 0.5 * dt * dt * a
            b = acceleration(x)
            v, a = v + 0.5 * dt * (a + b), b
        return tg.sum(tg.square(x))

    return gradients(loss, [mass])


def scaled(steps: int, cells: int = 32) -> Step:
    """A loop in which every step, and a rule of it, reads one value computed before the loop."""
    weight, start = tg.Variable(np.float32(0.3)), normal(cells, cells)

    def loss() -> Any:
        scale = tg.softplus(weight)
        before = now = start
        for _ in range(steps):
            p = tg.pad(now, 1)
            spread = p[:-2, 1:-1] + p[2:, 1:-1] - 2.0 * now
            before, now = now, 1.9 * now - 0.95 * before + scale * (0.1 * spread)
        return tg.sum(tg.square(now))

    return gradients(loss, [weight])


def within(step: Step, fraction: float) -> tuple[float, int]:
    """Cost of what a step recomputes within a part of its activations, in plain steps; and values evicted.

    The bits must be the same, and the peak within the budget.
    """
    step()
    with tg.measure() as plain:
        live = plain.live_bytes
        expected = step()
    limit = int(live + fraction * (plain.peak_bytes - live))
    with tg.memory_budget(limit) as b, tg.measure() as m:
        results = step()
    assert b.peak_bytes <= limit
    assert all(np.array_equal(x, y) for x, y in zip(results, expected, strict=True))
    return m.restored_cost / plain.cost, m.evictions


@pytest.mark.parametrize(
    ("make", "fraction", "most"),
    [
        (leapfrog, 0.3, 1.1), (leapfrog, 0.2, 1.1), (leapfrog, 0.1, 3.0),
        (bodies, 0.1, 1.1),
        (scaled, 0.3, 1.1), (scaled, 0.2, 1.1), (scaled, 0.1, 2.7),
    ],
)  # fmt: skip
def test_replays_of_a_loop_begin_at_the_latest_state_that_was_kept(make, fraction, most):
    cost, _ = within(make(150), fraction)
    assert cost <= most


def test_large_lazy_values_that_are_computed_in_passing_keep_bits_and_budget():
    cost, evictions = within(leapfrog(30, 600), 0.35)
    assert evictions and cost <= 1.0


def test_a_persistent_tape_is_differentiated_twice_within_a_budget():
    x = tg.asarray(np.linspace(0.0, 1.0, 1024, dtype="float32").reshape(32, 32))

    def run() -> list[Any]:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            before = now = x
            for _ in range(100):
                before, now = now, 1.9 * now - 0.95 * before - 0.01 * tg.sin(tg.roll(now, 1, axis=0))
            y = tg.sum(now)
        return [tape.gradient(y, x).numpy().copy() for _ in range(2)]

    run()
    with tg.measure() as plain:
        live = plain.live_bytes
        expected = run()
    limit = int(live + 0.3 * (plain.peak_bytes - live))
    with tg.memory_budget(limit) as b, tg.measure() as m:
        results = run()
    assert b.peak_bytes <= limit and m.restored_cost <= 3.0 * plain.cost
    assert all(np.array_equal(r, e) for r, e in zip(results, expected, strict=True))


def test_states_that_are_kept_make_no_budget_fail_that_is_enough_without_them():
    cost, _ = within(leapfrog(90), 0.09)
    assert cost <= 12.0
