"""Chains of unit layers under budgets, against the optimum; and fields of a wave, whose values wait for readers."""

from __future__ import annotations

from collections.abc import Callable
from math import comb, log2
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, live
from checks import c64

import tapegrad as tg


def optimum(length: int, slots: int) -> int:
    """Forward steps to reverse a chain with so many checkpoints (Griewank & Walther 2000, Algorithm 799, eq. 2)."""
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - comb(slots + repeats, slots + 1)


class Chain:
    """``count`` layers, of which each saves one value for its rules."""

    def __init__(self, count: int, layer: Callable[[Any], Any] = tg.softmax) -> None:
        self.count, self.layer = count, layer
        self.x = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))
        self.required = self.step().numpy()
        self.base = live()

    def step(self) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(self.x)
            h = self.x
            for _ in range(self.count):
                h = self.layer(h)
            loss = tg.sum(h)
            del h
        return tape.gradient(loss, self.x)

    def within(self, units: int) -> tg.memory.Measure:
        """Return the figures of a step that has room for so many layers' values, and for some numbers."""
        with tg.memory_budget(limit := self.base + units * UNIT + 4 * 512) as b, tg.measure() as m:
            g = self.step()
        assert np.array_equal(g.numpy(), self.required) and b.peak_bytes <= limit
        return m


@pytest.mark.parametrize(
    ("count", "fraction", "most"),
    [
        *((100, f, most) for f, most in ((0.5, 1.05), (0.3, 1.05), (0.2, 1.05), (0.1, 1.3), (0, 1.5))),
        (256, 0.5, 1.05), (256, 0.1, 1.3), (1024, 0.3, 1.05), (1024, 0, 1.5),
    ],
)  # fmt: skip
def test_forward_steps_are_near_the_optimum(count: int, fraction: float, most: float) -> None:
    units = int(fraction * count) or int(log2(count)) + 5
    m = Chain(count).within(units)
    best = optimum(count + 1, units - 2)
    assert m.nodes_run["softmax"] <= most * best, (m.nodes_run["softmax"], best)
    assert m.restored == m.evictions == m.nodes_run["softmax"] - count


@pytest.mark.parametrize(
    ("primitive", "layer"),
    [
        ("tanh", lambda h: tg.tanh(tg.cumsum(h, axis=0) * 1e-3)),
        ("tanh", lambda h: tg.tanh(h[::-1])),
        ("softmax", lambda h: tg.softmax(h * 1.0)),
    ],
)  # fmt: skip
def test_chains_that_save_lazy_values_are_near_the_optimum(primitive: str, layer: Callable[[Any], Any]) -> None:
    chain = Chain(100, layer)
    for units, most in ((50, 1.05), (30, 1.05), (20, 1.05), (10, 1.3)):
        ran = chain.within(units).nodes_run[primitive]
        assert 100 <= ran <= most * optimum(101, units - 3), (units, ran)


def test_what_fits_is_not_dropped() -> None:
    m = Chain(40).within(43)
    assert (m.evictions, m.restored, m.nodes_run["softmax"]) == (0, 0, 40)


def test_long_chains_neither_recurse_nor_grow_quadratically() -> None:
    m = Chain(2_000).within(130)
    assert m.nodes_run["softmax"] <= 1.3 * optimum(2_001, 128)


def laplacian(u: Any) -> Any:
    """Return minus the sum of second differences, to fourth order: eight slices of one padded field, and the field."""
    n, m = u.shape
    p = tg.pad(u, 2)
    two = p[:n, 2:-2] + p[4:, 2:-2] + p[2:-2, :m] + p[2:-2, 4:]
    one = p[1 : n + 1, 2:-2] + p[3 : n + 3, 2:-2] + p[2:-2, 1 : m + 1] + p[2:-2, 3 : m + 3]
    return -(1.0 / 12.0 * two + -4.0 / 3.0 * one + 5.0 * u)


def wave_step(cells: int, steps: int) -> Any:
    """Return a function that differentiates leapfrog in a velocity: rules read a lazy value made from three fields."""
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
            seen = []
            for i in range(steps):
                amplitude = float(np.sin(0.2 * i))
                before, now = now, 2.0 * now - before + factor * laplacian(now) + amplitude * impulse
                seen.append(1e3 * now[at, 2:-2])
            loss = tg.sum(tg.square(tg.stack(seen)))
        return tape.gradient(loss, velocity)

    return step


def test_dropping_one_field_of_a_lazy_value_does_not_lose_the_others(lazy: None) -> None:
    step = wave_step(cells=32, steps=80)
    step()
    with tg.measure() as plain:
        required = step().numpy()
    activations = plain.peak_by_category["activation"]
    rest = plain.peak_bytes - activations
    for fraction, most in ((0.3, 0.36), (0.1, 1.1)):
        limit = int(rest + fraction * activations)
        with tg.memory_budget(limit) as b, tg.measure() as m:
            result = step().numpy()
        assert np.array_equal(result, required) and b.peak_bytes <= limit
        assert m.restored_cost <= most * plain.cost, (fraction, m.restored_cost / plain.cost)
