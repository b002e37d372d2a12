"""Differential equations and integrals of samples: exact solutions, SciPy's values, derivatives of any order."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate

import tapegrad as tg
from tapegrad import nest
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.testing import check_grads

TIMES = np.array([0.0, 0.3, 1.0, 1.1])


def pendulum(y, t, length, damping):
    return tg.stack([y[1], -tg.sin(y[0]) / length - damping * y[1] + 0.1 * t])


def test_odeint_is_scipys():
    args = (1.3, 0.2)
    with_numpy = lambda y, t, a, b: [y[1], -np.sin(y[0]) / a - b * y[1] + 0.1 * t]
    for times in (np.linspace(0, 5, 9), np.linspace(2, -1, 4), [0.0, 1.0, 1.0, 3.0], [0.5]):
        wanted = scipy.integrate.odeint(with_numpy, [0.5, -0.2], times, args, rtol=1e-10, atol=1e-10)
        got = tg.integrate.odeint(pendulum, np.array([0.5, -0.2]), times, args)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-6)
        tight = tg.integrate.odeint(pendulum, np.array([0.5, -0.2]), times, args, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(tight.numpy(), wanted, atol=1e-8)


def test_any_shape_and_dtype():
    a = np.array([[0.0, 1.0], [-1.0, 0.0]])
    got = tg.integrate.odeint(lambda y, t: a @ y, np.eye(2), [0.0, np.pi / 2])
    np.testing.assert_allclose(got.numpy()[1], [[0, 1], [-1, 0]], atol=1e-7)
    spin = tg.integrate.odeint(lambda y, t: 1j * y, np.complex128(1), [0.0, 1.0])
    np.testing.assert_allclose(spin.numpy()[1], np.exp(1j), rtol=1e-7)
    single = tg.integrate.odeint(lambda y, t: -y, [1.0, 2.0], [0.0, 1.0])
    assert single.dtype == np.float32
    np.testing.assert_allclose(single.numpy()[1], np.exp(-1) * np.array([1, 2]), rtol=1e-3)
    assert tg.integrate.odeint(lambda y, t: y, np.zeros((0, 3)), TIMES).shape == (4, 0, 3)
    first = tg.integrate.odeint(lambda t, y: -y, np.float64(1), [0.0, 1.0], tfirst=True, hmax=0.01)
    np.testing.assert_allclose(first.numpy()[1], np.exp(-1), rtol=1e-9)


def test_derivatives_in_state_times_and_arguments():
    f = lambda y, t, a, b: tg.integrate.odeint(pendulum, y, t, (a, b), rtol=1e-9, atol=1e-9)
    given = [np.array([0.5, -0.2]), TIMES, np.float64(1.3), np.float64(0.2)]
    check_grads(f, given, order=2, rtol=1e-3, atol=1e-5)
    jacobian = tg.jacobian(f, 1)(*given).numpy()  # of the times: at its own time a value moves with the slope
    slopes = np.stack([pendulum(y, t, 1.3, 0.2).numpy() for y, t in zip(f(*given), TIMES, strict=True)])
    for i in range(1, 4):
        np.testing.assert_allclose(jacobian[i, :, i], slopes[i], atol=1e-6)


def test_gradients_against_the_exact_solution():
    k, y0, t = np.float64(0.7), np.float64(1.5), np.array([0.2, 1.7])
    f = lambda k, y0, t: tg.integrate.odeint(lambda y, t: -k * y, y0, t, rtol=1e-11, atol=1e-11)[1]
    exact = lambda k, y0, t: y0 * tg.exp(-k * (t[1] - t[0]))
    for make in (tg.grad, tg.hessian):
        got, wanted = (make(g, (0, 1, 2))(k, y0, t) for g in (f, exact))
        for a, b in zip(nest.leaves(got), nest.leaves(wanted), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-8)


def test_recompute_keeps_only_the_solution_and_gives_the_same_bits():
    y0 = tg.asarray(np.linspace(0, 1, 2000))
    scale = tg.asarray(np.float64(1.2))
    found = {}
    for recompute in (False, True):
        with tg.measure() as m, tg.GradientTape() as tape:
            tape.watch([y0, scale])
            y = tg.integrate.odeint(lambda y, t: tg.sin(scale * y) * t, y0, np.linspace(0, 1, 6), recompute=recompute)
            loss = tg.sum(y[-1] ** 2)
        found[recompute] = [g.numpy() for g in tape.gradient(loss, [y0, scale])], m.peak_bytes
    for a, b in zip(found[True][0], found[False][0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[True][1] < found[False][1] / 2


def test_solve_ivp_is_scipys():
    f, g = (lambda t, y, a: [y[1], -a * y[0]]), (lambda t, y, a: tg.stack([y[1], -a * y[0]]))
    for span in ((0, 2), (1.0, -1.0)):
        for times in (None, np.linspace(*span, 5)[1:]):
            wanted = scipy.integrate.solve_ivp(f, span, [1.0, 0.0], t_eval=times, args=(2.0,), rtol=1e-9, atol=1e-9)
            got = tg.integrate.solve_ivp(
                g, span, np.array([1.0, 0.0]), "RK45", times, args=(2.0,), rtol=1e-9, atol=1e-9
            )
            assert got.success
            np.testing.assert_allclose(got.y.numpy()[:, -1], wanted.y[:, -1], atol=1e-7)
            np.testing.assert_allclose(got.t.numpy()[[0, -1]], wanted.t[[0, -1]])
            if times is not None:
                np.testing.assert_allclose(got.y.numpy(), wanted.y, atol=1e-7)
    f = lambda y0, t1: tg.integrate.solve_ivp(g, (0.0, t1), y0, args=(2.0,), rtol=1e-9, atol=1e-9).y[:, -1]
    check_grads(f, [np.array([1.0, 0.0]), np.float64(1.5)], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_simpson_is_scipys(rng, n):
    y, x = rng.normal(size=(3, n, 2)), np.sort(rng.uniform(0, 3, n)) + np.arange(n)
    for given in ({"dx": 0.3}, {"x": x}, {"x": np.broadcast_to(x[:, None], (3, n, 2))}):
        wanted = scipy.integrate.simpson(y, axis=1, **given)
        np.testing.assert_allclose(tg.integrate.simpson(y, axis=1, **given).numpy(), wanted, atol=1e-12)
    check_grads(lambda y, x: tg.integrate.simpson(tg.sin(y), x=x, axis=1), [y, x], order=2)
    np.testing.assert_allclose(tg.integrate.trapezoid(y, axis=1).numpy(), scipy.integrate.trapezoid(y, axis=1))


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda: tg.integrate.odeint(lambda y, t: y[:1], np.ones(2), TIMES), ShapeError, "same"),
        (lambda: tg.integrate.odeint(lambda y, t: 1j * y, np.ones(2), TIMES), DTypeError, "give y0"),
        (lambda: tg.integrate.odeint(lambda y, t: y, np.ones(2), 1.0), ShapeError, "times"),
        (lambda: tg.integrate.odeint(lambda y, t: y, np.ones(2), TIMES, rtol=-1.0), TapegradError, "rtol"),
        (lambda: tg.integrate.odeint(lambda y, t: y * y, np.ones(1), [0.0, 2.0]), TapegradError, "diverge"),
        (lambda: tg.integrate.odeint(lambda y, t: y / 0.0, np.zeros(1), [0.0, 2.0]), TapegradError, "gave up"),
        (lambda: tg.integrate.odeint(lambda y, t: -y, np.ones(1), [0.0, 9.0], mxstep=3), TapegradError, "mxstep"),
        (lambda: tg.integrate.solve_ivp(lambda t, y: y, (0, 1), np.ones(1), "BDF"), TapegradError, "'BDF'"),
        (lambda: tg.integrate.solve_ivp(lambda t, y: y, (0, 1), np.ones(1), t_eval=[2.0]), TapegradError, "outside"),
        (lambda: tg.integrate.solve_ivp(lambda t, y: y, (0, 1), np.ones(1), t_eval=[1.0, 0.5]), TapegradError, "order"),
        (lambda: tg.integrate.simpson(np.ones(0)), ShapeError, "no samples"),
        (lambda: tg.integrate.simpson(np.ones(3), x=np.ones(2)), ShapeError, "simpson: x"),
    ],
)
def test_bad_input(f, error, words):
    with np.errstate(all="ignore"), pytest.raises(error, match=words):
        f()
