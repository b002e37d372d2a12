"""Recursive filters and trends: SciPy's values, derivatives in signal, coefficients and state."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError, TapegradError
from tapegrad.testing import check_grads

COEFFICIENTS = [([0.5, 0.2], [1.0, -0.4, 0.1]), ([1.0, 2.0, 0.3, 0.1], [2.0, 0.5]), ([0.7], [1.0]), ([1.0], [1.0, 0.3])]


@pytest.mark.parametrize(("b", "a"), COEFFICIENTS)
@pytest.mark.parametrize(("shape", "axis"), [((6,), -1), ((3, 5), 1), ((3, 5), 0), ((2, 1), -1)])
def test_lfilter_is_scipys(rng, b, a, shape, axis):
    x = rng.normal(size=shape)
    b, a = np.array(b), np.array(a)
    np.testing.assert_allclose(tg.signal.lfilter(b, a, x, axis).numpy(), scipy.signal.lfilter(b, a, x, axis))
    order = max(len(a), len(b)) - 1
    zi = rng.normal(size=[order if k == axis % x.ndim else n for k, n in enumerate(shape)])
    wanted = scipy.signal.lfilter(b, a, x, axis, zi=zi)
    for g, w in zip(tg.signal.lfilter(b, a, x, axis, zi=zi), wanted, strict=True):
        np.testing.assert_allclose(g.numpy(), w, atol=1e-14)


def test_nothing_to_filter():
    assert tg.signal.lfilter([0.5], [1.0, 0.2], np.ones((2, 0))).shape == (2, 0)
    y, state = tg.signal.lfilter([0.5], [1.0, 0.2], np.ones((2, 0)), zi=np.ones((2, 1)))
    assert y.shape == (2, 0)
    np.testing.assert_array_equal(state.numpy(), np.ones((2, 1)))


def test_sosfilt_is_scipys(rng):
    sos = scipy.signal.butter(5, 0.3, output="sos")
    x = rng.normal(size=(3, 40))
    np.testing.assert_allclose(tg.signal.sosfilt(sos, x).numpy(), scipy.signal.sosfilt(sos, x))
    zi = rng.normal(size=(len(sos), 3, 2))
    for g, w in zip(tg.signal.sosfilt(sos, x, zi=zi), scipy.signal.sosfilt(sos, x, zi=zi), strict=True):
        np.testing.assert_allclose(g.numpy(), w)


def test_derivatives_of_filters(rng):
    for b, a in COEFFICIENTS:
        given = [np.array(b), np.array(a), rng.normal(size=(2, 5))]
        check_grads(tg.signal.lfilter, given, order=2)
        zi = rng.normal(size=(2, max(len(a), len(b)) - 1))
        check_grads(lambda b, a, x, zi: tg.signal.lfilter(b, a, x, zi=zi), [*given, zi], order=2)
    jacobian = tg.jacobian(lambda a: tg.signal.lfilter([0.5], a, given[2]))(given[1]).numpy()
    each = [tg.jvp(lambda a: tg.signal.lfilter([0.5], a, given[2]), given[1], e)[1].numpy() for e in np.eye(2)]
    np.testing.assert_allclose(jacobian, np.stack(each, -1))


@pytest.mark.parametrize(("shape", "axis"), [((7,), -1), ((3, 8), 0), ((3, 8), 1), ((1,), 0)])
@pytest.mark.parametrize(("kind", "bp"), [("linear", 0), ("constant", 0), ("linear", [1, 3])])
def test_detrend(rng, shape, axis, kind, bp):
    x = rng.normal(size=shape) + np.arange(shape[axis]).reshape([-1 if k == axis % len(shape) else 1 for k in range(len(shape))])  # fmt: skip  # noqa: E501
    if bp and shape[axis] < 4:
        bp = 1
    wanted = scipy.signal.detrend(x, axis, kind, bp)
    np.testing.assert_allclose(tg.signal.detrend(x, axis, kind, bp).numpy(), wanted, atol=1e-12)
    check_grads(lambda x: tg.signal.detrend(tg.sin(x), axis, kind, bp), [x])


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda: tg.signal.lfilter([], [1.0], np.ones(3)), ShapeError, "not empty"),
        (lambda: tg.signal.lfilter([1.0], [1.0], 2.0), ShapeError, "scalar"),
        (lambda: tg.signal.lfilter([1.0], [1.0], np.ones(3), axis=1), AxisError, "axis 1"),
        (lambda: tg.signal.lfilter([1.0, 1.0], [1.0], np.ones(3), zi=np.ones(2)), ShapeError, "zi"),
        (lambda: tg.signal.sosfilt(np.ones((2, 5)), np.ones(3)), ShapeError, "sections"),
        (lambda: tg.signal.detrend(np.ones(3), type="cubic"), TapegradError, "'cubic'"),
        (lambda: tg.signal.detrend(np.ones(3), bp=5), ShapeError, "break points"),
    ],
)
def test_bad_input(f, error, words):
    with pytest.raises(error, match=words):
        f()
