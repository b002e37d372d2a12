"""Reductions that pass over NaN."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:Mean of empty", "ignore:Degrees of freedom")


@pytest.fixture
def holes(rng):
    a = rng.normal(size=(3, 4))
    a[0, 1] = a[2] = np.nan
    return a


@pytest.mark.parametrize("name", ["nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 1)])
def test_values(name, axis, holes):
    for x in (holes, holes.astype("f4"), np.arange(12).reshape(3, 4), holes[:0] if name[3:5] != "ma" else holes):
        if not x.size and (name in ("nanmax", "nanmin")):
            continue
        same(name, x, axis, rtol=1e-6 if x.dtype == "f4" else 1e-14)
        same(name, x, axis=axis, keepdims=True, rtol=1e-6 if x.dtype == "f4" else 1e-14)


def test_other_arguments(holes):
    same("nanvar", holes, 0, ddof=1)
    same("nanstd", holes, 1, correction=2)
    same("nanvar", holes + 1j * holes[:, ::-1], 0, rtol=1e-14)
    same("nanmean", holes + 1j, 0)
    for name in ("nancumsum", "nancumprod"):
        for axis in (None, 0, 1):
            same(name, holes, axis, rtol=1e-14)


def test_positions(holes):
    for name in ("nanargmax", "nanargmin"):
        same(name, holes[:2])
        same(name, holes[:2], axis=1, keepdims=True)
        same(name, np.arange(4))
        with pytest.raises(ValueError, match=f"{name}: a slice along axis 1"):
            getattr(tg, name)(holes, axis=1)
    with pytest.raises(ShapeError, match="empty"):
        tg.nanmax(np.zeros((0, 2)), axis=0)


@pytest.mark.parametrize("name", ["nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd", "nancumsum"])
def test_gradients(name, holes):
    present = np.where(np.isnan(holes[:2]), 0, holes[:2])

    def f(x):
        return getattr(tg, name)(tg.where(np.isnan(holes[:2]), np.nan, x), axis=1)

    check_grads(f, [present])
    x = tg.asarray(holes[:2])
    g = tg.grad(lambda x: tg.sum(getattr(tg, name)(x, axis=1)))(x).numpy()
    assert np.isfinite(g).all() and g[0, 1] == 0


def test_ties_share():
    g = tg.grad(lambda x: tg.nanmax(x))(tg.asarray([2.0, np.nan, 2.0, 1.0]))
    assert g.tolist() == [0.5, 0, 0.5, 0]
