"""softmax, log_softmax, cross_entropy: values, edges, gradients to third order, memory."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.errors import AxisError, DTypeError, IndexingError, ShapeError
from tapegrad.tensor import from_array
from tapegrad.testing import check_grads

SHAPES = [(3, 4), (5,), (2, 3, 4), (1, 7), (4, 1), (200, 300), (3, 70001), (70001, 3)]


def reference(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.fixture(autouse=True)
def settings():
    count = threads.get_num_threads()
    yield
    threads.set_num_threads(count)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values(shape, dtype, rng):
    x = rng.normal(size=shape).astype(dtype) * 3
    wanted = reference(x.astype("float64"))
    rtol = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    labels = rng.integers(0, shape[-1], shape[:-1])
    for got, ref in (
        (tg.softmax(x), wanted),
        (tg.log_softmax(x), np.log(wanted)),
        (tg.cross_entropy(x, labels), -np.log(np.take_along_axis(wanted, labels[..., None], -1)[..., 0])),
    ):
        assert got.dtype == dtype and got.shape == ref.shape
        np.testing.assert_allclose(got.numpy(), ref, rtol=rtol, atol=rtol * 1e-1)


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
def test_axis(axis, rng):
    x = rng.normal(size=(3, 4, 5))
    np.testing.assert_allclose(tg.softmax(x, axis=axis).numpy(), reference(x, axis), rtol=1e-12)
    np.testing.assert_allclose(tg.log_softmax(x, axis=axis).numpy(), np.log(reference(x, axis)), rtol=1e-12)
    check_grads(lambda x: tg.softmax(x, axis=axis), [x], order=2)
    with pytest.raises(AxisError, match="softmax"):
        tg.softmax(x, axis=3)
    with pytest.raises(AxisError, match="softmax"):
        tg.softmax(np.ones(()))


def test_edges_without_warnings():
    """Warnings are errors here."""
    far = np.array([[1e4, 0, -1e4], [-np.inf, 0, 0], [3e38, 3e38, 3e38], [-np.inf, -np.inf, 1]])
    np.testing.assert_array_equal(tg.softmax(far).numpy(), [[1, 0, 0], [0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]])
    assert tg.log_softmax(far).numpy()[0].tolist() == [0, -1e4, -2e4]
    assert tg.cross_entropy(far, [2, 0, 1, 2]).tolist() == [2e4, np.inf, pytest.approx(np.log(3)), 0]
    nothing = np.full((2, 3), -np.inf)
    for f in (tg.softmax, tg.log_softmax):
        assert np.isnan(f(nothing).numpy()).all()
        assert f(np.ones((0, 3))).shape == (0, 3)
        assert f(np.ones((3, 0))).shape == (3, 0)


def test_integers_become_floats():
    assert tg.softmax(np.array([1, 2])).dtype == np.float64
    assert tg.cross_entropy([1.0, 2.0], 1).dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 4), (2, 1)])
def test_gradients(shape, rng):
    x = rng.normal(size=shape)
    labels = rng.integers(0, shape[-1], shape[:-1])
    for f in (tg.softmax, tg.log_softmax, lambda x: tg.cross_entropy(x, labels)):
        check_grads(f, [x], order=3)


def test_jacobians(rng):
    x = rng.normal(size=(2, 3))
    p = reference(x)
    wanted = np.zeros((2, 3, 2, 3))
    for i in range(2):
        wanted[i, :, i] = np.diag(p[i]) - np.outer(p[i], p[i])
    np.testing.assert_allclose(tg.jacobian(tg.softmax)(x).numpy(), wanted, atol=1e-14)
    got = tg.jacobian(lambda x: tg.cross_entropy(x, [0, 2]))(x).numpy()
    rows = np.stack([[p[0] - [1, 0, 0], 0 * p[0]], [0 * p[1], p[1] - [0, 0, 1]]])
    np.testing.assert_allclose(got, rows, atol=1e-14)
    hessian = tg.hessian(lambda x: tg.sum(tg.cross_entropy(x, [0, 2])))(x).numpy()
    np.testing.assert_allclose(hessian, wanted, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_bits_for_any_number_of_threads(dtype, rng):
    x, w = (rng.normal(size=(700, 500)).astype(dtype) for _ in range(2))
    labels = rng.integers(0, 500, 700)
    fs = [
        lambda x: tg.sum(tg.softmax(x) * w), lambda x: tg.sum(tg.log_softmax(x) * w),
        lambda x: tg.sum(tg.cross_entropy(x, labels)),
    ]  # fmt: skip
    for f in fs:
        found = set()
        for count in (1, 2, 3):
            threads.set_num_threads(count)
            y, g = tg.value_and_grad(f)(x)
            found.add((y.numpy().tobytes(), g.numpy().tobytes()))
        assert len(found) == 1


def test_strided_operands(rng):
    x = rng.normal(size=(50, 60))
    for view in (x.T, x[:, ::2], x[::-1]):
        got = tg.softmax(from_array(view)).numpy()
        np.testing.assert_array_equal(got, tg.softmax(np.ascontiguousarray(view)).numpy())


def test_cross_entropy_makes_no_probabilities(rng):
    """Forward a loss per row, backward the gradient: nothing else of full size."""
    x = tg.asarray(rng.normal(size=(1000, 1000)).astype("float32"))
    labels = tg.asarray(rng.integers(0, 1000, 1000))
    with tg.measure() as m:
        others = m.live_bytes - x.nbytes
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.cross_entropy(x, labels)
        assert m.peak_bytes - others < x.nbytes + 100_000
        tape.gradient(y, x).numpy()
    assert m.peak_bytes - others < 2.2 * x.nbytes


@pytest.mark.parametrize(
    ("x", "labels", "error", "says"),
    [
        ((3, 4), [0, 1], ShapeError, "(3,)"), ((3, 4), [[0], [1], [2]], ShapeError, "(3, 1)"),
        ((), 0, ShapeError, "()"),
        ((3, 4), [0, 4, 1], IndexingError, "label 4"), ((3, 4), [0, -1, 1], IndexingError, "label -1"),
        ((3, 4), [0.0, 1.0, 2.0], DTypeError, "must be integers, got float"),
        ((3, 4), [True, False, True], DTypeError, "bool"),
    ],
)  # fmt: skip
def test_cross_entropy_errors(x, labels, error, says):
    with pytest.raises(error, match="cross_entropy") as caught:
        tg.cross_entropy(np.ones(x), labels)
    assert says in str(caught.value)
