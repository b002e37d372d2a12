"""Angles, and complex numbers from and to their parts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError
from tapegrad.testing import check_grads


@pytest.fixture(params=["float64", "float32", "float16"])
def x(request, rng):
    return rng.normal(size=(3, 4)).astype(request.param)


@pytest.mark.parametrize("name", ["deg2rad", "rad2deg", "radians", "degrees", "sinc", "angle", "real_if_close"])
def test_values(name, x):
    if name == "sinc":  # NumPy rounds each of its steps
        x = x.astype(np.result_type(x, "float32"))
    same(name, x)
    same(name, x[:0])
    same(name, np.arange(-2, 3)) if name != "real_if_close" else None


def test_sinc_of_a_half_type_is_rounded_once(rng):
    x = rng.normal(size=300).astype("float16")
    y = tg.sinc(x)
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, np.sinc(x.astype("float32")).astype("float16"))


def test_angles_of_complex_numbers(rng):
    z = rng.normal(size=6) + 1j * rng.normal(size=6)
    edges = np.array([0j, complex(-0.0, 0.0), complex(0.0, -0.0), complex(-0.0, -0.0), -1, 1j])
    for a in (z, z.astype("c8"), edges):
        same("angle", a)
        same("angle", a, deg=True)
    for sign in (1.0, -1.0):
        g = tg.grad(tg.angle)(tg.asarray(np.complex128(sign * 0j)))
        assert g.item() == 0
    x = tg.asarray(np.array([-2.0, 3.0]))
    assert tg.grad(lambda x: tg.sum(tg.angle(x)))(x).tolist() == [0, 0]


def test_complex_and_polar(rng):
    a, b = rng.normal(size=(2, 3))
    np.testing.assert_array_equal(tg.complex(a, b), a + 1j * b)
    assert tg.complex(a.astype("f4"), b.astype("f4")).dtype == np.complex64
    assert tg.complex(1.0, float("inf")).item() == complex(1, float("inf"))
    np.testing.assert_allclose(tg.polar(a, b), a * np.exp(1j * b))
    with pytest.raises(DTypeError, match="complex"):
        tg.complex(1j, 2.0)


def test_gradients(rng):
    a, b = rng.uniform(0.3, 1, (2, 3))
    check_grads(lambda x, y: tg.abs(tg.complex(x, y) ** 3), [a, b])
    check_grads(lambda x, y: tg.real(tg.polar(x, y) * (1 + 2j)), [a, b])
    check_grads(lambda x, y: tg.angle(tg.complex(x, y)), [a, -b])
    check_grads(lambda x: tg.deg2rad(x) * tg.rad2deg(x), [a])
    check_grads(lambda x: tg.sinc(x), [np.array([0.0, 1e-9, 0.1, 0.24, 0.26, 1.0, -2.4])])
    check_grads(lambda x: tg.unwrap(x, axis=0) ** 2, [np.cumsum(rng.uniform(2, 4, (6, 2)), 0) % 6])


def test_sinc_at_zero_to_fourth_order():
    f, at = tg.sinc, tg.asarray(np.float64(0.0))
    found = [1.0]
    for _ in range(4):
        f = tg.grad(f)
        found.append(f(at).item())
    np.testing.assert_allclose(found[1:], [0, -(np.pi**2) / 3, 0, np.pi**4 / 5], rtol=1e-12)


@pytest.mark.parametrize("kwargs", [{}, {"discont": 4.0}, {"axis": 0}, {"period": 5.0}])
def test_unwrap(kwargs, rng):
    same("unwrap", np.cumsum(rng.normal(size=(4, 20)) * 3, 1) % 6 - 3, **kwargs)


@pytest.mark.parametrize("period", [11, 12])
def test_unwrap_of_integers(period):
    same("unwrap", np.arange(20) * 7 % period, period=period)


def test_unwrap_passes_the_gradient(rng):
    x = tg.asarray(rng.uniform(-9, 9, 7))
    assert tg.grad(lambda x: tg.sum(tg.unwrap(x)))(x).tolist() == [1] * 7


def test_real_if_close(rng):
    x = rng.normal(size=4)
    same("real_if_close", x + 1e-16j)
    same("real_if_close", x + 1e-3j)
    same("real_if_close", x + 1e-3j, tol=0.01)
    assert tg.grad(lambda z: tg.sum(tg.real(tg.real_if_close(z) ** 2)))(tg.asarray(x + 0j)).dtype == np.complex128
