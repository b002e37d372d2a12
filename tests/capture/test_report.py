"""Replays in the ledger: the kernels, bytes and steps of an eager run, and what lies in the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.tracing.phase import STEPS


def data(*shape: int, seed: int = 0) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def trainer(width: int) -> Callable[[tg.Tensor, tg.Tensor], tg.Tensor]:
    tg.random.seed(0)
    model = nn.Sequential([nn.Dense(width, activation="tanh"), nn.Dropout(0.2), nn.Dense(width, activation="tanh")])
    model(data(2, width))
    optimizer = tg.optim.Adam(0.01)

    def step(x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
        with tg.GradientTape() as tape:
            loss = tg.mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def gradient(x: tg.Tensor, y: tg.Tensor) -> Any:
    return tg.value_and_grad(lambda x: tg.sum(tg.softmax(x @ y) * tg.cumsum(x, axis=0)))(x)


PROGRAMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "small training": lambda: trainer(8),
    "large training": lambda: trainer(300),
    "gradient": lambda: gradient,
    "elementwise": lambda: lambda x, y: tg.tanh(x * y) + 1,
}


def measured(f: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    before = STEPS.count
    with tg.measure() as m:
        f(*args)
    return m, STEPS.count - before


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_counts_as_an_eager_run(name: str) -> None:
    n = 300 if "large" in name else 8
    x, y = data(n, n), data(n, n, seed=1)
    plain, captured = PROGRAMS[name](), tg.function(PROGRAMS[name]())
    for _ in range(3):
        plain(x, y)
        captured(x, y)
    eager, marks = measured(plain, x, y)
    replay, again = measured(captured, x, y)
    assert captured.stats.replays == 2
    assert (replay.kernel_runs, replay.bytes_moved) == (eager.kernel_runs, eager.bytes_moved)
    assert replay.nodes_run == eager.nodes_run
    assert again == marks == ("training" in name)
    assert sum(replay.arena_by_category.values()) <= captured.plan(x, y).arena_bytes
    assert replay.arena_by_category == captured.plan(x, y).at_the_peak and not eager.arena_by_category


def test_what_lies_in_the_arena_is_told_by_category() -> None:
    def f(x: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(6):
                h = tg.tanh(h @ x)
            loss = tg.sum(h)
        return tape.gradient(loss, x)

    x = data(64, 64)
    captured = tg.function(f)
    for _ in range(3):
        captured(x)
    with tg.measure() as m:
        captured(x)
    assert m.arena_by_category["activation"] == 5 * x.nbytes
    assert "activation" in str(captured.plan(x)).splitlines()[1]


def test_what_a_budget_makes_again_is_counted() -> None:
    def f(x: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(20):
                h = tg.tanh(h @ x)
            loss = tg.sum(h)
        return tape.gradient(loss, x)

    x, plain = data(64, 64), tg.function(f)
    for _ in range(3):
        plain(x)
    captured = tg.function(f, budget=plain.plan(x).peak_bytes * 2 // 3)
    for _ in range(3):
        captured(x)
    with tg.measure() as m, tg.measure() as outer:
        captured(x)
    with tg.measure() as without:
        plain(x)
    again = sum(captured.plan(x).recomputed.values())
    assert m.restored == outer.restored == again > 0 == without.restored
    assert m.kernel_runs == without.kernel_runs + again
    assert "rematerialized" in m.arena_by_category or sum(m.arena_by_category.values()) < plain.plan(x).arena_bytes


def test_calls_on_a_tape_count_forward_and_backward() -> None:
    f = lambda x, w: tg.sum(tg.tanh(x @ w) ** 2)
    g = tg.function(f)

    def step(f: Callable[..., Any], x: tg.Tensor, w: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch((x, w))
            loss = f(x, w)
        return tape.gradient(loss, [x, w])

    x, w = data(70, 70), data(70, 70, seed=1)
    for _ in range(3):
        step(g, x, w)
    eager, _ = measured(step, f, x, w)
    replay, _ = measured(step, g, x, w)
    assert g.stats.replays == 3
    for name in ("matmul", "tanh"):
        assert replay.nodes_run[name] == eager.nodes_run[name]


def test_outside_of_a_measurement_nothing_is_kept() -> None:
    f = tg.function(lambda x: tg.tanh(x @ x))
    for _ in range(4):
        f(data(8, 8))
    with tg.measure() as m:
        pass
    assert m.kernel_runs == 0 and not m.arena_by_category
