"""Float32 derivatives at magnitudes near the ends of the dtype's range, against those in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

S = tg.special
SIZES = 10.0 ** np.arange(-37.0, 38.0, 1.5)
NEAR_ONE = 1 - 0.7 * 2.0 ** -np.arange(1, 23)
PAIRS = np.stack([SIZES, SIZES * np.linspace(0.3, -3, SIZES.size)])
SMOOTH = {
    "square reciprocal abs positive": np.concatenate([SIZES, -SIZES]),
    "sin cos tan sinh cosh exp expm1 exp2 log_sigmoid erf": np.concatenate([SIZES[SIZES < 1], -SIZES[SIZES < 1]]),
    "asin acos atanh": np.concatenate([NEAR_ONE, -NEAR_ONE, SIZES[SIZES < 0.5]]),
    "asinh atan cbrt": np.concatenate([SIZES, -SIZES]),
    "log log2 log10 log1p sqrt rsqrt": SIZES,
    "acosh": np.concatenate([SIZES[SIZES > 1], 2 - NEAR_ONE]),
    "special.spence special.i0e special.i1e special.k0e special.k1e": SIZES,
    "special.erfcx special.dawsn special.log_ndtr special.exprel": SIZES[SIZES < 5],
    "atan2 hypot special.pseudo_huber": PAIRS[:, :40],
    "divide logaddexp": PAIRS,
}
CASES = [(name, at) for names, at in SMOOTH.items() for name in names.split()]


def _gradients(f: Callable[..., Any], operands: Sequence[Any], dtype: Any) -> list[np.ndarray]:
    operands = [tg.asarray(np.asarray(x, np.float32), dtype=dtype) for x in operands]
    with np.errstate(all="ignore"):
        gradients = tg.grad(lambda *xs: tg.sum(f(*xs)), tuple(range(len(operands))))(*operands)
    return [np.asarray(g, np.float64) for g in gradients]


@pytest.mark.parametrize(("name", "at"), CASES, ids=[name for name, _ in CASES])
def test_derivatives_in_float32_are_those_in_float64(name: str, at: np.ndarray) -> None:
    f = getattr(S, name[8:]) if name.startswith("special.") else getattr(tg, name)
    operands = np.atleast_2d(at)
    if name == "special.pseudo_huber":
        operands = np.abs(operands)
    limits = np.finfo(np.float32)
    for got, expected in zip(_gradients(f, operands, "float32"), _gradients(f, operands, "float64")):
        held = (np.abs(expected) > limits.tiny) & (np.abs(expected) < limits.max)
        assert held.any()
        np.testing.assert_allclose(got[held], expected[held], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e18, 1e22, 1e30])
def test_derivatives_of_complex_numbers(size: float) -> None:
    """The gradient of the phase is ``i z / |z|**2``, of the magnitude ``z / |z|``."""
    z = np.array([0.6 + 0.8j, -0.8 + 0.6j, -1j])
    x = tg.asarray((size * z).astype(np.complex64))
    np.testing.assert_allclose(tg.grad(lambda x: tg.sum(tg.angle(x)))(x).numpy() * size, 1j * z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tg.grad(lambda x: tg.sum(tg.abs(x)))(x), z, rtol=1e-5, atol=1e-6)


def test_a_cotangent_may_make_up_for_a_large_square() -> None:
    """The derivative of ``c / x`` is ``-c / x**2``, also where ``1 / x**2`` is beyond the dtype."""
    for c, x in ((1e-30, 1e-25), (1e30, 1e25)):
        slope = tg.grad(lambda x: c * tg.reciprocal(x))(tg.asarray(np.float32(x)))  # noqa: B023
        np.testing.assert_allclose(slope, -c / x / x, rtol=1e-5)


def test_powers_of_negative_bases_that_overflow() -> None:
    """They have gradient 0 in the exponent, as all negative bases; where the power is NaN, the gradient is."""
    x, y = np.float32([-1e20, -2.0, 3.0, -2.0]), np.float32([4.0, 2.0, 2.0, 0.5])
    with np.errstate(over="ignore", invalid="ignore"):
        slopes = tg.grad(lambda y: tg.sum(tg.power(x, y)))(tg.asarray(y))
    np.testing.assert_allclose(slopes, [0, 0, 9 * np.log(3), np.nan], 1e-6)


def test_inv_boxcox1p_near_its_lower_end() -> None:
    """``exp(y) - 1``, of which float32 has nothing left but -1; its derivative is ``exp(y)``."""
    slope = tg.grad(lambda y: S.inv_boxcox1p(y, np.float32(1e-30)))(tg.asarray(np.float32(-20)))
    np.testing.assert_allclose(slope, np.exp(-20), rtol=1e-5)
