"""Metrics against their definitions in NumPy, in batches, in captured steps, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import training
from tapegrad.errors import DTypeError, IndexingError, ShapeError, TapegradError

rng = np.random.default_rng(0)
TRUE = rng.integers(0, 4, 90)
SCORES = rng.normal(size=(90, 4)) + 2 * np.eye(4)[TRUE]
WEIGHTS = rng.random(90)
PARTS = [slice(0, 40), slice(40, 40), slice(40, 41), slice(41, 90)]
weighted = pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weighted"])


def taken(metric: Any, y_true: Any, y_pred: Any, weight: Any = None) -> Any:
    """The result after several batches, one of them empty."""
    for part in PARTS:
        metric.update_state(y_true[part], y_pred[part], None if weight is None else weight[part])
    return metric.result().numpy()


@weighted
def test_accuracies(weight: Any) -> None:
    labels = SCORES.argmax(1)
    wanted = np.average(labels == TRUE, weights=weight)
    for metric, y_true, y_pred in (
        (training.Accuracy(), TRUE, labels),
        (training.SparseCategoricalAccuracy(), TRUE, SCORES),
        (training.CategoricalAccuracy(), np.eye(4)[TRUE], SCORES),
    ):
        assert taken(metric, y_true, y_pred, weight) == pytest.approx(wanted, rel=1e-12), metric
    binary = np.average((SCORES[:, 0] > 0.3) == (TRUE == 0), weights=weight)
    assert taken(training.BinaryAccuracy(threshold=0.3), TRUE == 0, SCORES[:, 0], weight) == pytest.approx(binary)
    with pytest.raises(ShapeError, match=r"wanted y_true \(...\) and y_pred \(..., classes\), got \(3,\), \(2, 4\)"):
        training.SparseCategoricalAccuracy().update_state(TRUE[:3], SCORES[:2])


def test_means() -> None:
    mean = training.Mean("loss")
    assert mean.result().item() == 0 and repr(mean) == 'metric "loss"'
    for x in (1.0, [2.0, 3.0], np.zeros((0, 2)), np.float16(6)):
        mean.update_state(x)
    assert mean.result().item() == 3 and mean.result().dtype == np.float64
    mean.reset_state()
    mean.update_state(np.ones((2, 3)), sample_weight=[[1.0], [3.0]])
    mean.update_state([[2.0, 4.0]], sample_weight=2.0)
    assert mean.result().item() == pytest.approx((12 + 12) / (12 + 4))
    many = training.Mean()
    for _ in range(1000):
        many.update_state(np.full(1000, 1e6 + 0.125, np.float32))  # float32 sums would lose the eighths
    assert many.result().item() == 1e6 + 0.125
    with pytest.raises(DTypeError, match="wanted real numbers, got complex"):
        mean.update_state([1j])
    with pytest.raises(ShapeError, match=r"sample_weight \(2,\) does not broadcast to \(3,\)"):
        mean.update_state([1.0, 2.0, 3.0], sample_weight=[1.0, 2.0])


@weighted
def test_a_confusion_matrix(weight: Any) -> None:
    labels = SCORES.argmax(1)
    wanted = np.zeros((4, 4))
    np.add.at(wanted, (TRUE, labels), 1 if weight is None else weight)
    for y_pred in (labels, SCORES):
        metric = training.ConfusionMatrix(4, dtype="int64" if weight is None else "float64")
        np.testing.assert_allclose(taken(metric, TRUE, y_pred, weight), wanted, rtol=1e-12)
        np.testing.assert_allclose(metric.precision().numpy(), np.diag(wanted) / wanted.sum(0), rtol=1e-12)
        np.testing.assert_allclose(metric.recall().numpy(), np.diag(wanted) / wanted.sum(1), rtol=1e-12)
    assert training.ConfusionMatrix(2).precision().tolist() == [0, 0]


def test_labels_that_no_confusion_matrix_has() -> None:
    metric = training.ConfusionMatrix(2)
    metric.update_state([[0, 1], [1, 1]], [[0, 1], [1, 0]])  # (2, 2): labels, not scores of two classes
    wanted = [[1, 0], [1, 2]]
    assert metric.result().tolist() == wanted
    for bad in ([2], [-1]):
        other = training.ConfusionMatrix(2)
        with pytest.raises(IndexingError, match=r"wanted y_pred in \[0, 2\)"):
            other.update_state([0], bad)
            other.result().numpy()  # a GPU tells when it is waited for
    with pytest.raises(DTypeError, match="wanted integer y_true, got float32"):
        metric.update_state([0.0], [1])
    with pytest.raises(ShapeError, match=r"of one shape, got \(1,\), \(2, 3\)"):
        metric.update_state([0], [[1, 1, 1], [1, 1, 1]])
    with pytest.raises(TapegradError, match="positive integer for num_classes"):
        training.ConfusionMatrix(0)
    assert metric.result().tolist() == wanted


def exact_area(y: Any, scores: Any, weight: Any) -> float:
    """The share of pairs of both labels in the right order; half of those with equal scores."""
    pairs = (scores[y == 1][:, None] > scores[y == 0]) + 0.5 * (scores[y == 1][:, None] == scores[y == 0])
    w = weight[y == 1][:, None] * weight[y == 0]
    return float((pairs * w).sum() / w.sum())


@weighted
def test_the_area_under_roc(weight: Any) -> None:
    y = (TRUE > 1).astype(int)
    scores = np.clip(np.round(0.5 + 0.2 * rng.normal(size=90) + 0.2 * y, 2), 0, 0.995) + 1e-6
    found = taken(training.AUC(201), y, scores, weight)  # bins of 0.005: none holds two of these scores
    assert found == pytest.approx(exact_area(y, scores, np.ones(90) if weight is None else weight), rel=1e-12)
    logits = np.log(scores) - np.log1p(-scores)
    assert taken(training.AUC(201, from_logits=True), y, logits, weight) == pytest.approx(found, rel=1e-9)
    coarse = taken(training.AUC(11), y, scores, weight)
    assert 1e-6 < abs(coarse - found) < 0.05


def numpy_area_pr(y: Any, scores: Any, n: int) -> float:
    """Keras' formula (interpolate_pr_auc), over thresholds in rising order."""
    at = np.minimum(np.floor(scores * (n - 1)), n - 2)
    tp = np.array([((at >= k) & (y == 1)).sum() for k in range(n)], float)
    p = np.array([(at >= k).sum() for k in range(n)], float)
    dtp, dp = tp[:-1] - tp[1:], p[:-1] - p[1:]
    slope = np.divide(dtp, dp, out=np.zeros(n - 1), where=dp != 0)
    start = tp[1:] - slope * p[1:]
    both = (p[:-1] > 0) & (p[1:] > 0)
    ratio = np.where(both, np.divide(p[:-1], p[1:], out=np.ones(n - 1), where=both), 1)
    return float((slope * (dtp + start * np.log(ratio))).sum() / tp[0])


def test_the_area_under_precision_and_recall() -> None:
    y = (TRUE > 1).astype(int)
    scores = np.clip(0.5 + 0.2 * rng.normal(size=90) + 0.2 * y, 0, 1)
    for n in (3, 20, 200):
        assert taken(training.AUC(n, "PR"), y, scores) == pytest.approx(numpy_area_pr(y, scores, n), rel=1e-12)
    assert taken(training.AUC(200, "PR"), y, y * 1.0) == pytest.approx(1)


def test_edges_of_areas() -> None:
    metric = training.AUC()
    assert metric.result().item() == 0
    metric.update_state([1, 1], [0.5, 0.6])
    assert metric.result().item() == 0  # there is one label alone
    metric.update_state([0, 0, 1], [0.0, -0.5, 1.0])
    assert metric.result().item() == 1
    metric.update_state([1, 0], [np.nan, 2.0])
    assert 0 < metric.result().item() < 1
    metric.reset_state()
    assert metric.result().item() == 0
    with pytest.raises(TapegradError, match="at least 3 for num_thresholds"):
        training.AUC(2)
    with pytest.raises(TapegradError, match='wanted curve "ROC" or "PR"'):
        training.AUC(curve="DET")


def test_captured_steps_add_up() -> None:
    metrics = [training.Mean(), training.SparseCategoricalAccuracy(), training.ConfusionMatrix(4), training.AUC(50)]

    def step(y: Any, scores: Any) -> None:
        metrics[0].update_state(scores)
        metrics[1].update_state(y, scores)
        metrics[2].update_state(y, scores)
        metrics[3].update_state(y > 1, tg.sigmoid(scores[:, 0]))

    f = tg.function(step)
    batches = [(tg.asarray(TRUE[i : i + 15]), tg.asarray(SCORES[i : i + 15])) for i in range(0, 90, 15)]
    for batch in batches:
        f(*batch)
    assert f.stats.traces == 1 and f.stats.replays == 4
    found = [m.result().numpy(copy=True) for m in metrics]
    for m in metrics:
        m.reset_state()
    for batch in batches:
        step(*batch)
    for m, x in zip(metrics, found, strict=True):
        np.testing.assert_array_equal(m.result().numpy(), x)


def test_metrics_are_saved_and_not_recorded(tmp_path: Path) -> None:
    metric, other = training.ConfusionMatrix(4), training.ConfusionMatrix(4)
    metric.update_state(TRUE, SCORES)
    tg.distributed.save(tmp_path / "m", {"m": metric.variables})
    tg.distributed.load(tmp_path / "m", {"m": other.variables})
    np.testing.assert_array_equal(other.result().numpy(), metric.result().numpy())
    v, mean = tg.Variable([2.0]), training.Mean()
    with tg.GradientTape() as tape:
        y = v * v
        z = y + tg.astype(mean(y), "float32")
    assert tape.gradient(z, v).tolist() == [4.0]
    with pytest.raises(TapegradError, match="defines no update_state"):
        training.Metric()(1.0)
