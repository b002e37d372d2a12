"""Gradients of some rows alone on a device: the CPU's bits, as few bytes, no waiting, and no value held changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rows_cases import captured_by_turns, training
from waiting import never_waits

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.device import asdevice
from tapegrad.ops import row_updates, updates

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(0.1),
    "adagrad": lambda: optim.Adagrad(0.1),
    "adam": lambda: optim.LazyAdam(0.1, global_clipnorm=3.0),
    "adamw": lambda: optim.LazyAdamW(0.1, 0.5),
    "momentum": lambda: optim.LazySGD(0.1, 0.9),
}
ROWS = [[3, 1, 3], [0], [], [5, 5, 5, 2]]


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The first CUDA device; the default is the CPU's, so that what runs on the device was asked to."""
    with tg.device("cpu"):
        yield asdevice("cuda")


def table(device: Any, shape: tuple[int, ...], dtype: str) -> tg.Variable:
    x = np.random.default_rng(5).normal(size=shape).astype("float32")
    return tg.Variable(tg.astype(tg.asarray(x, device=device), dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(40, 16), (40, 33), (600,)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_cpu(cuda: Any, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """To the bit, but for clipping, whose norm is a sum in another order."""
    found = []
    for device in ("cpu", cuda):
        v, optimizer = table(device, shape, dtype), OPTIMIZERS[name]()
        for at in ROWS:
            with tg.GradientTape() as tape:
                rows = tg.take(v, tg.asarray(np.array(at, np.int64), device=device), axis=0, sparse_grad=True)
                loss = tg.sum(rows * rows * rows)
            g = tape.gradient(loss, v)
            assert type(g) is tg.IndexedSlices and g.device is v.device
            optimizer.apply([g], [v])
        found.append([x.numpy() for x in (v, *optimizer.variables)])
    for a, b in zip(*found, strict=True):
        if name == "adam":
            np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=1e-5 if dtype[-2:] != "16" else 3e-2)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wrap", [lambda f: f, tg.function], ids=["eager", "captured"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_rows_cost_two_rows(cuda: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Within a captured step from when nobody else holds what the variables hold."""
    v, at = table(cuda, (20_000, 64), "float32"), tg.asarray([3, 7], device=cuda)
    step = wrap(training(v, OPTIMIZERS[name]()))
    for _ in range(5):
        step(at)
    with tg.measure() as m:
        before = m.live_bytes
        step(at)
    assert m.peak_bytes - before < 60 * 512 < v.nbytes / 100
    assert m.bytes_moved < 40 * 2 * 64 * 4


UPDATES: dict[str, tuple[Any, int]] = {
    "sgd": (updates.sgd_formula(0.1), 1),
    "adagrad": (updates.adagrad_formula(0.1, 1e-7), 2),
    "momentum": (updates.momentum_formula(0.1, 0.9), 2),
    "adam": (updates.adam_formula(0.1, 0.9, 0.999, 1e-7), 3),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_is_one_kernel_that_moves_the_rows(cuda: Any, name: str) -> None:
    """Each row of each table is read and written once, the gradient and the numbers of the rows are read."""
    formula, count = UPDATES[name]
    tables = [table(cuda, (20_000, 64), "float32") for _ in range(count)]
    rows, g = tg.asarray([3, -1, 7], device=cuda), table(cuda, (3, 64), "float32").value()
    for _ in range(2):  # the first time tables may be copied
        row_updates.update_rows(formula, tables, rows, g, 0.5)
    with tg.measure() as m:
        before = m.live_bytes
        row_updates.update_rows(formula, tables, rows, g, 0.5)
    assert (m.kernel_runs, m.bytes_moved) == (1, (1 + 2 * count) * g.nbytes + rows.nbytes)
    assert m.peak_bytes == before and m.allocated_bytes == 0


def test_a_value_that_is_held_does_not_change(cuda: Any) -> None:
    v = table(cuda, (400, 16), "float32")
    g = tg.IndexedSlices(
        tg.asarray(np.ones((2, 16), np.float32), device=cuda), tg.asarray([1, 3], device=cuda), v.shape
    )
    for hold in (lambda: v.value(), lambda: v[1:4], lambda: v * 2.0, lambda: tg.Variable(v)):
        optim.SGD(0.5).apply([g], [v])
        before, wanted = v.numpy(), hold().numpy()
        held = hold()
        optim.SGD(0.5).apply([g], [v])
        np.testing.assert_array_equal(held.numpy(), wanted)
        np.testing.assert_array_equal(v.numpy()[[1, 3]], before[[1, 3]] - 0.5)
        del held


def test_a_step_never_waits_for_the_device(cuda: Any) -> None:
    with tg.device(cuda):
        layer, optimizer = nn.Embedding(500, 16, sparse=True), optim.LazyAdam(0.1, global_clipnorm=10.0)
        at = tg.asarray(np.arange(64) % 7)

        def step() -> None:
            with tg.GradientTape() as tape:
                loss = tg.sum(layer(at) ** 2)
            optimizer.apply([tape.gradient(loss, layer.embeddings)], [layer.embeddings])

        for _ in range(2):  # kernels are compiled and loaded, which may wait
            step()
        with never_waits(cuda.xp):
            for _ in range(3):
                step()


def test_captured_steps_have_the_same_bits(cuda: Any) -> None:
    """By turns with eager ones, which write in place where the program has written."""
    with tg.device(cuda):
        run = lambda captured: captured_by_turns(table(cuda, (600, 16), "float32"), optim.LazyAdam(0.1), captured)
        for a, b in zip(run(False), run(True), strict=True):
            np.testing.assert_array_equal(a, b)
