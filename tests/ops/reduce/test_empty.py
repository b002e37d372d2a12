"""Reductions of no elements: NumPy's values, gradients of no elements, tangents of 0."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg

NAMES = "sum prod mean var std nansum nanmean nanvar nanstd median average logsumexp".split()


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (n, d)
        for n in NAMES
        for d in ("float16", "float32", "float64", "complex128")
        if (n, d) != ("median", "complex128")
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_both_modes_agree(name: str, axis: int | None, dtype: str) -> None:
    x = np.zeros((0, 3), dtype)

    def f(x: tg.Tensor) -> tg.Tensor:
        return getattr(tg, name)(x, axis=axis)

    value, tangent = tg.jvp(f, (x,), (x,))
    expected = (
        np.sum(x, axis) - np.inf
        if name == "logsumexp"
        else getattr(np, "mean" if name == "average" else name)(x, axis=axis)
    )
    np.testing.assert_array_equal(value, expected)
    assert value.dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(tangent, np.zeros(value.shape))
    (gradient,) = tg.vjp(f, x)[1](np.ones(value.shape, value.dtype))
    assert gradient.shape == x.shape


@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_an_empty_mask_of_an_empty_array(name: str) -> None:
    x = np.zeros((0, 3))
    value, tangent = tg.jvp(lambda x: getattr(tg, name)(x, where=np.ones((0, 3), bool)), (x,), (x,))
    assert np.isnan(float(value))
    assert float(tangent) == 0


def test_logmeanexp_of_nothing_is_nan() -> None:
    value, tangent = tg.jvp(tg.nn.functional.logmeanexp, (np.zeros(0),), (np.zeros(0),))
    assert np.isnan(float(value))
    assert float(tangent) == 0
