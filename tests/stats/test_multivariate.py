"""Distributions of several numbers: SciPy's values, gradients, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats

import tapegrad as tg
from tapegrad.errors import LinAlgError, ShapeError
from tapegrad.testing import check_grads

normal, dirichlet = tg.stats.multivariate_normal, tg.stats.dirichlet
RNG = np.random.default_rng(0)
POINTS, MEAN, ROOT = RNG.normal(size=(3, 4, 2)), np.array([0.1, -0.2]), RNG.normal(size=(2, 2))
COV = ROOT @ ROOT.T + np.eye(2)


def test_normal_densities_are_scipys() -> None:
    theirs = scipy.stats.multivariate_normal
    for x in (POINTS, POINTS[0], POINTS[0, 0]):
        np.testing.assert_allclose(normal.logpdf(x, MEAN, COV).numpy(), theirs.logpdf(x, MEAN, COV), rtol=1e-12)
        np.testing.assert_allclose(normal.pdf(x, MEAN, COV).numpy(), theirs.pdf(x, MEAN, COV), rtol=1e-12)
        np.testing.assert_allclose(normal.logpdf(x, MEAN, 2.5).numpy(), theirs.logpdf(x, MEAN, 2.5), rtol=1e-12)
        diagonal = np.array([1.0, 3.0])
        np.testing.assert_allclose(normal.logpdf(x, MEAN, diagonal).numpy(), theirs.logpdf(x, MEAN, diagonal))
        np.testing.assert_allclose(normal.logpdf(x, None, COV).numpy(), theirs.logpdf(x, None, COV), rtol=1e-12)
    x = POINTS[:, 0, 0]
    np.testing.assert_allclose(normal.logpdf(x).numpy(), theirs.logpdf(x), rtol=1e-12)
    np.testing.assert_allclose(normal.entropy(MEAN, COV).item(), theirs.entropy(MEAN, COV), rtol=1e-12)
    np.testing.assert_allclose(normal.entropy(cov=np.float64(4.0)).item(), theirs.entropy(cov=4), rtol=1e-12)


def test_normal_gradients() -> None:
    check_grads(lambda x, m, c: normal.logpdf(x, m, c @ c.mT + np.eye(2)), [POINTS, MEAN, ROOT])
    check_grads(lambda x, m, c: normal.pdf(x, m, c @ c.mT + np.eye(2)), [POINTS[0], MEAN, ROOT])
    check_grads(lambda c: normal.entropy(cov=c @ c.mT + np.eye(2)), [ROOT])


ALPHA = np.array([0.7, 2.0, 1.5])
PARTS = np.array([[0.2, 0.1], [0.3, 0.3], [0.5, 0.6]])


def test_dirichlet_densities_are_scipys() -> None:
    for x in (PARTS, PARTS[:2], PARTS[:, 0], PARTS[:2, 0]):
        wanted = scipy.stats.dirichlet.logpdf(x, ALPHA)
        np.testing.assert_allclose(dirichlet.logpdf(x, ALPHA).numpy(), wanted, rtol=1e-12)
        np.testing.assert_allclose(dirichlet.pdf(x, ALPHA).numpy(), np.exp(wanted), rtol=1e-12)


def test_dirichlet_gradients() -> None:
    for x in (PARTS, PARTS[:2]):
        check_grads(dirichlet.logpdf, [x, ALPHA])
        check_grads(dirichlet.pdf, [x, ALPHA])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: dirichlet.pdf(np.ones(5), ALPHA), ShapeError),
        (lambda: dirichlet.pdf(PARTS, np.ones((3, 1))), ShapeError),
        (lambda: dirichlet.pdf(0.5, ALPHA), ShapeError),
        (lambda: normal.pdf(np.ones(3), MEAN, COV), ShapeError),
        (lambda: normal.pdf(np.ones(2), np.ones(3), COV), ShapeError),
        (lambda: normal.pdf(np.ones(2), MEAN, np.ones((2, 3))), ShapeError),
        (lambda: normal.pdf(np.ones(2), MEAN, -COV), LinAlgError),
    ],
)
def test_bad_input(call: Any, error: type) -> None:
    with pytest.raises(error):
        call()


def test_a_singular_covariance_has_a_density_on_its_range():
    base = np.random.default_rng(5).normal(size=(4, 2))
    cov, mean = base @ base.T, np.ones(4)
    x = np.random.default_rng(6).normal(size=(5, 2)) @ base.T + mean
    beside = x + np.random.default_rng(7).normal(size=x.shape)
    theirs = scipy.stats.multivariate_normal
    wanted = theirs.logpdf(x, mean, cov, allow_singular=True)
    np.testing.assert_allclose(normal.logpdf(x, mean, cov, allow_singular=True).numpy(), wanted, rtol=1e-8)
    assert np.all(normal.pdf(beside, mean, cov, allow_singular=True).numpy() == 0.0)
    directions = np.random.default_rng(8).normal(size=(5, 2)) @ base.T
    f = lambda t: normal.logpdf(x + t * directions, mean, cov, allow_singular=True)
    tg.testing.check_grads(f, (np.array(0.3),), order=2)
