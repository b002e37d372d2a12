"""NumPy's other functions of elements."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError
from tapegrad.testing import check_grads

ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-310, 1e308, -3.5, 2.5])


@pytest.fixture(params=["float64", "float32", "float16"])
def x(request, rng):
    return rng.normal(size=(3, 4)).astype(request.param)


@pytest.mark.parametrize("name", ["fmax", "fmin", "fmod", "logaddexp2", "heaviside", "divmod"])
def test_two_operands(name, x, rng):
    same(name, x, rng.normal(size=4).astype(x.dtype))
    same(name, x, x[:1])


@pytest.mark.parametrize("name", ["cbrt", "fabs", "modf", "frexp", "nan_to_num"])
def test_one_operand(name, x):
    same(name, x)
    same(name, x[:0])
    same(name, x[0, 0])
    same(name, ODD)
    same(name, np.arange(4))


def test_nan_beside_numbers():
    a, b = np.array([np.nan, 1, np.nan, 2]), np.array([3, np.nan, np.nan, 1])
    same("fmax", a, b)
    same("fmin", a, b)
    for f, wanted in ((tg.fmax, [0, 1, 0, 1]), (tg.fmin, [0, 1, 0, 0])):
        g = tg.grad(lambda x, f=f: tg.sum(f(x, b)[np.array([0, 1, 3])]))(tg.asarray(a))
        np.testing.assert_array_equal(g, wanted)


def test_ties_go_to_the_first_operand():
    one = tg.asarray([1.0, 2.0])
    for f in (tg.fmax, tg.fmin):
        first, second = tg.grad(lambda x, y, f=f: tg.sum(f(x, y)), argnums=(0, 1))(one, one)
        assert first.tolist() == [1, 1] and second.tolist() == [0, 0]


def test_fmod_is_exact(rng):
    a = np.array([-4.0, 4, -0.0, 5, -5.5, 7e15, 1e-300])
    b = np.array([2.0, -2, 1, np.inf, 2, 3.3, 7.0])
    got = tg.fmod(a, b).numpy()
    np.testing.assert_array_equal(got, np.fmod(a, b))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.fmod(a, b)))
    i = rng.integers(-9, 9, 20)
    same("fmod", i, np.array(4))
    same("fmod", i, np.array(-4))
    same("fmod", np.arange(9, dtype="u1"), np.array(4, "u1"))
    with pytest.raises(DTypeError, match="fmod"):
        tg.fmod(1j, 2.0)


@pytest.mark.parametrize("decimals", [0, 2, -1])
def test_around(decimals, rng):
    x = rng.normal(size=9) * 100
    for a in (x, x + 1j * x[::-1], x.astype("f4"), x.astype(int)):
        same("around", a, decimals)


def test_replacements():
    same("nan_to_num", ODD, nan=3.0, posinf=5.0, neginf=-9.0)
    same("nan_to_num", np.array([complex(np.nan, 1), complex(2, np.inf)], "c8"))
    g = tg.grad(lambda x: tg.sum(tg.nan_to_num(x) / 2))(tg.asarray(ODD[2:5]))
    assert g.tolist() == [0, 0, 0]


def test_parts_of_floats(rng):
    same("ldexp", rng.normal(size=(3, 4)), rng.integers(-5, 5, 4))
    same("ldexp", np.float32(1.5), 3)
    np.testing.assert_array_equal(tg.fix(ODD).numpy(), np.trunc(ODD))  # np.fix is deprecated from NumPy 2.5 on
    same("float_power", np.array([1, 2], "i1"), np.array([3, -1]))
    x = rng.normal(size=5) * 100
    mantissa, exponent = tg.frexp(x)
    assert exponent.dtype == np.int32
    g = tg.grad(lambda x: tg.sum(tg.frexp(x)[0]))(tg.asarray(x))
    np.testing.assert_array_equal(g, 2.0 ** -exponent.numpy())
    with pytest.raises(DTypeError, match="exponents must be integers"):
        tg.ldexp(1.0, 2.5)


def test_integers(rng):
    i, j = rng.integers(-30, 30, (3, 4)), rng.integers(1, 30, 4)
    same("gcd", i, j)
    same("lcm", i, j)
    with pytest.raises(DTypeError, match="gcd: needs integers"):
        tg.gcd(1.5, 2)


def test_of_pytorch(rng):
    a, b, c = rng.uniform(0.5, 1, (3, 4))
    np.testing.assert_allclose(tg.addcmul(a, b, c, value=2), a + 2 * b * c)
    np.testing.assert_allclose(tg.addcdiv(a, b, c, value=2), a + 2 * b / c)
    np.testing.assert_allclose(tg.lerp(a, b, c), a + c * (b - a))
    np.testing.assert_array_equal(tg.lerp(a, b, np.array(1.0)), b)
    np.testing.assert_allclose(tg.linear_interpolate(c, a, b), c * a + (1 - c) * b)
    np.testing.assert_allclose(tg.rsqrt(a), a**-0.5)
    np.testing.assert_allclose(tg.squared_difference(a, b), (a - b) ** 2)


def test_gradients(rng):
    x, y, z = rng.uniform(0.3, 2, (3, 2, 3))
    s = x * np.array([1, -1, 1])
    check_grads(lambda x: tg.cbrt(x), [s])
    check_grads(lambda x: tg.frexp(x)[0] ** 2, [s])
    check_grads(lambda x: tg.ldexp(x, [1, -1, 2]) ** 2, [s])
    check_grads(lambda x: tg.modf(x)[0] ** 2, [s])
    check_grads(lambda x: tg.nan_to_num(x) ** 2 + tg.fabs(x), [s])
    check_grads(lambda x: tg.rsqrt(x), [x])
    for f in (tg.fmax, tg.fmin, tg.fmod, tg.logaddexp2, tg.float_power, tg.squared_difference):
        check_grads(f, [x, y[0]])
    check_grads(lambda x, y: tg.fmod(x, y) ** 2, [-5 * x, y])
    check_grads(lambda y: tg.heaviside([-1.0, 0.0, 1.0], y) ** 2, [y])
    for f in (tg.lerp, tg.addcmul, tg.addcdiv, tg.linear_interpolate):
        check_grads(f, [x, y, z])


@pytest.mark.parametrize("x", [2.0, -2.0, 0.0])
def test_derivatives_where_they_jump(x):
    at = tg.asarray(np.float64(x))
    assert tg.grad(lambda x: tg.fmod(x, 2.0))(at).item() == 1
    assert tg.grad(lambda x: tg.modf(x)[0])(at).item() == 1
    assert tg.grad(lambda x: tg.heaviside(x, 0.5))(at).item() == 0
    assert tg.grad(tg.fabs)(at).item() == np.sign(x)
