"""Pooling of regions of interest against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tapegrad.errors import DTypeError, IndexingError, ShapeError
from tapegrad.nn import functional as F
from tapegrad.testing import check_grads

rng = np.random.default_rng(8)
X = rng.permutation(2 * 3 * 6 * 7).reshape(2, 3, 6, 7) / 10.0
ROIS = np.array([[0.0, 1.0, 9.0, 11.0], [3.2, 2.1, 6.4, 7.7], [4.0, 4.0, 4.0, 4.0], [9.0, 9.0, 20.0, 30.0]])
AT = np.array([0, 1, 1, 0])
SCALE = 0.5


def bins(low: int, high: int, count: int, size: int) -> list[slice]:
    step = max(high - low, 1) / count
    edge = lambda v: min(max(v + low, 0), size)
    return [slice(edge(math.floor(i * step)), edge(math.ceil((i + 1) * step))) for i in range(count)]


def by_loops(f: Any, wide: int = 0, out: tuple[int, int] = (2, 3)) -> np.ndarray:
    y = np.zeros((len(ROIS), 3, *out))
    for r, (roi, at) in enumerate(zip(ROIS, AT)):
        y0, x0, y1, x1 = (round(v * SCALE) for v in roi)
        for i, rows in enumerate(bins(y0, y1 + wide, out[0], 6)):
            for j, columns in enumerate(bins(x0, x1 + wide, out[1], 7)):
                part = X[at, :, rows, columns]
                if part.size:
                    y[r, :, i, j] = f(part, axis=(1, 2))
    return y


def read(image: np.ndarray, y: float, x: float) -> np.ndarray | None:
    """The image between its pixels; None outside."""
    if not (-1 <= y <= 6 and -1 <= x <= 7):
        return None
    y, x = min(max(y, 0), 5), min(max(x, 0), 6)
    i, j = min(int(y), 4), min(int(x), 5)
    a, b = y - i, x - j
    rows = (1 - a) * image[:, i] + a * image[:, i + 1]
    return (1 - b) * rows[:, j] + b * rows[:, j + 1]


def align_by_loops(f: Any, ratio: Any, out: tuple[int, int] = (2, 3)) -> np.ndarray:
    y = np.zeros((len(ROIS), 3, *out))
    for r, (roi, at) in enumerate(zip(ROIS, AT)):
        low, span = roi[:2] * SCALE, np.maximum((roi[2:] - roi[:2]) * SCALE, 1)
        step = span / out
        counts = [ratio or math.ceil(s) for s in step]
        for i, j in np.ndindex(*out):
            found = [
                read(
                    X[at],
                    low[0] + (i + (a + 0.5) / counts[0]) * step[0],
                    low[1] + (j + (b + 0.5) / counts[1]) * step[1],
                )
                for a in range(counts[0])
                for b in range(counts[1])
            ]
            y[r, :, i, j] = f([v for v in found if v is not None], math.prod(counts))
    return y


def test_rounded_regions() -> None:
    np.testing.assert_array_equal(F.roi_max_pooling_2d(X, ROIS, AT, (2, 3), SCALE).numpy(), by_loops(np.max))
    got = F.roi_average_pooling_2d(X, ROIS, AT, (2, 3), SCALE).numpy()
    np.testing.assert_allclose(got, by_loops(np.mean), rtol=1e-12, atol=1e-12)
    old = np.concatenate([AT[:, None], ROIS[:, [1, 0, 3, 2]]], axis=1)
    np.testing.assert_array_equal(F.roi_pooling_2d(X, old, 2, 3, SCALE).numpy(), by_loops(np.max, 1))


@pytest.mark.parametrize("ratio", [None, 2])
def test_sampled_regions(ratio: int | None) -> None:
    mean = lambda found, count: sum(found, np.zeros(3)) / count
    got = F.roi_average_align_2d(X, ROIS, AT, (2, 3), SCALE, ratio).numpy()
    np.testing.assert_allclose(got, align_by_loops(mean, ratio), rtol=1e-11, atol=1e-12)
    largest = lambda found, count: np.max(found, axis=0) if found else np.zeros(3)
    got = F.roi_max_align_2d(X, ROIS, AT, (2, 3), SCALE, ratio).numpy()
    np.testing.assert_allclose(got, align_by_loops(largest, ratio), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["roi_max_pooling_2d", "roi_average_pooling_2d", "roi_average_align_2d", "roi_max_align_2d"]
)
def test_derivatives(name: str) -> None:
    check_grads(lambda x: getattr(F, name)(x, ROIS, AT, 2, SCALE) ** 2, [X], order=2)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match=r"wanted x \(n, c, h, w\), rois \(r, 4\)"):
        F.roi_max_pooling_2d(X, ROIS[:, :3], AT, 2, 1.0)
    with pytest.raises(ShapeError, match=r"rois \(r, 5\)"):
        F.roi_pooling_2d(X, ROIS, 2, 2, 1.0)
    with pytest.raises(IndexingError, match=r"roi_indices in \[0, 2\)"):
        F.roi_max_align_2d(X, ROIS, AT + 1, 2, 1.0)
    with pytest.raises(DTypeError, match="integer roi_indices"):
        F.roi_average_align_2d(X, ROIS, AT.astype(float), 2, 1.0)
