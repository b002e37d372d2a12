"""Half precision on a device: autocast beside the CPU, loss scaling without waiting, masters; eager and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from waiting import never_waits

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.device import CPU, asdevice

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The first CUDA device; the default is the CPU's."""
    pytest.importorskip("cupy")
    with tg.device("cpu"):
        yield asdevice("cuda")


def trained(device: Any, half: str, wrap: Callable[[Any], Any] = lambda f: f, steps: int = 8, dtype: str = "float32"):
    """Losses, scales and the weights of a small training."""
    with tg.device(device):
        tg.random.seed(0)
        model = nn.Sequential([nn.Dense(32, activation="gelu", dtype=dtype), nn.LayerNormalization(), nn.Dense(8)])
        x = tg.asarray(np.random.default_rng(0).normal(size=(16, 24)).astype("f4"))
        labels = tg.asarray(np.arange(16) % 8)
        scaler = tg.optim.LossScaler(tg.optim.Adam(1e-2), 2.0**18, growth_interval=2)

        @wrap
        def step() -> Any:
            with tg.GradientTape() as tape:
                with tg.autocast(half):
                    loss = nn.functional.cross_entropy(model(x), labels)
                scaled = scaler.scale(loss)
            variables = model.trainable_variables
            scaler.apply_gradients(zip(tape.gradient(scaled, variables), variables))
            return loss, scaler.current_scale

        told = [[t.item() for t in step()] for _ in range(steps)]
        return told, [v.numpy() for v in (*model.variables, *scaler.optimizer.variables)]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_training_under_autocast_follows_the_cpu(half, cuda):
    with np.errstate(over="ignore", invalid="ignore"):  # where gradients are cast to float16, and summed
        (told, _), (wanted, _) = trained(cuda, half), trained(CPU, half)
    np.testing.assert_allclose([loss for loss, _ in told], [loss for loss, _ in wanted], rtol=2e-2)
    assert told[-1][0] < told[0][0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_captured_steps_have_the_bits_of_eager_ones(half, dtype, cuda):
    eager, captured = trained(cuda, half, dtype=dtype), trained(cuda, half, tg.function, dtype=dtype)
    assert eager[0] == captured[0]
    for a, b in zip(eager[1], captured[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_scaled_step_never_waits_for_the_device(cuda):
    with tg.device(cuda):
        v = tg.Variable(tg.ones((64, 64)))
        scaler = tg.optim.LossScaler(tg.optim.AdamW(1e-2, global_clipnorm=1.0), 2.0**40)

        def step() -> None:
            with tg.GradientTape() as tape:
                with tg.autocast("float16"):
                    loss = tg.mean(tg.square(v @ v))
                scaled = scaler.scale(loss)
            scaler.apply_gradients([(tape.gradient(scaled, v), v)])

        for _ in range(2):  # kernels are compiled and loaded, which may wait
            step()
        with never_waits(cuda.xp):
            for _ in range(5):
                step()
        assert scaler.skipped.item() > 0


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW, optim.RMSprop, optim.Lion], ids=lambda make: make.__name__)
def test_steps_of_half_variables_are_those_of_the_cpu(cuda: Any, make: Callable[[float], Any], half: str) -> None:
    """To the bit, eager and captured; gradients are half, and somebody assigns a value between the steps."""

    def run(device: Any, wrap: Callable[[Any], Any]) -> list[Any]:
        with tg.device(device):
            rng, optimizer = np.random.default_rng(0), make(0.01)
            variables = [tg.Variable(tg.astype(rng.normal(size=n).astype("f4"), half)) for n in (7, 3000)]
            step = wrap(lambda *gs: optimizer.apply(gs, variables))
            for k in range(6):
                step(*(tg.astype(rng.normal(size=v.size).astype("f4"), half) for v in variables))
                if k == 3:
                    variables[0].assign(tg.ones(7, dtype=half))
            return [x.numpy() for x in (*variables, *optimizer.variables)]

    wanted = run(CPU, lambda f: f)
    for wrap in (lambda f: f, tg.function):
        for a, b in zip(run(cuda, wrap), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
