"""Derivatives of complex functions with branch cuts, against complex differences in the four quadrants."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg

NAMES = "sqrt log log2 log10 log1p arcsin arccos arctan arcsinh arccosh arctanh rsqrt".split()
POINTS = np.array(
    [a * x + 1j * b * y for a in (1, -1) for b in (1, -1) for x, y in ((0.4, 0.3), (1.7, 0.6), (0.2, 2.1))]
)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_those_of_complex_differences(name: str) -> None:
    f, step = getattr(tg, name), 1e-6
    expected = (f(POINTS + step).numpy() - f(POINTS - step).numpy()) / (2 * step)
    along_imaginary = (f(POINTS + 1j * step).numpy() - f(POINTS - 1j * step).numpy()) / (2j * step)
    np.testing.assert_allclose(along_imaginary, expected, rtol=1e-8)
    ones = np.ones_like(POINTS)
    np.testing.assert_allclose(tg.jvp(f, (POINTS,), (ones,))[1], expected, rtol=1e-8)
    (cotangent,) = tg.vjp(f, POINTS)[1](ones)
    np.testing.assert_allclose(cotangent, expected.conj(), rtol=1e-8)
