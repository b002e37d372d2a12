"""Shape operations: NumPy's values, views where NumPy makes views, exact gradients."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError
from tapegrad.testing import check_grads

CALLS = {
    "reshape": (lambda m, x: m.reshape(x, (-1, 6)), True),
    "permute": (lambda m, x: m.permute_dims(x, (2, 0, 1)), True),
    "transpose": (lambda m, x: m.transpose(x), True),
    "transpose axes": (lambda m, x: m.transpose(x, (0, -1, 1)), True),
    "matrix_transpose": (lambda m, x: m.matrix_transpose(x), True),
    "broadcast_to": (lambda m, x: m.broadcast_to(x[:1, :, None], (2, x.shape[1], 3, x.shape[2])), True),
    "expand_dims": (lambda m, x: m.expand_dims(x, axis=(0, -2)), True),
    "squeeze": (lambda m, x: m.squeeze(m.expand_dims(x, axis=(0, 4))), True),
    "squeeze axis": (lambda m, x: m.squeeze(m.expand_dims(x, axis=(0, 4)), axis=-1), True),
    "moveaxis": (lambda m, x: m.moveaxis(x, (0, 1), (-1, 0)), True),
    "swapaxes": (lambda m, x: m.swapaxes(x, 0, -1), True),
    "reshape of a strided view": (lambda m, x: m.reshape(m.swapaxes(x, 0, 1), (-1,)), False),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("shape", [(2, 3, 6), (20, 30, 60)])
def test_values_and_views(case, shape, rng):
    call, view = CALLS[case]
    x = rng.standard_normal(shape)
    t = tg.asarray(x)
    got = call(tg, t)
    np.testing.assert_array_equal(got.numpy(), call(np, x))
    assert np.shares_memory(got.numpy(), t.numpy()) == view


@pytest.mark.parametrize("case", CALLS)
def test_gradients(case, rng):
    call, _ = CALLS[case]
    x = rng.standard_normal((2, 3, 6))
    check_grads(lambda x: call(tg, x) ** 2, [x])
    t = tg.asarray(x[:, :, :2] if case in ("swapaxes", "moveaxis", "transpose") else x)
    j = tg.jacobian(lambda x: call(tg, x) * 2)(t).numpy()
    ct = rng.standard_normal(j.shape[: j.ndim - 3])
    g = tg.grad(lambda x: tg.sum(call(tg, x) * 2 * ct))(t).numpy()
    np.testing.assert_allclose(np.tensordot(ct, j, ct.ndim), g, atol=1e-12)


def test_empty_and_zero_dimensions():
    assert tg.reshape(tg.zeros((0, 3)), (3, 0)).shape == (3, 0)
    assert tg.reshape(tg.asarray(1.0), (1, 1)).tolist() == [[1.0]]
    assert tg.broadcast_to(tg.ones((1, 3)), (0, 3)).shape == (0, 3)
    assert tg.grad(lambda x: tg.sum(tg.broadcast_to(x, (0, 3))))(tg.ones((3,))).tolist() == [0, 0, 0]
    assert tg.squeeze(tg.ones((1, 1))).shape == () and tg.transpose(tg.asarray(1.0)).shape == ()


def test_errors():
    x = tg.ones((2, 3))
    for call, error, words in (
        (lambda: tg.reshape(x, (4,)), ShapeError, r"reshape: \(2, 3\) has 6 elements"),
        (lambda: tg.reshape(x, (-1, -1)), ShapeError, "-1"),
        (lambda: tg.reshape(x, (-1, 4)), ShapeError, "-1"),
        (lambda: tg.permute_dims(x, (0, 0)), AxisError, "permute_dims"),
        (lambda: tg.broadcast_to(x, (3, 3)), ShapeError, "broadcast_to"),
        (lambda: tg.squeeze(x, axis=0), ShapeError, "squeeze: axis 0"),
        (lambda: tg.expand_dims(x, axis=4), AxisError, "expand_dims"),
        (lambda: tg.matrix_transpose(tg.ones((2,))), ShapeError, "two dimensions"),
        (lambda: tg.moveaxis(x, (0, 0), (0, 1)), AxisError, "twice"),
        (lambda: tg.swapaxes(x, 0, 2), AxisError, "swapaxes"),
    ):
        with pytest.raises(error, match=words):
            call()
