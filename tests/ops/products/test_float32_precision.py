"""set_float32_matmul_precision: which products round their operands, and that recipes keep what they were made with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, values

import tapegrad as tg
from tapegrad import errors
from tapegrad.core import state


@pytest.fixture(autouse=True)
def default(monkeypatch: Any) -> Iterator[None]:
    """The precision is what it was before."""
    monkeypatch.delenv("CUPY_TF32", raising=False)
    monkeypatch.setattr(state, "chosen", [state.default_precision()])
    yield


def tf32(x: np.ndarray) -> np.ndarray:
    """Rounded to 10 bits of fraction, ties away from zero, by arithmetic."""
    m, e = np.frexp(x.astype("f8"))
    return np.ldexp(np.copysign(np.floor(np.abs(m) * 2.0**11 + 0.5), m), e - 11).astype("f4")


def operands(shape_x: tuple[int, ...] = (7, 9), shape_y: tuple[int, ...] = (9, 5)) -> Any:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s).astype("f4") for s in (shape_x, shape_y))


def test_the_default_is_highest_and_other_words_are_refused(monkeypatch: Any) -> None:
    x, y = operands()
    assert tg.get_float32_matmul_precision() == "highest"
    np.testing.assert_array_equal((tg.asarray(x) @ y).numpy(), x @ y)
    for word in ("medium", "TF32", None):
        with pytest.raises(errors.DomainError, match='wanted "highest" or "high"'):
            tg.set_float32_matmul_precision(word)
    monkeypatch.setenv("CUPY_TF32", "1")
    monkeypatch.setattr(state, "chosen", [state.default_precision()])
    assert tg.get_float32_matmul_precision() == "high"
    tg.set_float32_matmul_precision("highest")
    assert tg.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "shapes",
    [((7, 9), (9, 5)), ((3, 7, 9), (9, 5)), ((3, 7, 9), (3, 9, 5)), ((9,), (9, 5)), ((2, 0), (0, 3)), ((0, 9), (9, 5))],
)
def test_high_rounds_operands_to_ten_bits_and_sums_in_float32(shapes: Any) -> None:
    x, y = operands(*shapes)
    tg.set_float32_matmul_precision("high")
    got = (tg.asarray(x) @ tg.asarray(y)).numpy()
    np.testing.assert_allclose(got, tf32(x).astype("f8") @ tf32(y).astype("f8"), rtol=1e-5, atol=1e-6)
    if got.size and x.size:
        assert np.abs(got - x @ y).max() > 1e-6, "nothing was rounded"


def test_rounding_takes_ties_away_from_zero_and_leaves_what_is_not_finite() -> None:
    tg.set_float32_matmul_precision("high")
    step = 2.0**-10
    x = np.asarray(
        [1 + step / 2, 1 + 1.5 * step, 1 + 0.49 * step, -1 - 0.51 * step, np.inf, -np.inf, np.nan, 0.0, 3e38], "f4"
    )
    got = (tg.asarray(x[:, None]) @ tg.ones((1, 1))).numpy()[:, 0]
    np.testing.assert_array_equal(got[:4], np.asarray([1 + step, 1 + 2 * step, 1, -1 - step], "f4"))
    np.testing.assert_array_equal(got[4:8], x[4:8])
    np.testing.assert_array_equal(got[8:], tf32(x[8:]))
    nan = np.asarray([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], "u4").view("f4")
    with np.errstate(invalid="ignore"):
        assert np.isnan((tg.asarray(nan[:, None]) @ tg.ones((1, 1))).numpy()).all()


def test_other_dtypes_and_other_operations_do_not_round() -> None:
    x, y = operands()
    run = lambda: (
        tg.asarray(x, dtype="float64") @ y.astype("f8"),
        tg.asarray(x, dtype="bfloat16") @ tg.asarray(y, dtype="bfloat16"),
        tg.asarray(x) * x,
        tg.arange(3) @ tg.arange(3),
    )
    before = values(run())
    tg.set_float32_matmul_precision("high")
    assert bits_equal(values(run()), before)
    with tg.autocast():
        assert bits_equal((tg.asarray(x) @ y).numpy(), before[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_round_and_so_do_their_derivatives(transposed: bool) -> None:
    f = tg.nn.functional.conv_transpose2d if transposed else tg.nn.functional.conv2d
    images, kernel = operands((2, 3, 6, 6), (3, 3, 2, 2))
    found = {}
    for forward, backward in (("highest", "high"), ("high", "highest")):
        tg.set_float32_matmul_precision(forward)
        y, pullback = tg.vjp(f, images, kernel)
        tg.set_float32_matmul_precision(backward)
        found[forward] = values((y, *pullback(tg.ones(y.shape) / 3)))
    for plain, rounded in zip(found["highest"], found["high"], strict=True):
        assert 1e-5 < np.abs(plain - rounded).max() < 1e-2 * np.abs(plain).max()
    np.testing.assert_allclose(found["high"][0], f(tf32(images), tf32(kernel)).numpy(), rtol=1e-5, atol=1e-5)


def test_it_holds_in_every_thread() -> None:
    other = threading.Thread(target=lambda: tg.set_float32_matmul_precision("high"))
    other.start(), other.join()
    x, y = operands()
    assert np.abs((tg.asarray(x) @ y).numpy() - x @ y).max() > 1e-6


def loss_and_gradient(f: Any, w: tg.Variable, x: Any, forward: str, backward: str) -> Any:
    tg.set_float32_matmul_precision(forward)
    with tg.GradientTape() as tape:
        loss = tg.sum(f(x))
    tg.set_float32_matmul_precision(backward)
    return values((loss, tape.gradient(loss, w)))


@pytest.mark.parametrize("wrap", [lambda f: f, tg.recompute_grad, lambda f: tg.recompute_grad(f, check="values")])
def test_a_derivative_and_a_rerun_have_the_precision_of_the_first_run(wrap: Any) -> None:
    x, y = operands((8, 6), (6, 6))
    w = tg.Variable(y)
    f = lambda x: tg.tanh(tg.tanh(x @ w) @ w)
    results = {}
    for forward in ("highest", "high"):
        results[forward] = loss_and_gradient(f, w, tg.asarray(x), forward, forward)
        for backward in ("highest", "high"):
            assert bits_equal(loss_and_gradient(wrap(f), w, tg.asarray(x), forward, backward), results[forward])
    assert not bits_equal(results["highest"], results["high"])


def test_loops_rerun_with_it_as_well() -> None:
    x, y = operands((8, 6), (6, 6))
    w = tg.Variable(y)
    step = lambda x: tg.tanh(x @ w)
    plain = loss_and_gradient(lambda x: step(step(step(x))), w, tg.asarray(x), "high", "highest")
    loop = lambda x: tg.checkpointed_loop(step, x, 3, snapshots=1)
    assert bits_equal(loss_and_gradient(loop, w, tg.asarray(x), "high", "highest"), plain)


def test_a_budget_makes_values_again_as_they_were() -> None:
    x, y = operands((3000, 16), (16, 16))
    w = tg.Variable(y)

    def f(x: tg.Tensor) -> tg.Tensor:
        for _ in range(8):
            x = tg.tanh(x @ w)
        return x

    with tg.measure() as m:
        plain = loss_and_gradient(f, w, tg.asarray(x), "high", "highest")
    with tg.memory_budget(int(m.peak_bytes * 0.7)), tg.measure() as less:
        assert bits_equal(loss_and_gradient(f, w, tg.asarray(x), "high", "highest"), plain)
    assert less.restored > 0


def test_forward_mode_rows_and_batches_have_it_too() -> None:
    x, y = operands((4, 6), (6, 5))
    tg.set_float32_matmul_precision("high")
    _, t = tg.jvp(lambda a: a @ tg.asarray(y), (tg.asarray(x),), (tg.asarray(x),))
    np.testing.assert_allclose(t.numpy(), tf32(x) @ tf32(y), rtol=1e-5, atol=1e-6)
    rows = tg.vmap(lambda row: row @ tg.asarray(y))(tg.asarray(x)).numpy()
    np.testing.assert_allclose(rows, tf32(x) @ tf32(y), rtol=1e-5, atol=1e-6)
    jac = tg.jacobian(lambda row: row @ tg.asarray(y))(tg.asarray(x[0])).numpy()
    np.testing.assert_array_equal(jac, tf32(y).T)


def test_a_captured_function_has_a_program_for_each() -> None:
    x, y = operands()
    f = tg.function(lambda a, b: a @ b)
    a, b = tg.asarray(x), tg.asarray(y)
    for _ in range(4):
        for precision in ("highest", "high"):
            tg.set_float32_matmul_precision(precision)
            assert bits_equal(f(a, b).numpy(), (a @ b).numpy())
    assert f.stats.traces == 2 and f.stats.replays == 4
    tg.set_float32_matmul_precision("highest")
    f.release()
    f(a, b)
    tg.set_float32_matmul_precision("high")
    assert f.explain(a, b) == "miss: the nearest signature differs in the precision of float32 products"
