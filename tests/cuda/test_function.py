"""Captured functions on a device: programs replayed there, to the bits of eager runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured import alike, bits

import tapegrad as tg
import tapegrad.nn.functional as F

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.sampled(1 / 2)]


def data(*shape: int, seed: int = 0, dtype: str = "float32") -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype), device="cuda")


def test_arguments() -> None:
    def program(function: Callable[..., Any]) -> Any:
        f = function(lambda x, y: (tg.tanh(x) * 2 + y, tg.sum(x @ x.T), x))
        return [f(data(5, 5, seed=k), tg.asarray(np.float32(k), device="cuda")) for k in range(5)]

    alike(program, (1, 3))


def test_results_are_the_callers() -> None:
    f = tg.function(lambda x: tg.exp(x) + 1)
    kept = [f(data(4, seed=k)) for k in range(5)]
    assert [bits(y) for y in kept] == [bits(tg.exp(data(4, seed=k)) + 1) for k in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: tg.optim.Adam(0.1),
        lambda: tg.optim.AdamW(lambda step: 0.1 / (1 + step), weight_decay=0.02),
        lambda: tg.optim.SGD(0.1),
        lambda: tg.optim.SGD(0.1, weight_decay=0.1),
        lambda: tg.optim.SGD(0.1, momentum=0.9),
        lambda: tg.optim.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.5),
        lambda: tg.optim.RMSprop(0.1, momentum=0.5, centered=True, weight_decay=0.1),
        lambda: tg.optim.Adagrad(0.1),
        lambda: tg.optim.Lion(0.1, clipnorm=0.5),
        lambda: tg.optim.LAMB(0.1, weight_decay=0.1),
        lambda: tg.optim.AdamW(lambda step: 0.1 / (1 + step), gradient_accumulation_steps=2),
    ],
)
def test_training(optimizer: Callable[[], tg.optim.Optimizer], dtype: str) -> None:
    """Rates and step counts are live: a schedule, and a rate set between calls, are those of eager."""

    def program(function: Callable[..., Any]) -> Any:
        vs = [tg.Variable(data(4, 3, seed=9, dtype=dtype)), tg.Variable(data(3, seed=8, dtype=dtype))]
        by = optimizer()

        @function
        def step(x: tg.Tensor) -> tg.Tensor:
            with tg.GradientTape() as tape:
                loss = tg.sum(tg.tanh(x @ vs[0] + vs[1]) ** 2)
            by.apply(tape.gradient(loss, vs), vs)
            return loss

        out = []
        for k in range(7):
            if k == 4 and not callable(by.learning_rate):
                by.learning_rate = 0.03
            if k == 5:
                vs[1].assign(data(3, seed=k, dtype=dtype))
            out.append((step(data(6, 4, seed=k, dtype=dtype)), [v.numpy() for v in vs]))
        return out

    alike(program, (1, 5))


def test_random_numbers() -> None:
    """Positions of streams advance as eagerly, also after seeding anew, and with several draws in a kernel."""

    def program(function: Callable[..., Any]) -> Any:
        own = tg.random.Generator(3)

        @function
        def f(x: tg.Tensor) -> Any:
            noise = tg.random.normal((40, 30), generator=own, device="cuda")
            y = F.dropout(tg.tanh(x), 0.3) + noise * tg.random.uniform((40, 30), device="cuda")
            rows = tg.random.permutation(tg.asarray(np.arange(9), device="cuda"), generator=own)
            return y, tg.sum(F.dropout(y, 0.5), axis=0), rows

        out = []
        for k in range(7):
            if k == 5:
                tg.random.seed(k)
            out.append(f(data(40, 30, seed=k)))
        return out

    made = alike(program)
    assert made[0].stats.replays == 5 and not made[0].stats.fallbacks


def test_a_variable_whose_old_value_is_held() -> None:
    def program(function: Callable[..., Any]) -> Any:
        v = tg.Variable(data(300, 300))

        @function
        def f(x: tg.Tensor) -> tg.Tensor:
            v.assign(v * 0.5 + x)
            return tg.sum(v.value())

        held, out = [], []
        for k in range(6):
            if k % 2:
                held.append(v.value())
            out.append(f(data(300, 300, seed=k)))
        return out, held

    alike(program, (1, 4))


def test_on_a_tape() -> None:
    def program(function: Callable[..., Any]) -> Any:
        v = tg.Variable(data(6))
        f = function(lambda x: tg.sum(tg.sin(x) * x * v))
        out = []
        for k in range(5):
            x = data(6, seed=k)
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            out.append((y, tape.gradient(y, [x, v])))
        return out

    made = alike(program)
    assert made[0].stats.replays == 4


def test_in_a_loop_with_checkpoints() -> None:
    def program(function: Callable[..., Any]) -> Any:
        step = function(lambda state: (tg.sin(state[0]) * state[1] + state[0], state[1]))
        out = []
        for k in range(3):
            u, w = data(8, seed=k), data(8, seed=7)
            with tg.GradientTape() as tape:
                tape.watch((u, w))
                end, _ = tg.checkpointed_loop(step, (u, w), 12, snapshots=3)
                loss = tg.sum(end)
            out.append(tape.gradient(loss, [u, w]))
        return out

    made = alike(program)
    assert made[0].stats.replays > 12


def test_a_device_and_the_cpu_in_one_function() -> None:
    def made(x: Any, y: Any) -> Any:
        return tg.tanh(x) + tg.asarray(np.arange(3, dtype="float32")), tg.tanh(y) * 2

    f = tg.function(made)
    for k in range(3):
        x, y = np.full(3, float(k), "float32"), data(3, seed=k)
        assert bits(f(x, y)) == bits(made(x, y))
    assert f.stats.replays == 0
    assert [reason for reason in f.stats.fallbacks if "cuda:0" in reason and "cpu" in reason]


def test_a_value_that_is_read_is_an_error_there_too() -> None:
    f = tg.function(lambda x: x if float(tg.sum(x)) > 0 else -x)
    with pytest.raises(tg.errors.FunctionError, match=r"test_function\.py"):
        f(data(3))


def test_an_index_out_of_range_is_told_when_a_value_is_read() -> None:
    f = tg.function(lambda x, i: tg.take(x, i, axis=0))
    for _ in range(4):
        f(data(5), tg.asarray(np.array([0, 4]), device="cuda")).numpy()
    wrong = f(data(5), tg.asarray(np.array([0, 5]), device="cuda"))
    assert f.stats.replays == 3
    with pytest.raises(IndexError, match="index 5 is out of range"):
        wrong.numpy()


def test_loops_give_a_captured_body_the_index_as_a_tensor() -> None:
    def program(function: Callable[..., Any]) -> Any:
        source, x = data(9, seed=1), data(9)
        body = function(lambda i, u: (u * 0.5 + source[i]).at[-i].add(1))
        step = function(lambda u, i: body(i, u))
        out = []
        for _ in range(2):
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = tg.sum(tg.checkpointed_loop(step, x, 9, snapshots=2))
            out += [y, tape.gradient(y, x), tg.fori_loop(2, 9, body, x)]
        return out

    body, step = alike(program)
    assert body.stats.replays == 12
    assert step.stats.replays > 25 and not step.stats.fallbacks
