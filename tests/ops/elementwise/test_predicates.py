"""Questions about elements and arrays."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError

ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0])
PAIRS = [
    (np.array([1.0, 2.0]), np.array([1.0 + 1e-9, 2.1])), (ODD, ODD), (ODD, ODD[::-1].copy()), (ODD, np.array([1.0])),
    (np.arange(3), np.arange(3) + 1e-9), (np.array([1j, 2]), np.array([1j + 1e-9, np.nan])), (ODD, ODD[:3, None]),
    (np.array([True, False]), np.array([1, 0])),
]  # fmt: skip


@pytest.mark.parametrize("name", ["isposinf", "isneginf", "isreal", "iscomplex"])
def test_elements(name):
    same(name, ODD)
    same(name, np.arange(3))
    if name in ("isreal", "iscomplex"):
        same(name, np.array([1j, 2, 0, np.nan]))
    else:
        with pytest.raises(DTypeError, match=name):
            getattr(tg, name)(1j)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("equal_nan", [False, True])
def test_close(pair, equal_nan):
    same("isclose", *pair, equal_nan=equal_nan)
    same("isclose", *pair, rtol=0.5, atol=0.1, equal_nan=equal_nan)
    assert tg.allclose(*pair, equal_nan=equal_nan) is bool(np.allclose(*pair, equal_nan=equal_nan))


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_arrays(pair):
    assert tg.array_equal(*pair) is bool(np.array_equal(*pair))
    assert tg.array_equal(*pair, equal_nan=True) is bool(np.array_equal(*pair, equal_nan=True))
    assert tg.array_equiv(*pair) is bool(np.array_equiv(*pair))


def test_shapes_that_do_not_broadcast():
    assert tg.array_equiv([1, 2], [1, 2, 3]) is False


def test_facts():
    x = np.zeros((2, 3))
    assert (tg.ndim(x), tg.shape(x), tg.size(x), tg.size(x, 1)) == (2, (2, 3), 6, 3)
    assert tg.iscomplexobj(1j) and not tg.iscomplexobj(1.0) and tg.isrealobj(1.0)
