"""Captured steps on a device: CUDA graphs with our cuBLAS inside, and the bits of eager runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capture.test_steps import MORE
from captured import alike

import tapegrad as tg
import tapegrad.nn.functional as F

pytestmark = pytest.mark.gpu


def data(*shape: int, seed: int = 0, dtype: str = "float32") -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype), device="cuda")


@pytest.mark.parametrize("program", MORE, ids=lambda p: p.__name__)
def test_programs(program: Callable[..., Any]) -> None:
    alike(program)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_training_step_is_one_graph(dtype: str) -> None:
    def program(function: Callable[..., Any]) -> Any:
        weights = [tg.Variable(data(64, 64, seed=i, dtype="float32").astype(dtype)) for i in range(3)]
        optimizer = tg.optim.AdamW(lambda step: 0.01 / (1 + step))

        @function
        def step(x: tg.Tensor) -> tg.Tensor:
            with tg.GradientTape() as tape:
                h = x
                for w in weights:
                    h = F.dropout(tg.softmax(tg.tanh(h @ w) @ w.read().T), 0.1) + h
                loss = tg.mean(h * h)
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        return [(step(data(32, 64, seed=k).astype(dtype)), [w.read() for w in weights]) for k in range(8)]

    (f,) = alike(program)
    assert f.stats.replays == 6 and not f.stats.fallbacks
    told = f.explain(data(32, 64).astype(dtype))
    assert "as 1 CUDA graph" in told and "one by one" not in told


def test_a_loop_over_a_captured_body() -> None:
    def program(function: Callable[..., Any]) -> Any:
        step = function(lambda state: (tg.sin(state[0] @ state[1]) + state[0], state[1]))
        out = []
        for k in range(3):
            u, w = data(16, 16, seed=k), data(16, 16, seed=7)
            with tg.GradientTape() as tape:
                tape.watch((u, w))
                end, _ = tg.checkpointed_loop(step, (u, w), 20, snapshots=4)
                loss = tg.sum(end)
            out.append(tape.gradient(loss, [u, w]))
        return out

    (f,) = alike(program)
    assert f.stats.replays > 20
