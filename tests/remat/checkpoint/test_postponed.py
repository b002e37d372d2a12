"""A rerun runs the whole function, and computes what a rule, or Python, reads: counted, with the plain bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

RNG = np.random.default_rng(5)
SIZES = (6, 160)
"""Of small matrices, which run at once, and of lazy ones."""


def matrices(n: int) -> list[tg.Tensor]:
    return [tg.asarray(RNG.standard_normal((n, n)) / n**0.5) for _ in range(4)]


def backward(f: Callable, inputs: list[tg.Tensor]) -> tuple[list[np.ndarray], Any, Any]:
    """Gradients of a sum of squares, the work of the backward walk, and the result's measure of the forward one."""
    with tg.measure() as forward, tg.GradientTape() as tape:
        tape.watch(inputs)
        loss = tg.sum(f(*inputs) ** 2)
    with tg.measure() as m:
        found = tape.gradient(loss, inputs, unconnected_gradients="zero")
    return [g.numpy(copy=True) for g in found], m, forward


# name: (function, products in a rerun's backward walk)
PROGRAMS: dict[str, tuple[Callable, int]] = {
    "the last product is read by nobody": (lambda h, w, v, b: tg.tanh(h @ w) @ v, 5),
    "nor what is made of it": (lambda h, w, v, b: h + (tg.tanh(h @ w) @ v + b), 5),
    "views of it": (lambda h, w, v, b: tg.reshape((tg.tanh(h @ w) @ v).T, (-1,)), 5),
    "a reduction of it": (lambda h, w, v, b: tg.sum(tg.tanh(h @ w) @ v, axis=0) * 3, 5),
    "a concatenation with it": (lambda h, w, v, b: tg.concat([tg.tanh(h @ w) @ v, h]), 5),
    "two of them": (lambda h, w, v, b: (tg.tanh(h @ w) @ v) + (h @ b), 7),
    "it is read by a rule": (lambda h, w, v, b: tg.exp(tg.tanh(h @ w) @ v), 6),
    "its softmax is": (lambda h, w, v, b: tg.softmax(h @ w) @ v, 5),
    "a dead branch": (lambda h, w, v, b: (h @ b @ b @ b, tg.tanh(h @ w) @ v)[1], 5),
    "one product, and its input is the argument": (lambda h, w, v, b: h @ w, 2),
    "a scan": (lambda h, w, v, b: tg.scan(lambda s, x: (tg.tanh(s @ w), x), h, b[:3])[0] @ v, 11),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_a_rerun(name: str, n: int) -> None:
    f, products = PROGRAMS[name]
    inputs = matrices(n)
    plain, _, _ = backward(f, inputs)
    found, m, _ = backward(tg.recompute_grad(f), inputs)
    assert m.reruns == 1 and m.nodes_run["matmul"] == products
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("f", "made"), [(lambda h, w, v: tg.softmax(h @ w) @ v, 1), (lambda h, w, v: tg.softmax(h @ w) + h, 2)]
)
def test_what_a_rule_will_read_is_made_in_the_rerun(f: Callable, made: int) -> None:
    """There it counts as recomputed, not as a part of the walk."""
    h, w, v, _ = matrices(160)
    with tg.GradientTape() as tape:
        tape.watch(h)
        y = tg.sum(tg.recompute_grad(f)(h, w, v))
    with tg.measure() as m:
        tape.gradient(y, h)
    assert m.peak_by_category["rematerialized"] == made * h.nbytes


def test_where_another_tape_records_nothing_waits() -> None:
    h, w, v, _ = matrices(6)
    with tg.GradientTape(), tg.GradientTape() as tape:
        tape.watch(h)
        y = tg.sum(tg.recompute_grad(lambda h: tg.tanh(h @ w) @ v)(h))
        with tg.measure() as m:
            tape.gradient(y, h)
    assert m.nodes_run["matmul"] == 2 + 2


@pytest.mark.parametrize("n", SIZES)
def test_what_python_reads_is_computed(n: int) -> None:
    h, w, v, _ = matrices(n)
    read = []

    def f(h: tg.Tensor) -> tg.Tensor:
        y = tg.tanh(h @ w) @ v
        read.append((float(tg.sum(y)), y.numpy(copy=True), bool(tg.any(y > 0)), str(y[0, 0])))
        return y * 2 if tg.max(y) < 1e9 else y

    plain, _, _ = backward(f, [h])
    found, m, _ = backward(tg.recompute_grad(f), [h])
    np.testing.assert_array_equal(plain[0], found[0])
    first, again = read[1:]
    assert first[0] == again[0] and first[2:] == again[2:] and np.array_equal(first[1], again[1])
    assert m.nodes_run["matmul"] == 2 + 2  # the second product is read, too


def test_a_users_function_is_called() -> None:
    calls = []

    @tg.primitive
    def told(x: Any) -> Any:
        calls.append(x.shape)
        return x * 2

    told.defvjp(lambda ct, x: ct * 2)
    h, w, _, _ = matrices(6)
    f = tg.recompute_grad(lambda h: told(h @ w))
    with tg.GradientTape() as tape:
        tape.watch(h)
        y = tg.sum(f(h))
    assert len(calls) == 1
    tape.gradient(y, h)
    assert len(calls) == 2


@pytest.mark.parametrize("n", SIZES)
def test_the_functions_own_treatment_of_float_errors_holds(n: int) -> None:
    h, w, v, _ = matrices(n)

    def f(h: tg.Tensor) -> tg.Tensor:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return tg.log(tg.abs(h @ w) * 0.0 - tg.reciprocal((h @ v) * 0.0)) * 0.0

    with warnings.catch_warnings(), np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        plain, _, _ = backward(f, [h])
    with warnings.catch_warnings(record=True) as told, tg.GradientTape() as tape:
        warnings.simplefilter("always")
        tape.watch(h)
        y = tg.recompute_grad(lambda h: tg.sum(tg.tanh(f(h)) @ v))(h) if n == 6 else tg.sum(f(h))
        del told[:]
        with np.errstate(all="ignore"):
            tape.gradient(y, h)
    assert np.isnan(plain[0]).any() and not told


def test_variables_assigned_in_a_rerun_have_their_values() -> None:
    h, w, _, _ = matrices(6)
    state = tg.Variable(np.zeros((6, 6)))

    def f(h: tg.Tensor) -> tg.Tensor:
        state.assign(h @ w)
        return tg.tanh(state.read_value()) * state

    plain, _, _ = backward(f, [h])
    before = state.numpy()
    found, _, _ = backward(tg.recompute_grad(f), [h])
    np.testing.assert_array_equal(plain[0], found[0])
    np.testing.assert_array_equal(before, state.numpy())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "f",
    [
        lambda h, w, v: tg.recompute_grad(lambda z: tg.tanh(z @ w) @ v)(h) @ w,
        lambda h, w, v: tg.custom_gradient(lambda z: (z @ tg.stop_gradient(w), lambda ct: ct * 3))(tg.tanh(h @ v)) @ v,
        lambda h, w, v: tg.grad(lambda z: tg.sum(tg.tanh(z @ w) @ v))(h) @ v,
        lambda h, w, v: tg.jvp(lambda z: tg.tanh(z @ w) @ v, (h,), (h,))[1] @ w,
        lambda h, w, v: tg.vmap(lambda row: tg.tanh(row @ w) @ v)(h) @ v,
        lambda h, w, v: tg.stop_gradient(h @ w) * tg.softmax(h @ v) @ w,
        lambda h, w, v: tg.linalg.solve(tg.eye(h.shape[0], dtype="float64") * 3 + h, tg.tanh(h @ w)) @ v,
        lambda h, w, v: tg.name(tg.tanh(tg.name(h @ w, "a")), "b") @ v,
    ],
    ids=["checkpoint", "custom", "grad", "jvp", "vmap", "stop", "solve", "name"],
)
def test_what_a_function_may_do_inside(f: Callable, n: int) -> None:
    h, w, v, _ = matrices(n)
    plain, _, _ = backward(f, [h, w, v])
    for options in (
        {},
        {"check": "values"},
        {"policy": tg.policies.save_matmuls},
        {"policy": tg.policies.save_names("a")},
    ):
        found, _, _ = backward(tg.recompute_grad(f, **options), [h, w, v])
        for a, b in zip(plain, found, strict=True):
            np.testing.assert_array_equal(a, b)


def test_second_order() -> None:
    h, w, v, _ = matrices(6)
    f = lambda h: tg.sum(tg.tanh(h @ w) @ v @ tg.tanh(h))
    plain = tg.hvp(f, h, v)
    np.testing.assert_allclose(tg.hvp(tg.recompute_grad(f), h, v), plain, rtol=1e-12)
    tg.testing.check_grads(tg.recompute_grad(f), (h,), order=2)


def test_within_a_budget() -> None:
    h, w, v, b = matrices(160)
    layer = lambda h, w, v, b: h + tg.tanh(tg.softmax(h @ w) @ v) @ b

    def chain(layer: Callable) -> Callable:
        def f(h: tg.Tensor, w: tg.Tensor, v: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
            for _ in range(6):
                h = layer(h, w, v, b)
            return h

        return f

    plain, _, _ = backward(chain(layer), [h, w, v, b])
    with tg.measure() as whole:
        backward(chain(tg.recompute_grad(layer)), [h, w, v, b])
    room = whole.peak_bytes - 3 * h.nbytes
    with tg.measure() as m, tg.memory_budget(room) as kept:
        found, _, _ = backward(chain(tg.recompute_grad(layer)), [h, w, v, b])
    assert m.evictions > 0 and kept.peak_bytes <= room
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_array_equal(one, other)


def drawing(h: tg.Tensor, w: tg.Tensor, v: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
    """A mask that was drawn before its turn would lie there while the concatenation takes its memory."""
    total = tg.sum(tg.concat([h @ w] * 8))
    return tg.random.uniform(h.shape, dtype="float64") * tg.tanh(h) * total


@pytest.mark.parametrize(
    "f",
    [
        drawing,
        lambda h, w, v, b: h + (tg.tanh(tg.softmax(h @ w) @ v) @ b + h @ w),
        lambda h, w, v, b: tg.exp(tg.mean(tg.concat([h, w @ v], axis=1) @ tg.concat([b, w]), axis=1)),
        lambda h, w, v, b: tg.sum(tg.stack([h @ w, h @ v, h @ b]), axis=0) @ tg.tanh(w),
    ],
    ids=["draw", "layer", "wide", "stack"],
)
def test_waiting_takes_no_more_memory(f: Callable) -> None:
    """Than where another tape records, and nothing waits."""
    inputs = matrices(160)
    results = []
    for outer in (nullcontext(), tg.GradientTape(watch_accessed_variables=False)):
        tg.random.seed(1)
        with outer:
            results.append(backward(tg.recompute_grad(f), inputs))
    (waiting, m, _), (plain, eager, _) = results
    assert m.peak_bytes <= eager.peak_bytes + 512  # a number
    assert sum(m.nodes_run.values()) <= sum(eager.nodes_run.values())
    for one, other in zip(plain, waiting, strict=True):
        np.testing.assert_array_equal(one, other)
