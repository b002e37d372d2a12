"""Clipping against its formulas in NumPy, alone and within optimizers."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim
from tapegrad.errors import AxisError, DTypeError, ShapeError, TapegradError


def test_clipping_by_the_global_norm() -> None:
    grads = [tg.constant([3.0, 0.0]), None, tg.constant([[4.0]])]
    clipped, norm = optim.clip_by_global_norm(grads, 1.0)
    assert norm.item() == 5.0 and clipped[1] is None
    np.testing.assert_allclose(clipped[0].numpy(), [0.6, 0.0], rtol=1e-7)
    np.testing.assert_allclose(clipped[2].numpy(), [[0.8]], rtol=1e-7)
    same, _ = optim.clip_by_global_norm(grads, 6.0)
    assert same[0].tolist() == [3.0, 0.0]
    overflowed, _ = optim.clip_by_global_norm([tg.constant([np.inf, 1.0])], 1.0)
    assert np.isnan(overflowed[0].numpy()).all()
    with pytest.raises(ShapeError, match="there is no gradient"):
        optim.clip_by_global_norm([None], 1.0)
    with pytest.raises(TapegradError, match="wanted a positive clip_norm"):
        optim.clip_by_global_norm(grads, 0.0)


def test_clipping_by_norm() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    norm = np.sqrt((x**2).sum())
    np.testing.assert_allclose(optim.clip_by_norm(x, 0.5).numpy(), x * 0.5 / norm, rtol=1e-12)
    np.testing.assert_array_equal(optim.clip_by_norm(x, 1e3).numpy(), x)
    for axes in (1, (0, 2), [0, -1], ()):
        axis = axes if isinstance(axes, int) else tuple(axes)
        norms = np.sqrt((x**2).sum(axis, keepdims=True))
        wanted = x * 1.0 / np.maximum(norms, 1.0)
        np.testing.assert_allclose(optim.clip_by_norm(x, 1.0, axes).numpy(), wanted, rtol=1e-12)
    half = optim.clip_by_norm(np.full(4, 300.0, np.float16), 300.0)  # 90000 is beyond float16
    assert half.dtype == np.float16 and half.numpy().tolist() == [150.0] * 4
    assert np.isnan(optim.clip_by_norm([np.inf, 1.0], 1.0).numpy()).all()
    assert optim.clip_by_norm(np.zeros((0, 3)), 1.0).shape == (0, 3) and optim.clip_by_norm(-2.0, 1.0).item() == -1
    tg.testing.check_grads(lambda t: optim.clip_by_norm(t, 0.5), (x,))
    with pytest.raises(TapegradError, match="wanted a positive clip_norm, got nan"):
        optim.clip_by_norm(x, float("nan"))
    with pytest.raises(DTypeError, match="clip_by_norm: wanted real floats, got int64"):
        optim.clip_by_norm([1, 2], 1.0)
    with pytest.raises(AxisError):
        optim.clip_by_norm(x, 1.0, 3)


def test_clipping_by_value() -> None:
    x = np.array([-3.0, -0.5, 0.0, np.nan, np.inf])
    np.testing.assert_array_equal(optim.clip_by_value(x, -1.0, 2.0).numpy(), [-1, -0.5, 0, np.nan, 2])
    np.testing.assert_array_equal(optim.clip_by_value(x[:3], [-1.0, 0, 1], [0.0, 1, 2]).numpy(), [-1, 0, 1])
    with pytest.raises(TapegradError, match="the limits 2.0 and -1.0 are in wrong order"):
        optim.clip_by_value(x, 2.0, -1.0)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"global_clipnorm": 1.0}, ([-0.6, 0.0], [[-0.8]])),
        ({"clipnorm": 3.5}, ([-3.0, 0.0], [[-3.5]])),
        ({"clipvalue": 0.5}, ([-0.5, 0.0], [[-0.5]])),
        ({"clipnorm": None}, ([-3.0, 0.0], [[-4.0]])),
    ],
)
def test_optimizers_clip(option: dict, wanted: tuple) -> None:
    v, w = tg.Variable([0.0, 0.0]), tg.Variable([[0.0]], dtype="float64")
    optim.SGD(1.0, **option).apply([[3.0, 0.0], [[4.0]]], [v, w])
    np.testing.assert_allclose(v.numpy(), wanted[0], rtol=1e-6)
    np.testing.assert_allclose(w.numpy(), wanted[1], rtol=1e-6)
