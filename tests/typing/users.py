"""Programs as users write them: ``mypy --strict`` accepts them and knows their types (see tests/test_typing.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_type

import numpy as np

import tapegrad as tg

# Variables and tensors


def arithmetic(w: tg.Variable, x: tg.Tensor) -> None:
    assert_type(w * 2, tg.Tensor)
    assert_type(2.0 - w, tg.Tensor)
    assert_type(w + w, tg.Tensor)
    assert_type(w @ x, tg.Tensor)
    assert_type(-w, tg.Tensor)
    assert_type(abs(w) ** 2 / x, tg.Tensor)
    assert_type(w > 0, tg.Tensor)
    assert_type(w[0], tg.Tensor)
    assert_type(w[:, None], tg.Tensor)
    assert_type(w.T, tg.Tensor)
    assert_type(w.sum(axis=0), tg.Tensor)
    assert_type(w.reshape(3, -1).mean(), tg.Tensor)
    assert_type(x.sum(0, keepdims=True), tg.Tensor)
    assert_type(x.astype(dtype="float32").repeat(repeats=2), tg.Tensor)
    assert_type(x.max() - x.std(), tg.Tensor)
    assert_type(list(w), list[tg.Tensor])
    assert_type(w.shape, tuple[int, ...])
    assert_type(float(w[0, 0]), float)
    w.assign_sub(0.1 * x)
    tg.take(x, indices=[0], axis=0)
    tg.moveaxis(x, source=0, destination=1)
    tg.eye(2, M=3)


# A training step


class Net(tg.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = tg.nn.Dense(16, activation="relu")
        self.out = tg.nn.Dense(1)

    def call(self, inputs: tg.Tensor, training: bool = False) -> tg.Tensor:
        return self.out(tg.nn.functional.dropout(self.hidden(inputs), 0.1, training=training))


model = tg.nn.Sequential([tg.nn.Dense(8, activation="tanh"), tg.nn.Dense(1)])
optimizer = tg.optim.Adam(1e-3)


@tg.function
def train_step(x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
    with tg.GradientTape() as tape:
        loss = tg.mean((model(x, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert_type(gradients, list[tg.Tensor])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


def training(x: tg.Tensor) -> None:
    assert_type(model(x), tg.Tensor)
    assert_type(Net()(x), tg.Tensor)
    assert_type(train_step(x, x), tg.Tensor)
    loader = tg.training.DataLoader((np.ones((8, 2)), np.ones(8)), batch_size=4, shuffle=True)
    for a, b in loader:
        train_step(a, b)


# Gradients


def descend(w: tg.Variable) -> None:
    with tg.GradientTape(persistent=True) as tape:
        loss = tg.sum(w**2)
    assert_type(tape.gradient(loss, w), tg.Tensor)
    assert_type(tape.gradient(loss, {"w": w}), dict[str, tg.Tensor])
    assert_type(tape.gradient(loss, (w, w)), tuple[tg.Tensor, ...])
    w.assign_sub(0.1 * tape.gradient(loss, w))


def energy(x: tg.Tensor, scale: float = 1.0) -> tg.Tensor:
    return tg.sum(x * x) * scale


def transforms(x: tg.Tensor) -> None:
    tg.grad(energy)(x, scale=2.0)
    value, slope = tg.value_and_grad(energy)(x)
    assert_type(value, tg.Tensor)
    y, pull = tg.vjp(energy, x)
    assert_type(y, tg.Tensor)
    (ct,) = pull(tg.ones_like(y))
    assert_type(tg.jvp(energy, (x,), (x,)), tuple[tg.Tensor, tg.Tensor])
    assert_type(tg.vmap(energy)(x, scale=2.0), tg.Tensor)
    tg.hessian(energy)(x)


# Memory


@tg.recompute_grad
def block(x: tg.Tensor, scale: float = 1.0) -> tg.Tensor:
    return tg.tanh(x) * scale


@tg.recompute_grad(check="values")
def checked(x: tg.Tensor, *, power: int = 2) -> tg.Tensor:
    return x**power


@tg.custom_gradient
def clipped(x: tg.Tensor) -> tuple[tg.Tensor, Callable[[tg.Tensor], tg.Tensor]]:
    return x, lambda ct: tg.clip(ct, -1, 1)


def memory(x: tg.Tensor) -> None:
    assert_type(block(x, scale=2.0), tg.Tensor)
    assert_type(checked(x, power=3), tg.Tensor)
    assert_type(clipped(x), tg.Tensor)
    assert_type(tg.stop_gradient(x), tg.Tensor)
    with tg.memory_budget("1GiB"), tg.measure() as m:
        block(x)
    assert_type(m.peak_bytes, int)
