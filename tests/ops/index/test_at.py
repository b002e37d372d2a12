"""``x.at[index]``: every method against NumPy's ``ufunc.at``, gradients with repeated indices, ties and zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, same, values

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError
from tapegrad.testing import check_grads

INDICES = [
    1, -1, (), ..., slice(None, None, -2), (slice(1, 3), 0), None, (..., 1), slice(3, 3),
    [0, 2, 0], [[0, 1], [-1, 0]], (slice(None), [1, 1, -2]), ([0, 0, 1], [1, 1, -1]), ([0, 1], slice(None, None, 2)),
    [], np.arange(12).reshape(4, 3) % 3 == 1, (slice(None), np.array([True, False, True])), np.array(2),
]  # fmt: skip
UFUNCS = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power,
    "max": np.maximum, "min": np.minimum,
}  # fmt: skip


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("method", UFUNCS)
def test_like_numpys_ufunc_at(method: str, index: Any, rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 2.0, (4, 3))
    for v in (rng.uniform(0.5, 2.0, x[index].shape), np.array(1.3)):
        wanted = x.copy()
        if x[index].size:  # ufunc.at refuses some empty indices
            UFUNCS[method].at(wanted, index, v)
        same(getattr(tg.asarray(x).at[index], method)(v), wanted)
        if x[index].size:
            check_grads(lambda x, v: getattr(x.at[index], method)(v), [x, v], order=2)


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_a_function_of_the_elements(index: Any, rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 2.0, (4, 3))
    wanted = x.copy()
    if x[index].size:
        np.square.at(wanted, index)
    same(tg.asarray(x).at[index].apply(tg.square), wanted)
    check_grads(lambda x: x.at[index].apply(lambda e: tg.sin(e) * e), [x], order=2)
    np.testing.assert_array_equal(tg.asarray(x).at[index].get().numpy(), x[index])


def test_an_element_three_times(rng: np.random.Generator) -> None:
    x, index = np.array([1.5, 2.0, -3.0]), [0, 2, 0, 0]
    same(c64(x).at[index].apply(lambda e: e * 2.0), [12.0, 2.0, -6.0])
    same(c64(x).at[index].multiply([2.0, 0.0, 0.0, 5.0]), [0.0, 2.0, 0.0])
    check_grads(lambda x, v: x.at[index].multiply(v), [x, np.array([2.0, 0.0, 0.0, 5.0])], order=2)
    same(c64(x).at[index].set([1.0, 2.0, 3.0, 4.0]), [4.0, 2.0, 2.0])


def test_ties_share_the_gradient() -> None:
    x, v = c64([1.0, 5.0, 1.0]), c64([1.0, 1.0, 7.0])
    for index, wanted in (([0, 0, 2], ([1 / 3, 1.0, 0.0], [1 / 3, 1 / 3, 1.0])), (..., ([0.5, 1.0, 0.0], [0.5, 0, 1]))):
        same(tg.grad(lambda x, v, i=index: tg.sum(x.at[i].max(v)), (0, 1))(x, v), wanted)
        same(tg.grad(lambda x, v, i=index: -tg.sum((-x).at[i].min(-v)), (0, 1))(x, v), wanted)
    with np.errstate(invalid="ignore"):  # NumPy's ufunc.at warns of NaN
        same(c64([1.0, np.nan]).at[[0, 1]].max([np.nan, 1.0]), [np.nan, np.nan])


def test_what_is_not_selected_keeps_bits_and_derivatives() -> None:
    x = c64([0.0, -0.5, np.inf])
    for method in UFUNCS:
        found = getattr(x.at[[1, 1]], method)([1.0, 1.0])
        assert bits_equal(found[::2], x[::2])
    f = lambda q: tg.sum(q.at[1].power(2.0) * 3.0)
    same(tg.jacobian(tg.grad(f))(c64([0.0, -0.5, 0.0])), np.diag([0.0, 6.0, 0.0]))
    k = tg.asarray([1, 2, 3])
    same(k.at[[0, 0]].multiply([2, 5]), [10, 2, 3])
    same(k.at[[0, 1]].max([7, -1]), [7, 2, 3])
    assert k.at[[0]].min(2.7).dtype == k.dtype


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: x.at[5].max(1.0), IndexingError, r"x.at\[...\].max: index 5 is out of range for axis 0 of \(3,\)"),
        (lambda x: x.at[[0, 9]].multiply(1.0), IndexError, r"x.at\[...\].multiply: index 9 is out of range"),
        (lambda x: x.at[[0, -4]].apply(tg.sin), IndexError, r"x.at\[...\].apply: index -4 is out of range"),
        (lambda x: x.at[[7]].power(2.0), IndexError, r"x.at\[...\].power: index 7"),
        (lambda x: x.at[:2].min([1.0, 2.0, 3.0]), ShapeError, r"x.at\[...\].min: .*\(3,\)"),
        (lambda x: x.at[[0]].divide(np.ones((2, 1))), ShapeError, r"x.at\[...\].divide: .*\(2, 1\)"),
        (lambda x: x.at[:2].apply(tg.sum), ShapeError, r"made shape \(\) of elements of shape \(2,\)"),
        (lambda x: tg.asarray([1, 2]).at[0].divide(2), TypeError, "divide: not defined for int64; use astype"),
        (lambda x: (x > 0).at[0].max(True), TypeError, "max: not defined for bool"),
        (lambda x: (x * 1j).at[[0]].min(1.0), TypeError, "min: not defined for complex128"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(c64([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("method", [*UFUNCS, "apply"])
@pytest.mark.parametrize("index", [slice(1, None), [0, 2, 0]], ids=repr)
def test_captured_checkpointed_and_batched(method: str, index: Any, rng: np.random.Generator) -> None:
    x, v = (c64(rng.uniform(0.5, 2.0, shape)) for shape in ((3, 2), (2,)))

    def f(x: Any, v: Any) -> Any:
        return tg.tanh(x.at[index].apply(tg.sin) if method == "apply" else getattr(x.at[index], method)(v))

    wanted = values(f(x, v))
    captured = tg.function(f)
    assert bits_equal([captured(x, v) for _ in range(3)], [wanted] * 3)
    total = lambda g: tg.grad(lambda x, v: tg.sum(g(x, v)), (0, 1))
    assert bits_equal(total(tg.recompute_grad(f))(x, v), total(f)(x, v))
    if (method, index) != ("apply", [0, 2, 0]):
        assert captured.stats.replays
        same(tg.vmap(f)(tg.stack([x, 2 * x]), tg.stack([v, v])), np.stack([wanted, values(f(2 * x, v))]))
