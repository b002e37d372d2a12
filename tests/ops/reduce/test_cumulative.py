"""Running sums and products."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError
from tapegrad.testing import check_grads


@pytest.mark.parametrize("shape", [(3, 7), (150, 160), (0, 3), (4, 1)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_values(shape, axis, rng):
    x = rng.uniform(0.9, 1.1, shape)
    for view in (x, x[:, ::-1]):
        t = tg.asarray(view, copy=False)
        np.testing.assert_array_equal(tg.cumulative_sum(t, axis=axis).numpy(), np.cumsum(view, axis))
        np.testing.assert_allclose(tg.cumulative_prod(t, axis=axis).numpy(), np.cumprod(view, axis), rtol=1e-12)
        np.testing.assert_array_equal(tg.diff(t, axis=axis, n=2).numpy(), np.diff(view, axis=axis, n=2))
    first = tg.cumulative_sum(x, axis=axis, include_initial=True)
    np.testing.assert_array_equal(tg.diff(first, axis=axis).shape, shape)
    assert tg.cumsum(x).shape == (x.size,) and tg.cumprod(x, axis).shape == shape


def test_initial_and_dtypes():
    assert tg.cumulative_sum([1, 2, 3], include_initial=True).tolist() == [0, 1, 3, 6]
    assert tg.cumulative_prod([1, 2, 3], include_initial=True).tolist() == [1, 1, 2, 6]
    assert tg.cumulative_sum(np.full(3, 100, np.int8)).tolist() == [100, 200, 300]
    half = tg.cumulative_sum(tg.ones((4096,), dtype="float16"))
    assert half.dtype == np.float16 and half[-1].item() == 4096
    assert tg.cumulative_sum([1.5], dtype="int64").tolist() == [1]
    assert tg.diff([True, False, False]).tolist() == [True, False]
    assert tg.diff([1, 4], prepend=[0], append=[9]).tolist() == [1, 3, 5]


def test_gradients(rng):
    x = rng.standard_normal((3, 5))
    for axis in (0, 1):
        check_grads(lambda x, axis=axis: tg.cumulative_sum(x, axis=axis) ** 2, [x])
        check_grads(lambda x, axis=axis: tg.cumulative_sum(x, axis=axis, include_initial=True), [x], order=1)
    check_grads(lambda x: tg.cumulative_prod(x, axis=1), [x])
    check_grads(lambda x: tg.diff(x, axis=0, n=2) ** 2, [x])
    x[1, 1:3] = 0
    check_grads(lambda x: tg.cumulative_prod(x, axis=1), [x])
    j = tg.jacobian(lambda x: tg.cumulative_sum(x))(tg.asarray(x[0]))
    np.testing.assert_array_equal(j.numpy(), np.tril(np.ones((5, 5))))


def test_errors():
    with pytest.raises(ShapeError, match="name the axis"):
        tg.cumulative_sum(np.ones((2, 2)))
    with pytest.raises(AxisError, match="cumulative_prod: axis 3"):
        tg.cumulative_prod(np.ones(2), axis=3)
