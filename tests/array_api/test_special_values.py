"""On the CPU each elementwise function of the standard gives NumPy's bits: zeros of both signs, inf and NaN, too."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tapegrad as tg

ONE = (
    "abs acos acosh asin asinh atan atanh ceil conj cos cosh exp expm1 floor imag isfinite isinf isnan log log10 log1p"
    " log2 negative positive real reciprocal round sign signbit sin sinh sqrt square tan tanh trunc"
).split()
TWO = (
    "add atan2 copysign divide equal floor_divide greater greater_equal hypot less less_equal logaddexp maximum minimum"
    " multiply nextafter not_equal pow remainder subtract"
).split()
ODD = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 5e-324, np.pi / 2]
DTYPES = ["float32", "float64", "complex64", "complex128"]
REAL_ONLY = {
    "ceil", "floor", "trunc", "signbit", "atan2", "copysign", "floor_divide", "hypot", "logaddexp", "nextafter",
    "remainder",
}  # fmt: skip


def _values(dtype: str) -> np.ndarray:
    if dtype.startswith("complex"):
        return np.array([complex(a, b) for a in ODD for b in ODD], dtype)
    return np.array(ODD, dtype)


def _parts(x: np.ndarray) -> list[np.ndarray]:
    return [x.real, x.imag] if x.dtype.kind == "c" else [x]


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal, and with the same sign of zero; the sign of a NaN is nobody's."""
    assert got.dtype == wanted.dtype
    for g, w in zip(_parts(got), _parts(wanted), strict=True):
        np.testing.assert_array_equal(g, w)
        if w.dtype.kind == "f":
            numbers = ~np.isnan(w)
            np.testing.assert_array_equal(np.signbit(g[numbers]), np.signbit(w[numbers]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE)
def test_of_one_operand(name: str, dtype: str) -> None:
    if dtype.startswith("complex") and name in REAL_ONLY:
        return
    x = _values(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_same_bits(getattr(tg, name)(x).numpy(), getattr(np, name)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TWO)
def test_of_two_operands(name: str, dtype: str) -> None:
    if dtype.startswith("complex") and name in REAL_ONLY:
        return
    x = _values(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_same_bits(getattr(tg, name)(x[:, None], x).numpy(), getattr(np, name)(x[:, None], x))


def test_a_zero_of_the_other_sign_is_found() -> None:
    with pytest.raises(AssertionError):
        assert_same_bits(np.array([0.0]), np.array([-0.0]))
