"""Distributions of one number: SciPy's values, gradients in everything, what lies outside, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from checks import c64

import tapegrad as tg
from tapegrad.testing import check_grads

SHAPES = {"norm": 0, "gamma": 1, "beta": 2, "chi2": 1, "t": 1, "poisson": 1}
CONTINUOUS = ("logpdf", "pdf", "cdf", "sf", "logcdf", "logsf", "ppf")
DISCRETE = ("logpmf", "pmf", "cdf", "sf", "logcdf", "logsf")
CASES = [(name, op) for name in SHAPES for op in (DISCRETE if name == "poisson" else CONTINUOUS)]


def shapes(name: str, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.uniform(0.5, 3, size) for _ in range(SHAPES[name])]


@pytest.mark.parametrize(("name", "op"), CASES)
def test_values_are_scipys(name: str, op: str) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=14) * 2, [0.0, 1.0, -1.0, 0.5, 30, -30, np.inf, -np.inf, np.nan]])
    if op == "ppf":
        x = np.concatenate([rng.uniform(0.01, 0.99, 19), [0.0, 1.0, 1.5, np.nan]])
    if name == "poisson":
        x = np.concatenate([np.arange(-2.0, 12), [0.5, -0.5, 2.5, 40, 1.0, 2, 3, 4, np.nan]])
    a = shapes(name, x.size)
    ours, theirs = getattr(getattr(tg.stats, name), op), getattr(getattr(scipy.stats, name), op)
    for named in ({}, {"loc": 1}, *([{"loc": 0.3, "scale": 2.5}] if name != "poisson" else [])):
        with np.errstate(all="ignore"):
            found, wanted = ours(x, *a, **named).numpy(), theirs(x, *a, **named)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_gradients(name: str, op: str) -> None:
    rng = np.random.default_rng(2)
    f = getattr(getattr(tg.stats, name), op)
    if name == "poisson":
        check_grads(lambda mu: f(np.array([0.0, 1, 2, 5]), mu), [rng.uniform(0.5, 2, 4)])
        return
    loc = rng.uniform(-0.2, 0.1, 4)
    others = [rng.uniform(0.8, 2, 4) for _ in range(SHAPES[name])]
    check_grads(
        lambda x, m, s, *q: f(x, *q, m, s), [rng.uniform(0.2, 0.8, 4), loc, rng.uniform(1, 1.4, 4), *others], rtol=1e-3
    )


def test_arguments_go_by_position_and_by_name() -> None:
    x = np.array([0.2, 0.7])
    wanted = scipy.stats.beta.pdf(x, 2, 3, -1, 2)
    for found in (
        tg.stats.beta.pdf(x, 2, 3, -1, 2),
        tg.stats.beta.pdf(x, a=2, b=3, scale=2, loc=-1),
        tg.stats.beta.pdf(x=x, a=2, b=3, loc=-1, scale=2),
    ):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
    for call in (
        lambda: tg.stats.beta.pdf(x, 2),
        lambda: tg.stats.norm.pdf(x, 0, 1, 2),
        lambda: tg.stats.norm.cdf(x, a=1),
        lambda: tg.stats.poisson.pmf(x, 1.0, scale=2),
    ):
        with pytest.raises(TypeError, match="it takes"):
            call()


@pytest.mark.parametrize("x", [-1.0, 2.0])
def test_outside_the_support_density_and_gradients_are_zero(x: float) -> None:
    for f in (tg.stats.beta.pdf, tg.stats.beta.cdf, tg.stats.beta.sf):
        with tg.GradientTape() as tape:
            args = [c64(v) for v in (x, 2.0, 3.0, 0.0, 1.0)]
            tape.watch(args)
            y = f(*args)
        assert [float(g.item()) for g in tape.gradient(y, args)] == [0.0] * 5
        assert y.item() == (f in (tg.stats.beta.cdf, tg.stats.beta.sf) and (x > 1) == (f == tg.stats.beta.cdf))
    assert tg.stats.gamma.logpdf(-1.0, 2.0).item() == -np.inf
    assert tg.stats.poisson.pmf(1.5, 2.0).item() == 0.0 == tg.stats.poisson.pmf(-1, 2.0).item()


def test_parameters_that_make_no_sense_give_nan() -> None:
    calls: list[Any] = [
        tg.stats.norm.pdf(0.0, 0.0, -1.0), tg.stats.norm.cdf(0.0, 0.0, 0.0), tg.stats.gamma.logpdf(1.0, -1.0),
        tg.stats.beta.cdf(0.5, 1.0, np.nan), tg.stats.t.ppf(0.5, 0.0), tg.stats.poisson.pmf(1, -2.0),
    ]  # fmt: skip
    assert all(np.isnan(found.item()) for found in calls)


def test_far_tails_are_precise() -> None:
    for x in (-30.0, -8.0):
        np.testing.assert_allclose(tg.stats.norm.logcdf(c64(x)).item(), scipy.stats.norm.logcdf(x), rtol=1e-13)
        np.testing.assert_allclose(tg.stats.norm.logsf(c64(-x)).item(), scipy.stats.norm.logsf(-x), rtol=1e-13)
        np.testing.assert_allclose(tg.stats.t.sf(c64(-x), 3.0).item(), scipy.stats.t.sf(-x, 3.0), rtol=1e-12)
    np.testing.assert_allclose(tg.stats.gamma.sf(c64(60.0), 2.0).item(), scipy.stats.gamma.sf(60, 2), rtol=1e-12)


def test_shapes_broadcast_and_may_be_empty() -> None:
    assert tg.stats.gamma.pdf(np.ones((3, 1)), np.ones(4)).shape == (3, 4)
    assert tg.stats.norm.cdf(np.ones((0, 2))).shape == (0, 2) and tg.stats.norm.pdf(0.0).shape == ()
    assert tg.stats.norm.pdf(np.float32(1)).dtype == np.float32
    assert repr(tg.stats.norm) == "<distribution norm>"
