"""NumPy arrays as operands: one copy of each array and content, whoever uses it, for as long as something needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

N = 100_000
DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda a: a,
    "rows": lambda a: a[::2],
    "columns": lambda a: a[:, ::3],
    "transposed": lambda a: a.T,
    "backwards": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "with an axis": lambda a: a[None],
    "Fortran": lambda a: np.asfortranarray(a),
}


def step(raw: Any, times: int = 20) -> tg.Tensor:
    x = tg.asarray(np.ones(N))
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(times):
            h = tg.sin(h * raw)
        y = tg.sum(h)
    return tape.gradient(y, x)


def peak(f: Callable[[], object]) -> int:
    with tg.measure() as m:
        f()
    return m.peak_bytes


def added(f: Callable[[], object]) -> int:
    """Bytes alive because of what ``f`` returns or keeps."""
    with tg.measure() as m:
        before = m.live_bytes
        result = f()
        after = m.live_bytes
    del result
    return after - before


def test_many_uses_of_an_array_take_the_bytes_of_one(rng: np.random.Generator) -> None:
    raw = rng.normal(size=N)
    whole = peak(lambda: step(tg.asarray(raw)))
    assert peak(lambda: step(raw)) == whole
    assert peak(lambda: step(raw[None])) == whole  # a view of its own at each call
    assert tg.memory.predict_peak(lambda: step(raw)).peak_bytes == whole
    np.testing.assert_array_equal(step(raw).numpy(), step(tg.asarray(raw)).numpy())


def test_a_budget_is_kept_with_arrays_as_with_tensors(rng: np.random.Generator) -> None:
    raw = rng.normal(size=N)
    free = step(raw).numpy(copy=True)
    for operand in (raw, tg.asarray(raw)):
        with tg.memory_budget(6 * 8 * N + 4096):
            np.testing.assert_array_equal(step(operand).numpy(), free)


def test_what_changes_between_two_uses_is_two_values(rng: np.random.Generator) -> None:
    x, raw = tg.asarray(rng.normal(size=N)), rng.normal(size=N)
    before = raw.copy()
    with tg.GradientTape() as tape:
        tape.watch(x)
        first = x * raw
        raw[-1] += 1.0
        y = tg.sum(first) + tg.sum(x * raw)
    np.testing.assert_array_equal(tape.gradient(y, x).numpy(), before + raw)


def test_a_prediction_notices_what_changes_between_two_uses(rng: np.random.Generator) -> None:
    x, raw = tg.asarray(rng.normal(size=N)), rng.normal(size=N)

    def changing(by: float) -> tg.Tensor:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = 0.0
            for _ in range(4):
                y = y + tg.sum(x * raw)
                raw[0] += by
        return tape.gradient(y, x)

    for by, copies in ((0.0, 1), (1.0, 4)):
        measured = peak(lambda by=by: changing(by))
        assert tg.memory.predict_peak(lambda by=by: changing(by)).peak_bytes == measured
        assert measured >= (copies + 1) * raw.nbytes


def test_bits_decide_not_values() -> None:
    zeros = np.zeros(N)
    x = tg.asarray(np.ones(N))
    kept = x * zeros
    zeros *= -1.0
    assert np.signbit((x * zeros).numpy()).all() and not np.signbit(kept.numpy()).any()
    nans = np.full(N, np.nan)
    assert added(lambda: [tg.asarray(nans) for _ in range(5)]) < 2 * nans.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_dtype_and_layout_is_shared_and_told_from_a_changed_one(
    dtype: str, view: str, rng: np.random.Generator
) -> None:
    array = (rng.normal(size=(512, 300)) * 10.0).astype(dtype)
    part = VIEWS[view](array)
    first = tg.asarray(part)
    tensors: list[tg.Tensor] = []
    assert added(lambda: tensors.extend(tg.asarray(part) for _ in range(3))) == 0
    old = part.copy()
    target = part if part.flags.writeable else array
    target[(0,) * target.ndim] = not target[(0,) * target.ndim] if dtype == "?" else target[(0,) * target.ndim] + 1
    np.testing.assert_array_equal(tg.asarray(part).numpy(), part)
    for t in (first, *tensors):
        np.testing.assert_array_equal(t.numpy(), old)


@pytest.mark.parametrize(
    "make", [tg.asarray, tg.squeeze, tg.transpose, lambda a: tg.reshape(a, a.shape), lambda a: tg.broadcast_to(a, (N,))]
)
@pytest.mark.parametrize("used_before", [False, True])
def test_an_array_is_a_constant_though_a_tensor_made_of_it_is_watched(
    make: Any, used_before: bool, rng: np.random.Generator
) -> None:
    raw = rng.normal(size=N)
    kept = tg.asarray(1.0) * raw if used_before else None
    t = make(raw)
    with tg.GradientTape() as tape:
        tape.watch(t)
        y = tg.sum(t * raw) + tg.sum(tg.multiply(raw, raw)) + tg.sum(tg.asarray(raw) ** 2)
    np.testing.assert_array_equal(tape.gradient(y, t).numpy(), raw)
    with tg.ForwardAccumulator(t, np.ones(N)) as accumulator:
        y = tg.sum(t * raw) + tg.sum(tg.multiply(raw, raw))
    np.testing.assert_allclose(accumulator.jvp(y).numpy(), raw.sum(), rtol=1e-9)
    np.testing.assert_array_equal(tg.grad(lambda x: tg.sum(x * raw) + tg.sum(tg.square(raw)))(t).numpy(), raw)
    del kept


def test_a_variable_made_of_an_array_changes_alone(rng: np.random.Generator) -> None:
    raw = rng.normal(size=N)
    old = raw.copy()
    variables = [tg.Variable(raw), tg.Variable(tg.asarray(raw))]
    optimizer = tg.optim.SGD(0.5)
    for _ in range(3):
        with tg.GradientTape() as tape:
            loss = tg.sum(variables[0] * raw) + tg.sum(variables[1] * raw)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    for v in variables:
        np.testing.assert_allclose(v.numpy(), old - 1.5 * old, rtol=1e-12)
    np.testing.assert_array_equal(raw, old)
    np.testing.assert_array_equal(tg.asarray(raw).numpy(), old)


def test_a_captured_function_a_checkpoint_and_a_batch_use_arrays(rng: np.random.Generator) -> None:
    raw, x = rng.normal(size=N), rng.normal(size=N)
    f = lambda x: tg.sum(tg.sin(x * raw) * raw)
    expected = np.cos(x * raw) * raw**2
    for g in (f, tg.function(f), tg.recompute_grad(f)):
        for _ in range(3):
            np.testing.assert_allclose(tg.grad(g)(x).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(tg.vmap(f)(np.stack([x, x])).numpy(), [f(x).item()] * 2, rtol=1e-12)


def test_nothing_is_kept_for_a_later_use(rng: np.random.Generator) -> None:
    raw = rng.normal(size=N)
    x = tg.asarray(np.ones(N))
    assert added(lambda: (x * raw).numpy().sum()) == 0


def test_threads_use_arrays_that_change() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        raw, one = np.random.default_rng(seed).normal(size=5000), tg.ones(5000, dtype="float64")
        for i in range(100):
            if not np.array_equal((one * raw).numpy(), raw):
                wrong.append(i)
            raw[i] = i

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
