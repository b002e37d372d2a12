"""By-products: a second value, of another dtype, that an operation writes where a tape keeps what its rules read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, general
from tapegrad.device.dtypes import float32
from tapegrad.ops.apply import barrier, by_product, retained
from tapegrad.tensor import Tensor


class Toy:
    """``x * sum(x)``, whose by-product is the sum, in float32; ``done``: what its functions were asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sum = general("toy_sum", impl=self._sum, infer=lambda x: x.with_shape(()).with_dtype(float32), into=True,
                           batch=lambda operands, companions, n, params: None)  # fmt: skip
        self.scaled = general(
            "toy_scaled",
            impl=self._run,
            infer=lambda x, *sums: x,
            beside=self.sum,
            vjp=[self._pull],
            into=True,
        )

    def _sum(self, xp: Any, x: Any, *, out: Any) -> None:
        self.done.append("sum")
        out[...] = xp.sum(x, dtype=out.dtype)

    def _run(self, xp: Any, x: Any, *, out: Any, beside: Any = None) -> None:
        self.done.append("scaled" if beside is None else "both")
        total = xp.sum(x, dtype=np.float32)
        out[...] = x * total
        if beside is not None:
            beside[...] = total

    @staticmethod
    def _pull(ct: Tensor, x: Tensor, *sums: Tensor) -> Tensor:
        (total,) = sums
        assert total.dtype == float32
        return ct * total + tg.sum(ct * x)

    def __call__(self, x: Tensor) -> Tensor:
        sums = (by_product(self.sum, x),) if retained(x) else ()
        return barrier(self.scaled, x, *sums)


@pytest.fixture
def toy() -> Iterator[Toy]:
    made = Toy()
    yield made
    for name in ("toy_sum", "toy_scaled"):
        del REGISTRY[name]


def operand() -> Tensor:
    return tg.asarray(np.arange(1, 5, dtype=np.float16))


def gradient(f: Any, x: Tensor) -> np.ndarray:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x).numpy()


WANTED = [20.0, 20.0, 20.0, 20.0]


def test_it_is_written_beside_the_result_where_a_tape_keeps_it(toy: Toy) -> None:
    assert gradient(toy, operand()).tolist() == WANTED
    assert toy.done == ["both"]


def test_it_is_not_written_where_no_tape_keeps_it(toy: Toy) -> None:
    x = operand()
    toy(x)
    with tg.GradientTape():
        toy(x)  # nobody watches it
    assert toy.done == ["scaled", "scaled"]


def test_it_has_a_recipe_of_its_own(toy: Toy) -> None:
    """Read before the operation it is made alone, and the operation does not write it again."""
    x = operand()
    with tg.GradientTape() as tape:
        tape.watch(x)
        total = by_product(toy.sum, x)
        assert total.numpy() == 10
        y = barrier(toy.scaled, x, total)
    assert tape.gradient(y, x).numpy().tolist() == WANTED
    assert toy.done == ["sum", "scaled"]


def test_its_derivative_is_asked_of_the_operation_alone(toy: Toy) -> None:
    """Forward mode and other tapes see a constant."""
    x = operand()
    with tg.GradientTape() as tape:
        tape.watch(x)
        total = by_product(toy.sum, x)
    assert tape.gradient(total, x) is None


def test_reruns_write_both_at_once_if_both_are_read(toy: Toy) -> None:
    assert gradient(tg.recompute_grad(toy), operand()).tolist() == WANTED
    assert toy.done == ["scaled", "sum"]
    square = lambda x: toy(x) ** 2
    toy.done.clear()
    assert gradient(tg.recompute_grad(square), operand()).tolist() == gradient(square, operand()).tolist()
    assert toy.done == ["scaled", "both", "both"]


def test_a_budget_recomputes_both_at_once(toy: Toy) -> None:
    """Both were dropped where something else needed their bytes, and the rule of the square reads both."""
    x, large = operand(), tg.asarray(np.ones(20_000))
    expected = gradient(lambda x: toy(x) ** 2, x)
    toy.done.clear()
    with tg.measure() as m:
        limit = m.live_bytes + 160_256 + 512  # the running sums, and z
    with tg.memory_budget(limit) as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = toy(x)
        z = tg.sum(y * y)
        del y
        tg.cumulative_sum(large)
        assert m.evictions == 2
        assert tape.gradient(z, x).numpy().tolist() == expected.tolist()
    assert toy.done == ["both", "both"] and m.restored == 2


def test_captured_steps(toy: Toy) -> None:
    step = tg.function(lambda x: gradient_of(toy, x))
    for _ in range(3):
        assert step(operand()).numpy().tolist() == WANTED
    assert set(toy.done) == {"both"}
    assert step.stats.replays > 0


def gradient_of(f: Any, x: Tensor) -> Tensor:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x)


def test_gradients_inside_vmap_have_the_by_product_of_each_example(toy: Toy) -> None:
    x = tg.asarray(np.arange(1, 9, dtype=np.float16).reshape(2, 4))
    found = tg.vmap(lambda row: gradient_of(toy, row))(x).numpy()
    for row, want in zip(x.numpy(), found, strict=True):
        np.testing.assert_array_equal(gradient(toy, tg.asarray(row)), want)


def test_a_dry_run_counts_both(toy: Toy) -> None:
    x = operand()
    f = lambda: gradient_of(toy, x)
    predicted = tg.memory.predict_peak(f)
    with tg.measure() as m:
        f()
    assert getattr(predicted, "peak_bytes", predicted) == m.peak_bytes
