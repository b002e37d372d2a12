"""Captured functions on a device: not built yet, so they run eagerly, with the same results, and say why."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg

pytestmark = pytest.mark.usefixtures("cuda")


def data(*shape: int, seed: int = 0) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"), device="cuda")


def reasons(f) -> list[str]:
    return [reason for reason in f.stats.fallbacks if "cuda:0" in reason]


def test_arguments_on_the_device():
    f = tg.function(lambda x: tg.tanh(x) * 2 + 1)
    for k in range(4):
        x = data(5, seed=k)
        assert np.array_equal(f(x).numpy(), (tg.tanh(x) * 2 + 1).numpy())
    assert f.stats.replays == 0 and reasons(f)


def test_variables_on_the_device():
    v, w = (tg.Variable(data(4)) for _ in range(2))
    optimizers = [tg.optim.Adam(0.1), tg.optim.Adam(0.1)]

    def step(v, optimizer, x):
        with tg.GradientTape() as tape:
            loss = tg.sum((v * x) ** 2)
        optimizer.apply([tape.gradient(loss, v)], [v])
        return loss

    f = tg.function(lambda x: step(w, optimizers[1], x))
    for k in range(4):
        x = data(4, seed=k)
        assert np.array_equal(step(v, optimizers[0], x).numpy(), f(x).numpy())
        assert np.array_equal(v.numpy(), w.numpy())
    assert f.stats.replays == 0 and reasons(f)


def test_on_a_tape():
    f = tg.function(lambda x: tg.sum(tg.sin(x) * x))
    for k in range(3):
        x = data(6, seed=k)
        grads = []
        for g in (f, lambda x: tg.sum(tg.sin(x) * x)):
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = g(x)
            grads.append(tape.gradient(y, x).numpy())
        assert np.array_equal(*grads)
    assert f.stats.replays == 0 and reasons(f)


def test_what_is_made_on_the_device():
    def made(x):
        return x + tg.asarray(np.arange(3, dtype="float32"), device="cuda").to_device("cpu")

    f = tg.function(made)
    for k in range(3):
        x = np.full(3, float(k), "float32")
        assert np.array_equal(f(x).numpy(), x + np.arange(3, dtype="float32"))
    assert f.stats.replays == 0 and reasons(f)


def test_a_value_that_is_read_is_an_error_there_too():
    f = tg.function(lambda x: x if float(tg.sum(x)) > 0 else -x)
    with pytest.raises(tg.errors.FunctionError, match="test_function.py"):
        f(data(3))
