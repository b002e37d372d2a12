"""Operations of each kind, captured: replays on other values give the bits of eager runs; and dry runs of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cuda_cases import installed

import tapegrad as tg

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a ufunc": lambda x: -x,
    "one that writes into an array": lambda x: tg.nn.functional.relu(x),
    "a chain": lambda x: tg.exp(x * 2.0) + tg.nn.functional.relu(x),
    "a comparison": lambda x: x < 0.5,
    "a sum of a chain": lambda x: tg.sum(tg.sin(x) * x, axis=0),
    "a sum in a wider type": lambda x: tg.sum(tg.astype(tg.concat([x] * 100, axis=1), "float16"), axis=1),
    "a reduction that keeps its axis": lambda x: tg.max(x, axis=1, keepdims=True),
    "a product": lambda x: tg.matmul(x, x.T),
    "a function that writes": lambda x: tg.concat([x, x], axis=1),
    "a function that returns": lambda x: tg.sort(x, axis=0),
    "several parts": lambda x: tg.cumulative_sum(x, axis=0),
    "indices": lambda x: tg.argmax(x, axis=0),
    "some rows": lambda x: tg.take(x, [2, 0, 2], axis=0),
    "rows that are added": lambda x: tg.grad(lambda u: tg.sum(tg.take(u, [2, 0, 2], axis=0) ** 2))(x),
    "a norm": lambda x: tg.softmax(x, axis=0),
    "a solution": lambda x: tg.linalg.solve(x @ x.T + 3.0 * np.eye(x.shape[0], dtype="float32"), x),
    "created": lambda x: tg.ones((2, 3)) + tg.arange(3) + tg.eye(3)[:2] + tg.sum(x),
    "drawn": lambda x: tg.random.normal((4,), generator=tg.random.Generator(3)) * tg.sum(x),
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x,
    "columns": lambda x: tg.permute_dims(x, (1, 0)),
    "gaps": lambda x: x[:, ::2],
}


@pytest.fixture(params=["cpu", "cuda"])
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device: of CUDA the stand-in for CuPy (skips the test where its kernels cannot be compiled)."""
    with installed() if request.param == "cuda" else nullcontext(), tg.device(request.param):
        yield request.param


@pytest.mark.parametrize("what", OPERATIONS)
def test_replays_give_the_bits_of_eager_runs(what: str, on: str) -> None:
    """Small values, those from the size on from which arrays are pooled, and lazy ones, however they are laid out."""
    rng = np.random.default_rng(0)
    for layout, side in (("rows", 4), ("columns", 40), ("gaps", 150) if on == "cpu" else ("gaps", 6)):
        f = lambda x, layout=layout: OPERATIONS[what](LAYOUTS[layout](x))
        captured = tg.function(f)
        for _ in range(4):
            x = tg.asarray(rng.normal(size=(side, side)).astype(np.float32))
            assert captured(x).numpy().tobytes() == f(x).numpy().tobytes(), layout
        assert captured.stats.replays


def test_a_dry_run_is_recorded_and_differentiated_as_the_real_one() -> None:
    x = tg.asarray(np.linspace(-1, 1, 5))

    def step() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.tanh(x) * x)
        return tape.gradient(y, x).shape

    found = tg.memory.predict_peak(step, least=False)
    with tg.measure() as m:
        assert step() == (5,)
    assert (found.peak_bytes, found.kernel_runs) == (m.peak_bytes, m.kernel_runs)


def test_an_earlier_value_that_a_dry_run_is_the_first_to_read_is_computed_and_stays() -> None:
    x = tg.asarray(np.linspace(-1, 1, 250_000).reshape(500, -1))
    pending, expected = tg.tanh(x), tg.tanh(x).numpy()
    tg.memory.predict_peak(lambda: pending @ pending, least=False)
    with tg.measure() as m:
        assert np.array_equal(pending.numpy(), expected)
    assert m.kernel_runs == 0


def test_what_a_gather_reads_is_no_more_than_it_writes_and_no_more_than_there_is() -> None:
    x, every = tg.asarray(np.arange(8.0)), tg.asarray(np.arange(1000) % 8)

    def moved(operand: Any, rows: Any) -> int:
        with tg.measure() as m:
            tg.take(operand, rows, axis=0)
        return m.bytes_moved

    assert moved(x, every[:2]) == 2 * 8 + 2 * 8 + 2 * 8
    assert moved(x, every) == 8 * 8 + 8000 + 8000
    assert moved(tg.broadcast_to(x, (2, 8)), every[:2]) == 8 * 8 + 2 * 8 + 16 * 8  # which lies there once
