"""Counting elements by bins."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError, IndexingError, ShapeError
from tapegrad.testing import check_grads

EDGES = [-2, -1, 0, 0.5, 3]


@pytest.mark.parametrize("kwargs", [{}, {"density": True}, {"range": (-1, 1)}])
@pytest.mark.parametrize("bins", [10, 1, EDGES, np.array(EDGES), "auto", "fd"], ids=str)
def test_histogram(bins, kwargs, rng):
    for x in (rng.normal(size=(5, 6)), np.array([1, 2, 2, 3, 3, 3.0]), np.arange(9), np.zeros(0), np.full(3, 2.0)):
        same("histogram", x, bins, **kwargs)
        if not isinstance(bins, str):
            same("histogram", x, bins, weights=np.ones(x.shape) / 3, rtol=1e-14, **kwargs)
        same("histogram_bin_edges", x, bins, kwargs.get("range"))


def test_histogram_of_single_precision(rng):
    same("histogram", rng.normal(size=40).astype("f4"), 7)


def test_elements_on_edges():
    same("histogram", np.array([0.0, 1.0, 1.0, 2.0, 2.0, 3.0, np.nan]), [0.0, 1.0, 2.0])
    x = np.linspace(0, 1, 11)
    same("histogram", x, 10)


def test_of_several_dimensions(rng):
    x, y, w = rng.normal(size=(3, 40))
    same("histogram2d", x, y, 4)
    same("histogram2d", x, y, (3, [0, 1, 2.0]), weights=w, rtol=1e-13)
    same("histogram2d", x, y, [-1, 0, 0.5, 1.0], density=True)
    same("histogramdd", rng.normal(size=(30, 3)), 4)
    same("histogramdd", (x, y), (3, 4), density=True, weights=w, range=[(-1, 1), (-2, 2)], rtol=1e-13)
    with pytest.raises(ShapeError, match="3 bins"):
        tg.histogramdd((x, y), (1, 2, 3))


def test_bincount(rng):
    i = rng.integers(0, 6, 20)
    same("bincount", i)
    same("bincount", i, rng.normal(size=20))
    same("bincount", i, minlength=12)
    same("bincount", i.astype("u1"), minlength=0)
    same("bincount", np.zeros(0, int), minlength=3)
    with pytest.raises(IndexingError, match="negative"):
        tg.bincount([-1])
    with pytest.raises(DTypeError, match="integers"):
        tg.bincount([0.5])
    with pytest.raises(ShapeError, match="weights of shape"):
        tg.bincount([1, 2], [1.0])


@pytest.mark.parametrize("right", [False, True])
def test_digitize(right, rng):
    x = np.concatenate([rng.normal(size=9), EDGES])
    same("digitize", x, EDGES, right)
    same("digitize", x, EDGES[::-1], right=right)
    same("digitize", np.arange(5), [1, 2, 4], right)


def test_gradients_in_the_weights(rng):
    x, y, w = rng.uniform(0.1, 1, (3, 12))
    i = rng.integers(0, 4, 12)
    check_grads(lambda w: tg.bincount(i, w) ** 2, [w])
    check_grads(lambda w: tg.histogram(x, 4, weights=w)[0] ** 2, [w])
    check_grads(lambda w: tg.histogram(x, 3, density=True, weights=w)[0], [w])
    check_grads(lambda w: tg.histogram2d(x, y, 2, weights=w)[0] ** 2, [w])
    check_grads(lambda w: tg.histogramdd((x, y), 2, density=True, weights=w)[0], [w])
    with tg.GradientTape() as tape:
        t = tg.asarray(x)
        tape.watch(t)
        counts = tg.histogram(t, 4, weights=w)[0] + 0 * tg.sum(t)
    assert (tape.gradient(counts, t).numpy() == 0).all()


def test_bins_that_do_not_rise_are_refused():
    for call in (lambda: tg.digitize([0.5], [3.0, 1.0, 2.0]), lambda: tg.histogram([0.5], bins=[3.0, 1.0, 2.0])):
        with pytest.raises(ValueError, match="monotonically"):
            call()
    np.testing.assert_array_equal(tg.digitize([0.5, 2.5], [3.0, 2.0, 1.0]).numpy(), np.digitize([0.5, 2.5], [3, 2, 1]))
