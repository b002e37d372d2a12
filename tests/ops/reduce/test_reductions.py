"""Reductions: NumPy's values in both sizes (at once, and tile by tile), gradients, ties, empty and odd operands."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, DTypeError, ShapeError
from tapegrad.testing import check_grads

AXES = [None, 0, 1, -1, (0, 2), (2, 0, 1), ()]
BIG = (3, 70, 130)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "any", "all", "var", "std", "count_nonzero"])
@pytest.mark.parametrize("shape", [(3, 4, 5), BIG])
@pytest.mark.parametrize("axis", AXES)
def test_values(name, shape, axis, rng):
    x = rng.uniform(0.9, 1.1, shape) * (rng.uniform(size=shape) > 0.1 if name in ("any", "all", "count_nonzero") else 1)
    for view in (x, x[:, ::-2], x.transpose(2, 0, 1)):
        got = getattr(tg, name)(tg.asarray(view, copy=False), axis=axis)
        wanted = getattr(np, name)(view, axis=axis)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12)
        if axis != ():
            kept = getattr(tg, name)(tg.asarray(view, copy=False), axis=axis, keepdims=True)
            assert kept.shape == getattr(np, name)(view, axis=axis, keepdims=True).shape


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod", "any"])
def test_lazy_operand_is_the_prologue(name, rng):
    x = rng.uniform(0.999, 1.001, (150, 200))
    t = tg.asarray(x)
    got = getattr(tg, name)(t * t - 0.0, axis=0)
    np.testing.assert_allclose(got.numpy(), getattr(np, name)(x * x, axis=0), rtol=1e-12)


@pytest.mark.parametrize("f", [tg.max, tg.min, tg.prod, tg.var, tg.std, tg.logsumexp, tg.sum, tg.mean])
@pytest.mark.parametrize("axis", [None, 1, (0, 2)])
def test_gradients(f, axis, rng):
    x = rng.permutation(24).reshape(2, 3, 4) / 10 + 0.3
    check_grads(lambda x: f(x, axis=axis), [x])
    check_grads(lambda x: f(x, axis=axis, keepdims=True), [x], order=1)


@pytest.mark.parametrize("shape", [(2, 3), (160, 120)])
def test_ties_share_equally(shape):
    x = tg.ones(shape)
    for f in (tg.max, tg.min):
        np.testing.assert_allclose(
            tg.grad(lambda x, f=f: f(x))(x).numpy(), np.full(shape, 1 / np.prod(shape)), rtol=1e-6
        )
    x = tg.asarray([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    g = tg.grad(lambda x: tg.sum(tg.max(x, axis=1)))(x)
    assert g.tolist() == [[0, 0.5, 0.5], [1, 0, 0]]


def test_half_precision_ties_are_counted_beyond_its_range():
    g = tg.grad(lambda x: tg.max(x) * 1024.0 * 32)(tg.zeros((70000,), dtype="float16"))
    assert g.dtype == np.float16 and float(g[0]) == pytest.approx(32768 / 70000, rel=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_is_the_extreme_and_poisons_the_gradient():
    x = tg.asarray([1.0, np.nan, 3.0])
    assert np.isnan(tg.max(x).item()) and np.isnan(tg.min(x).item())
    assert np.isnan(tg.grad(tg.max)(x).numpy()).all()


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_prod_gradient_at_zeros(zeros):
    x = np.array([2.0, 3.0, 5.0, 7.0, 11.0])
    x[1 : 1 + zeros] = 0
    wanted = [np.prod(np.delete(x, i)) for i in range(5)]
    np.testing.assert_allclose(tg.grad(tg.prod)(tg.asarray(x)).numpy(), wanted)
    check_grads(lambda x: tg.prod(x, axis=0), [np.outer(x, [1.0, 2.0])])


@pytest.mark.parametrize("f", [tg.max, tg.prod, tg.logsumexp, tg.var])
def test_jacobian_rows_together_equal_rows_apart(f, rng):
    x = tg.asarray(rng.standard_normal((3, 4)))
    got = tg.jacobian(lambda x: f(x, axis=1))(x).numpy()
    apart = [tg.grad(lambda x, i=i: f(x, axis=1)[i])(x).numpy() for i in range(3)]
    np.testing.assert_allclose(got, np.stack(apart), rtol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_empty():
    x = tg.zeros((0, 3))
    assert tg.sum(x, axis=0).tolist() == [0, 0, 0] and tg.prod(x).item() == 1
    assert tg.any(x).item() is False and tg.all(x).item() is True
    assert tg.max(x, axis=1).shape == (0,) and tg.logsumexp(x, axis=0).tolist() == [-np.inf] * 3
    for f in (tg.max, tg.min):
        with pytest.raises(ShapeError, match=r"(max|min): \(0, 3\) is empty along axis"):
            f(x, axis=0)
    assert tg.grad(lambda x: tg.sum(tg.prod(x, axis=0)))(x).shape == (0, 3)


def test_zero_dimensions():
    x = tg.asarray(2.0)
    for f in (tg.sum, tg.max, tg.prod, tg.mean, tg.logsumexp):
        assert f(x).item() == 2.0 and tg.grad(f)(x).item() == 1.0
    assert tg.var(x).item() == 0.0 and tg.any(x).item() is True


def test_dtypes():
    small = tg.asarray(np.array([100, 100, 100], np.int8))
    assert tg.sum(small).item() == 300 and tg.prod(small).item() == 10**6
    assert tg.max(small).dtype == np.int8 and tg.var(small).dtype == np.float64
    assert tg.max(tg.asarray([True, False])).item() is True
    assert tg.any(tg.asarray([np.nan])).item() is True
    big = tg.asarray(np.arange(20000, dtype=np.int32))
    assert tg.max(big).item() == 19999 and tg.max(big).dtype == np.int32 and tg.count_nonzero(big).item() == 19999


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logsumexp_is_stable():
    x = tg.asarray(np.array([[1000.0, 1000.0], [-1000.0, -1000.0], [-np.inf, 0.0]]))
    assert tg.logsumexp(x, axis=1).tolist() == [1000 + np.log(2), -1000 + np.log(2), 0]
    assert tg.logsumexp(tg.asarray([-np.inf, -np.inf])).item() == -np.inf
    assert tg.logsumexp(tg.asarray([np.inf, 0.0])).item() == np.inf
    g = tg.grad(lambda x: tg.sum(tg.logsumexp(x, axis=1)))(x)
    np.testing.assert_allclose(g.numpy(), [[0.5, 0.5], [0.5, 0.5], [0, 1]])


def test_var_correction():
    x = np.array([1.0, 2.0, 4.0])
    assert tg.var(x, correction=1).item() == pytest.approx(np.var(x, ddof=1))
    assert np.isnan(tg.var(x[:1], correction=1).item())


def test_errors_name_op_and_axis():
    with pytest.raises(AxisError, match="max: axis 2 is out of range"):
        tg.max(tg.ones((2, 2)), axis=2)
    with pytest.raises(AxisError, match="sum: .* twice"):
        tg.sum(tg.ones((2, 2)), axis=(0, -2))
    with pytest.raises(DTypeError, match="min: complex"):
        tg.min(tg.asarray([1j]))


def test_complex_gradients_are_conjugates_of_the_holomorphic_derivative(rng):
    z = rng.standard_normal(3) + 1j * rng.standard_normal(3)
    others = np.array([z[1] * z[2], z[0] * z[2], z[0] * z[1]])
    np.testing.assert_allclose(tg.grad(lambda z: tg.real(tg.prod(z)))(tg.asarray(z)).numpy(), np.conj(others))
    np.testing.assert_allclose(tg.grad(lambda z: 3 * tg.var(z))(tg.asarray(z)).numpy(), 2 * (z - z.mean()))
    assert tg.var(z).dtype == np.float64 and tg.any(z).item() is True and tg.count_nonzero([1j, 0j]).item() == 1


@pytest.mark.parametrize("f", [tg.std, tg.nanstd, lambda x: tg.std(x, axis=0), lambda x: tg.nanstd(x, axis=0)])
def test_std_of_equal_numbers_has_gradient_0(f):
    for data in ([3.0], [2.0, 2.0, 2.0], [[1.0], [1.0]]):
        x = tg.asarray(np.array(data))
        assert tg.grad(lambda x: tg.sum(f(x)))(x).tolist() == np.zeros_like(data).tolist()
        assert tg.sum(tg.hvp(lambda x: tg.sum(f(x)), x, tg.ones_like(x))).item() == 0
    unequal = np.array([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(tg.std(unequal), np.std(unequal))
    tg.testing.check_grads(f, (unequal,), order=2)


def test_std_with_nothing_left_is_nan():
    assert np.isnan(tg.std(tg.asarray([1.0]), correction=1).item())
    assert np.isnan(tg.grad(lambda x: tg.std(x, correction=1))(tg.asarray([1.0])).item())
