"""The losses against torch where it is installed, and against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(3)


LOSSES = {
    "mse_loss": lambda d: d**2,
    "l1_loss": np.abs,
    "smooth_l1_loss": lambda d: np.where(abs(d) < 1, d**2 / 2, abs(d) - 0.5),
    "huber_loss": lambda d: np.where(abs(d) < 1, d**2 / 2, abs(d) - 0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_differences(name: str) -> None:
    x, y = rng.normal(size=(3, 4)) * 2, rng.normal(size=(3, 4))
    want = LOSSES[name](x - y)
    f = getattr(F, name)
    np.testing.assert_allclose(f(x, y, reduction="none").numpy(), want, rtol=1e-12)
    np.testing.assert_allclose(f(x, y, reduction="sum").item(), want.sum(), rtol=1e-12)
    np.testing.assert_allclose(f(x, y).item(), want.mean(), rtol=1e-12)


def test_binary_cross_entropy_does_not_overflow() -> None:
    x, y = np.array([-1000.0, -1.0, 0.5, 1000.0]), np.array([0.0, 1.0, 0.25, 1.0])
    p = 1 / (1 + np.exp(-x[1:3]))
    want = [0.0, *(-(y[1:3] * np.log(p) + (1 - y[1:3]) * np.log(1 - p))), 0.0]
    got = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-300)
    assert F.binary_cross_entropy_with_logits([-1000.0], [1.0]).item() == 1000.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_weights_and_smoothing(smoothing: float) -> None:
    """Hard labels are shares of 1 - s + s / c and s / c; the mean is over the labels' weights."""
    logits, labels, weight = rng.normal(size=(5, 3)), np.array([0, 2, -100, 1, 1]), np.array([1.0, 2.0, 0.5])
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    kept = labels >= 0
    shares = (1 - smoothing) * np.eye(3)[labels[kept]] + smoothing / 3
    losses = -(shares * weight * logp[kept]).sum(1)
    got = F.cross_entropy(logits, labels, weight=weight, label_smoothing=smoothing)
    np.testing.assert_allclose(got.item(), losses.sum() / weight[labels[kept]].sum(), rtol=1e-12)
    soft = F.cross_entropy(logits[kept], np.eye(3)[labels[kept]], weight=weight, label_smoothing=smoothing)
    np.testing.assert_allclose(soft.item(), losses.mean(), rtol=1e-12)


def test_cross_entropy_by_hand() -> None:
    logits = np.log(np.array([[0.2, 0.8], [0.5, 0.5]]))
    np.testing.assert_allclose(F.cross_entropy(logits, [1, 0]).item(), -(np.log(0.8) + np.log(0.5)) / 2, rtol=1e-12)
    np.testing.assert_allclose(F.cross_entropy(logits, [-100, 0]).item(), -np.log(0.5), rtol=1e-12)
    with np.errstate(invalid="ignore"):
        assert np.isnan(F.cross_entropy(logits, [-100, -100]).item())


def test_an_impossible_other_class_does_not_spoil_the_loss() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]])
    for options in ({}, {"weight": np.ones(3)}):
        np.testing.assert_allclose(F.cross_entropy(logits, [0], **options).item(), np.log(2), rtol=1e-12)
    assert F.nll_loss(np.array([[-1.0, -np.inf]]), [0]).item() == 1.0


def test_what_does_not_fit_is_refused() -> None:
    x = rng.normal(size=(4, 3))
    with pytest.raises(ShapeError, match=r"cross_entropy: wanted labels of shape \(4,\), got \(3,\)"):
        F.cross_entropy(x, [0, 1, 2])
    with pytest.raises(DTypeError, match="cross_entropy: wanted integer labels, got bool"):
        F.cross_entropy(x, [True] * 4)
    with pytest.raises(ShapeError, match=r"cross_entropy: wanted weight \(3,\), got \(4,\)"):
        F.cross_entropy(x, [0] * 4, weight=np.ones(4))
    with pytest.raises(ShapeError, match="wanted probabilities shaped as input"):
        F.cross_entropy(x, rng.random((4, 2)))
    with pytest.raises(ShapeError, match="got a scalar"):
        F.cross_entropy(1.0, 0)
    with pytest.raises(ShapeError, match=r"mse_loss: wanted input and target of one shape, got \(4, 3\) and \(4,\)"):
        F.mse_loss(x, np.ones(4))
    with pytest.raises(TapegradError, match='l1_loss: wanted reduction "mean", "sum" or "none", got "avg"|\'avg\''):
        F.l1_loss(x, x, "avg")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("label", [3, -1])
def test_labels_outside_the_classes_are_refused(weighted: bool, smoothing: float, label: int) -> None:
    with pytest.raises(tg.errors.IndexingError, match=r"cross_entropy: wanted labels in \[0, 3\), got"):
        F.cross_entropy(
            np.ones((2, 3)), [0, label], weight=np.ones(3) if weighted else None, label_smoothing=smoothing
        ).item()
    with pytest.raises(tg.errors.IndexingError, match="nll_loss"):
        F.nll_loss(np.ones((2, 3)), [0, label])
