"""SciPy's minimizers on nested structures, with gradients, Hessians and constraints from tapegrad."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import tapegrad as tg
from tapegrad.errors import DTypeError, GradientError, ShapeError, TapegradError

START = {"a": np.array([-1.2, 1.0]), "b": [np.array([[2.0, -1.0, 0.5]]), np.float64(3.0)]}


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def loss(x, shift=0.0):
    first, (matrix, number) = x["a"], x["b"]
    return rosenbrock(first) + tg.sum((matrix - 1) ** 2) + (number - shift) ** 4


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        (None, {}), ("BFGS", {}), ("L-BFGS-B", {}), ("CG", {}), ("Newton-CG", {}), ("Newton-CG", {"hess": True}),
        ("Newton-CG", {"hessp": True}), ("trust-exact", {"hess": True}), ("trust-ncg", {"hessp": True}),
        ("SLSQP", {}),
    ],
)  # fmt: skip
def test_every_method_finds_the_least_value(method, extra):
    seen = []
    found = tg.optim.minimize(loss, START, (0.5,), method, tol=1e-8, callback=seen.append, **extra)
    assert found.fun < 1e-5
    assert isinstance(found.x["b"][0], tg.Tensor)
    np.testing.assert_allclose(found.x["a"].numpy(), [1, 1], atol=1e-3)
    np.testing.assert_allclose(found.x["b"][0].numpy(), np.ones((1, 3)), atol=1e-3)
    np.testing.assert_allclose(found.x["b"][1].numpy(), 0.5, atol=0.1)
    assert seen
    assert seen[-1]["b"][0].shape == (1, 3)


def test_constraints_and_bounds():
    f = lambda p: tg.sum((p["x"] - 2) ** 2)
    on = {"type": "eq", "fun": lambda p: tg.sum(p["x"]) - 1.0}
    below = {"type": "ineq", "fun": lambda p, most: most - p["x"], "args": (0.4,)}
    start = {"x": np.zeros(3)}
    found = tg.optim.minimize(f, start, method="SLSQP", constraints=[on, below])
    np.testing.assert_allclose(found.x["x"].numpy(), np.full(3, 1 / 3), atol=1e-6)
    found = tg.optim.minimize(f, start, method="SLSQP", constraints=on, bounds=[(0, 0.1), (0, None), (None, None)])
    np.testing.assert_allclose(found.x["x"].numpy(), [0.1, 0.45, 0.45], atol=1e-6)
    other = scipy.optimize.LinearConstraint(np.ones((1, 3)), 1, 1)
    found = tg.optim.minimize(f, start, method="trust-constr", constraints=[other])
    np.testing.assert_allclose(found.x["x"].numpy(), np.full(3, 1 / 3), atol=1e-4)


def test_an_objective_for_other_functions_of_scipys():
    fun, flat, unflatten = tg.optim.scipy_objective(loss, START, (0.5,))
    assert flat.dtype == np.float64
    value, gradient = fun(flat)
    assert isinstance(value, float)
    numeric = scipy.optimize.approx_fprime(flat, lambda v: fun(v)[0], 1e-7)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-3)
    back = unflatten(flat)
    np.testing.assert_array_equal(back["b"][0].numpy(), START["b"][0])
    found = scipy.optimize.minimize(fun, flat, jac=True)
    assert found.fun < 1e-6
    wanted = tg.optim.minimize(loss, START, (0.5,))
    np.testing.assert_array_equal(unflatten(found.x)["a"].numpy(), wanted.x["a"].numpy())


def test_dtypes_and_variables_are_kept():
    start = (tg.Variable([1.0, 2.0]), 3, tg.asarray(np.float64(1)))
    kinds = []

    def f(x):
        kinds.append([str(t.dtype) for t in x])
        return sum(tg.sum(tg.astype(t, "float64") ** 2) for t in x)

    found = tg.optim.minimize(f, start, tol=1e-8)
    assert kinds[0] == ["float32", "float64", "float64"]
    assert [str(t.dtype) for t in found.x] == kinds[0]
    np.testing.assert_array_equal(start[0].numpy(), [1, 2])


def test_an_outer_tape_records_nothing():
    x = tg.asarray(np.ones(2))
    with tg.GradientTape() as tape:
        tape.watch(x)
        found = tg.optim.minimize(lambda v: tg.sum((v - x) ** 2), np.zeros(2))
    assert tape.gradient(found.x, x) is None


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda: tg.optim.minimize(loss, {}), GradientError, "no numbers"),
        (lambda: tg.optim.minimize(tg.sum, np.ones(2) * 1j), DTypeError, "apart"),
        (lambda: tg.optim.minimize(lambda x: x * 2, np.ones(2)), ShapeError, "one float"),
        (lambda: tg.optim.minimize(tg.sum, np.ones(2), hess=True, hessp=True), TapegradError, "both"),
        (lambda: tg.optim.minimize(tg.sum, np.ones(2), method="nothing"), ValueError, "nothing"),
        (lambda: tg.optim.scipy_objective(tg.sum, np.ones(2))[2](np.ones(3)), GradientError, "unflatten"),
    ],
)
def test_bad_input(f, error, words):
    with pytest.raises(error, match=words):
        f()
