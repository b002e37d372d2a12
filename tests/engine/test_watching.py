"""Watching changes nothing: in a measure and in a budget that does not bind the same kernels run as outside of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from cuda_cases import installed

import tapegrad as tg

WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "measured": tg.measure,
    "measured with times": lambda: tg.measure(timeline=True),
    "in a budget": lambda: tg.memory_budget("1GiB"),
}


def of_channels(x: Any, w: Any, b: Any) -> Any:
    """Views of sums: the gradients of ``w`` and ``b`` wait for that of ``x``."""
    return tg.tanh(x * tg.reshape(w, (1, 8, 1)) + tg.reshape(b, (1, -1, 1)))


def of_columns(x: Any, w: Any, b: Any) -> Any:
    """Views of views of sums, and a view of a value that waits."""
    turned = tg.permute_dims(tg.reshape(tg.reshape(w, (8, 1)), (1, 8, 1)), (2, 1, 0))
    return tg.real(x * turned) * tg.reshape(b, (8, 1))


FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a chain": lambda x, w, b: tg.exp(tg.sin(x) * 2.0) + x,
    "channels": of_channels,
    "columns": of_columns,
    "rows": lambda x, w, b: x[:, :, :8] * w + b,
    "means": lambda x, w, b: (x - tg.mean(x, axis=1, keepdims=True)) * tg.reshape(w, (8, 1)),
    "a softmax": lambda x, w, b: tg.softmax(x) * tg.reshape(b, (8, 1)),
    "products": lambda x, w, b: tg.relu(x[0].mT @ tg.reshape(w, (8, 1)) + b),
    "slices": lambda x, w, b: tg.concat([x[:, ::2], x[:, 1::2]], axis=1) * 3.0,
    "a view of a sum": lambda x, w, b: tg.reshape(tg.sum(x, axis=2), (8, 4)) * 2.0 + tg.sum(x * w[0]),
}


KERNELS = {
    "a chain": (2, 1), "channels": (2, 1), "columns": (2, 1), "rows": (7, 3), "means": (7, 4), "a softmax": (4, 4),
    "products": (10, 7), "slices": (6, 6), "a view of a sum": (9, 8),
}  # fmt: skip
"""The most kernels that each runs with its gradients, on the CPU and on CUDA."""


@pytest.fixture(params=["cpu", "cuda"])
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device: of CUDA the stand-in for CuPy (skips the test where its kernels cannot be compiled)."""
    with installed() if request.param == "cuda" else nullcontext(), tg.device(request.param):
        yield request.param


@pytest.mark.parametrize("what", FUNCTIONS)
def test_the_same_kernels_run(what: str, on: str) -> None:
    """No more than written down here; the bits are those of a run that nobody watches."""
    rng = np.random.default_rng(7)
    data = rng.standard_normal((4, 8, 2000)), rng.standard_normal(8), rng.standard_normal(8)

    def gradients() -> list[Any]:
        x, w, b = map(tg.asarray, data)
        with tg.GradientTape() as tape:
            tape.watch([x, w, b])
            y = FUNCTIONS[what](x, w, b)
        found = tape.gradient(y, [x, w, b], unconnected_gradients="zero")
        return [t.numpy() for t in (y, *found)]

    plain, counts = gradients(), []
    for way in WAYS.values():
        with way(), tg.measure() as m:
            assert all(map(np.array_equal, gradients(), plain))
        counts.append((m.kernel_runs, m.bytes_moved, m.nodes_run))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0] <= KERNELS[what][on == "cuda"]
