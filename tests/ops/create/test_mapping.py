"""Functions of slices, and NumPy's other ways to make an array."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_along_an_axis(axis, rng):
    x = rng.normal(size=(2, 3, 4))
    for f in (lambda v: v * 2, lambda v: v[0] + v[-1], lambda v: v[:2]):
        same("apply_along_axis", f, axis, x)
    got = tg.apply_along_axis(lambda v, k, *, m: tg.outer(v, v) * k + m, axis, x, 2.0, m=1.0)
    wanted = np.apply_along_axis(lambda v: np.outer(v, v) * 2 + 1, axis, x)
    np.testing.assert_array_equal(got, wanted)
    check_grads(lambda x: tg.apply_along_axis(lambda v: tg.sort(v) ** 2, axis, x), [x])
    with pytest.raises(ShapeError, match="no vectors"):
        tg.apply_along_axis(lambda v: v, 0, x[:, :0])


def test_over_axes(rng):
    x = rng.normal(size=(2, 3, 4))
    got = tg.apply_over_axes(lambda a, axis: tg.sum(a, axis=axis), x, [0, -1])
    np.testing.assert_allclose(got, np.apply_over_axes(np.sum, x, [0, -1]))
    with pytest.raises(ShapeError, match="apply_over_axes"):
        tg.apply_over_axes(lambda a, axis: tg.sum(a), x, 0)


def test_making(rng):
    x = rng.normal(size=(2, 3))
    same("array", [1, 2, 3], ndmin=3)
    same("array", x, np.float32)
    same("copy", x)

    np.testing.assert_array_equal(tg.row_stack([x, x]), np.vstack([x, x]))
    same("fromfunction", lambda i, j: i + j * 2, (2, 3), dtype=int)
    check_grads(lambda x: tg.copy(x) ** 2, [x])
    check_grads(lambda x: tg.array([x[0], x[1] * 2], ndmin=3) ** 2, [x])


def test_methods(rng):
    x = rng.normal(size=(3, 4))
    t = tg.asarray(x)
    for name, args in (
        ("ptp", (0,)), ("diagonal", (1,)), ("trace", ()), ("copy", ()), ("dot", (x.T,)), ("cumprod", (1,)),
        ("argsort", (0,)), ("argsort", (None,)), ("compress", ([1, 0, 1], 0)), ("argpartition", (2,)),
    ):  # fmt: skip
        wanted = np.ptp(x, *args) if name == "ptp" else getattr(x, name)(*args)
        np.testing.assert_allclose(getattr(t, name)(*args), wanted)
    assert tg.asarray([1.0, 2.0, 3.0]).searchsorted(2.0, side="right").item() == 2
