"""Membership."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tapegrad as tg

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 2.0, np.nan, np.inf])


@given(
    hnp.arrays("float64", hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4), elements=NUMBERS),
    hnp.arrays("float64", hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4), elements=NUMBERS),
    st.booleans(),
)
def test_it_is_numpys(x: Any, among: Any, invert: bool) -> None:
    np.testing.assert_array_equal(tg.isin(x, among, invert=invert).numpy(), np.isin(x, among, invert=invert))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "complex128"])
def test_dtypes(dtype: str) -> None:
    x, among = np.array([[0, 1], [1, 5]]).astype(dtype), np.array([1, 7]).astype(dtype)
    got = tg.isin(tg.asarray(x), among)
    assert got.dtype == tg.bool
    np.testing.assert_array_equal(got.numpy(), np.isin(x, among))


def test_numbers_and_keywords() -> None:
    tenths = tg.asarray(np.array([0.1, 0.2]))
    assert tg.isin(tenths, [0.1]).tolist() == [True, False] and bool(tg.isin([0.1], tenths))
    assert tg.isin(tg.asarray([1, 2]), [1.5, 2.0]).tolist() == [False, True]
    assert bool(tg.isin(2, [1, 2])) and not bool(tg.isin(element=3, test_elements=2))
    assert tg.isin([1, 2, 3], 2, assume_unique=True).tolist() == [False, True, False]
