"""The losses against torch where it is installed, and against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(3)


def compare(name: str, x: Any, target: Any, **options: Any) -> None:
    """Value and gradient of one of our losses and torch's."""
    torch = pytest.importorskip("torch")
    theirs_x = torch.tensor(x, requires_grad=True)
    theirs = getattr(torch.nn.functional, name)(
        theirs_x,
        torch.tensor(target),
        **{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()},
    )
    theirs.sum().backward()
    ours_x = tg.asarray(x)
    with tg.GradientTape() as tape:
        tape.watch(ours_x)
        ours = getattr(F, name)(ours_x, target, **options)
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tape.gradient(ours, ours_x).numpy(), theirs_x.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (5,)])
def test_cross_entropy_like_torch(reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...]) -> None:
    x = rng.normal(size=shape) * 4
    weight = rng.random(5) if weighted else None
    labels = np.asarray(rng.integers(0, 5, size=shape[:1] + shape[2:] if len(shape) > 1 else ()))
    if labels.size > 1:
        labels.flat[0] = -100
    compare("cross_entropy", x, labels, reduction=reduction, label_smoothing=smoothing, weight=weight)
    shares = rng.random(shape)
    compare("cross_entropy", x, shares, reduction=reduction, label_smoothing=smoothing, weight=weight)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_like_torch(reduction: str, weighted: bool) -> None:
    x = np.log(rng.random((6, 5)))
    weight = rng.random(5) if weighted else None
    compare("nll_loss", x, np.array([0, 1, 2, 3, -100, 4]), reduction=reduction, weight=weight)
    compare("nll_loss", x, np.array([0, 1, 2, 3, 7, 4]), reduction=reduction, weight=weight, ignore_index=7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mse_loss", {}),
        ("l1_loss", {}),
        ("smooth_l1_loss", {}),
        ("smooth_l1_loss", {"beta": 0.3}),
        ("smooth_l1_loss", {"beta": 0.0}),
        ("huber_loss", {}),
        ("huber_loss", {"delta": 0.3}),
        ("binary_cross_entropy_with_logits", {}),
        ("binary_cross_entropy_with_logits", {"weight": rng.random(4), "pos_weight": rng.random(4)}),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_regression_like_torch(name: str, options: dict[str, Any], reduction: str) -> None:
    compare(name, rng.normal(size=(3, 4)) * 2, rng.random((3, 4)), reduction=reduction, **options)


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
