"""Dropout and its kin: what is dropped together, what is kept on average, what comes back when run again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(4)


@pytest.fixture(autouse=True)
def seed() -> None:
    tg.random.seed(9)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("lead", [(40, 50), (500,)])
def test_whole_channels(dims: int, lead: tuple[int, ...]) -> None:
    x = np.ones((*lead, *(3, 2, 2)[:dims]))
    f = getattr(F, f"dropout{dims}d")
    y = f(x, 0.3).numpy().reshape(*lead, -1)
    assert np.array_equal(y, np.broadcast_to(y[..., :1], y.shape))
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7])
    assert 0.2 < np.mean(y == 0) < 0.4
    assert np.array_equal(f(x, 0.3, training=False).numpy(), x)
    assert not f(x, 1.0).numpy().any()
    with pytest.raises(ShapeError, match=f"dropout{dims}d: wanted input"):
        f(np.ones(dims), 0.3)
    with pytest.raises(TapegradError, match="rate from 0 to 1"):
        f(x, 1.5)


@pytest.mark.parametrize("name", ["alpha_dropout", "feature_alpha_dropout"])
def test_alpha_dropout_keeps_mean_and_variance(name: str) -> None:
    x = rng.normal(size=(2000, 100, 1))
    f = getattr(F, name)
    y = f(x, 0.2, training=True).numpy()
    assert abs(y.mean()) < 0.01 and abs(y.std() - 1) < 0.01
    low = y.min()
    assert 0.15 < np.mean(np.isclose(y, y[np.unravel_index(np.argmax(np.isclose(y, low)), y.shape)])) or low < -1
    assert np.array_equal(f(x, 0.2).numpy(), x)
    assert not f(x, 1.0, training=True).numpy().any()


def test_alpha_dropout_of_channels_drops_them_whole() -> None:
    x = np.ones((50, 20, 4))
    y = F.feature_alpha_dropout(x, 0.5, training=True).numpy()
    assert np.array_equal(y, np.broadcast_to(y[..., :1], y.shape)) and len(np.unique(y)) == 2
    with pytest.raises(ShapeError, match="feature_alpha_dropout"):
        F.feature_alpha_dropout(np.ones(3), 0.5)


def test_zoneout_takes_one_or_the_other() -> None:
    h, x = np.zeros(10000), np.ones(10000)
    y = F.zoneout(h, x, 0.3).numpy()
    assert set(y) == {0.0, 1.0} and abs(y.mean() - 0.7) < 0.02
    np.testing.assert_allclose(F.zoneout(h, x, 0.3, training=False).numpy(), 0.7)
    with pytest.raises(ShapeError, match="zoneout"):
        F.zoneout(h, x[:3])


def test_dropconnect() -> None:
    x, w, b = rng.normal(size=(4, 3)), rng.normal(size=(2, 3)), rng.normal(size=2)
    np.testing.assert_allclose(F.simplified_dropconnect(x, w, b, training=False).numpy(), x @ w.T + b, rtol=1e-12)
    mask = rng.random((4, 2, 3)) < 0.5
    want = np.einsum("nk,nuk->nu", x, w * mask / 0.75) + b
    np.testing.assert_allclose(F.simplified_dropconnect(x, w, b, 0.25, mask=mask).numpy(), want, rtol=1e-12)
    one = F.simplified_dropconnect(np.ones((1000, 3)), w, ratio=0.5, use_batchwise_mask=False).numpy()
    assert len(np.unique(one, axis=0)) == 1
    many = F.simplified_dropconnect(np.ones((1000, 3)), w, ratio=0.5).numpy()
    assert len(np.unique(many, axis=0)) > 10
    np.testing.assert_allclose(many.mean(0), w.sum(1), atol=0.3)
    with pytest.raises(ShapeError, match="simplified_dropconnect"):
        F.simplified_dropconnect(x, w[:, :2])


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "alpha_dropout", "rrelu", "gumbel_softmax"])
def test_a_rerun_draws_the_same(name: str) -> None:
    x = tg.asarray(rng.normal(size=(3, 4, 5)))
    options: dict[str, Any] = {} if name == "gumbel_softmax" else {"training": True}
    f = lambda x: tg.sum(tg.sin(getattr(F, name)(x, **options)))
    found = []
    for wrap in (lambda f: f, tg.recompute_grad):
        tg.random.seed(12)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = wrap(f)(x)
        found.append(tape.gradient(y, x).numpy().tobytes())
    assert found[0] == found[1]


def test_rrelu_draws_slopes() -> None:
    y = F.rrelu(-np.ones(1000), 0.2, 0.4, training=True).numpy()
    assert -0.4 <= y.min() < -0.39 and -0.21 < y.max() <= -0.2
    assert F.rrelu(np.array([-1.0, 2.0]), 0.2, 0.4).tolist() == [-0.30000000000000004, 2.0]
