"""Gradients of draws in their parameters: those of the quantile function at a fixed probability; recomputing; none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import c64, same
from scipy import stats

import tapegrad as tg
from tapegrad.errors import NoGradientError

R = tg.random


def drawn(f: Any, *parameters: float, seed: int = 3) -> Any:
    """What ``f`` draws, and the gradient of the sum of ``rows`` in each parameter, element by element."""
    xs = [c64(np.full(40, p)) for p in parameters]
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(xs)
        y = f(R.Generator(seed), *xs)
    return y.numpy(), [tape.gradient(y, x).numpy() for x in xs]


def quantile_slopes(dist: Any, y: np.ndarray, parameters: tuple, i: int) -> np.ndarray:
    """How the quantile of the probability of ``y`` moves with parameter ``i``: differences of SciPy's values.

    From the side of the tail, where probabilities are precise.
    """
    found = []
    for value in y:
        here = dist(*parameters)
        below = here.cdf(value) < 0.5
        p = here.cdf(value) if below else here.sf(value)

        def at(step: float, p: float = p, below: bool = below) -> float:
            moved = list(parameters)
            moved[i] += step
            return dist(*moved).ppf(p) if below else dist(*moved).isf(p)

        h = 1e-3 * parameters[i]
        found.append((8 * (at(h) - at(-h)) - at(2 * h) + at(-2 * h)) / (12 * h))
    return np.array(found)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5, 40.0])
def test_gamma_numbers_move_as_quantiles_do(alpha: float) -> None:
    y, (slope,) = drawn(lambda g, a: g.gamma(40, a, dtype="float64"), alpha)
    wanted = quantile_slopes(stats.gamma, y, (alpha,), 0)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("f", "dist", "parameters"),
    [
        (lambda g, a: g.chisquare(40, a, dtype="float64"), stats.chi2, (3.0,)),
        (lambda g, a: g.weibull(40, a, dtype="float64"), stats.weibull_min, (1.7,)),
        (lambda g, a: g.pareto(40, a, dtype="float64"), stats.lomax, (2.5,)),
        (lambda g, a: g.power(40, a, dtype="float64"), stats.powerlaw, (2.5,)),
        (lambda g, m, s: g.laplace(40, m, s, dtype="float64"), stats.laplace, (1.0, 2.0)),
        (lambda g, m, s: g.logistic(40, m, s, dtype="float64"), stats.logistic, (1.0, 2.0)),
        (lambda g, m, s: g.gumbel(40, m, s, dtype="float64"), stats.gumbel_r, (1.0, 2.0)),
        (lambda g, m, s: g.cauchy(40, m, s, dtype="float64"), stats.cauchy, (1.0, 2.0)),
        (lambda g, s: g.rayleigh(40, s, dtype="float64"), lambda s: stats.rayleigh(scale=s), (2.0,)),
        (lambda g, s: g.exponential(40, s, dtype="float64"), lambda s: stats.expon(scale=s), (2.0,)),
        (lambda g, m, s: g.lognormal(40, m, s, dtype="float64"),
         lambda m, s: stats.lognorm(s, scale=np.exp(m)), (0.3, 0.6)),
        (lambda g, a, b: g.truncated_normal(40, a, b, dtype="float64"), stats.truncnorm, (0.5, 2.0)),
        (lambda g, a, c, b: g.triangular(40, a, c, b, dtype="float64"),
         lambda a, c, b: stats.triang((c - a) / (b - a), a, b - a), (1.0, 2.0, 5.0)),
    ],
)  # fmt: skip
def test_draws_of_one_number_move_as_quantiles_do(f: Any, dist: Any, parameters: tuple) -> None:
    y, slopes = drawn(f, *parameters)
    for i, slope in enumerate(slopes):
        np.testing.assert_allclose(slope, quantile_slopes(dist, y, parameters, i), rtol=1e-5, atol=1e-8)


def test_expected_values_have_the_right_gradients() -> None:
    """Draws of two gamma numbers have no quantile, but their means are known."""
    n = 30_000

    def mean(f: Any, *parameters: float) -> list[float]:
        xs = [c64(p) for p in parameters]
        return [float(g.item()) for g in tg.grad(lambda *v: tg.mean(f(*v)), tuple(range(len(xs))))(*xs)]

    a, b = 2.0, 3.0
    found = mean(lambda u, v: R.beta(n, u, v, "float64", R.Generator(1)), a, b)
    np.testing.assert_allclose(found, [b / (a + b) ** 2, -a / (a + b) ** 2], rtol=0.05)
    found = mean(lambda v: tg.square(R.standard_t(n, v, "float64", R.Generator(1))), 9.0)
    np.testing.assert_allclose(found, [-2 / 7**2], rtol=0.2)
    found = mean(lambda v: R.f(n, 6.0, v, "float64", R.Generator(1)), 9.0)
    np.testing.assert_allclose(found, [-2 / 7**2], rtol=0.2)
    alpha = c64([1.0, 2.0, 3.0])
    rows = tg.jacobian(lambda v: tg.mean(R.dirichlet(v, n, "float64", R.Generator(1)), axis=0))(alpha).numpy()
    np.testing.assert_allclose(rows, (6 * np.eye(3) - np.array([[1.0], [2], [3]])) / 36, atol=5e-3)


def test_second_derivatives_of_gamma_numbers() -> None:
    """The gradient is a function of parameter and draw; its own derivative is that of the quantile again."""
    alpha, h = 2.5, 1e-4
    y = R.Generator(3).gamma(10, alpha, dtype="float64").numpy()
    p = stats.gamma(alpha).cdf(y)
    first = tg.grad(lambda a: tg.sum(R.gamma((10,), a, dtype="float64", generator=R.Generator(3))))
    found = tg.grad(first)(c64(alpha)).item()
    ppf = lambda a: stats.gamma(a).ppf(p)
    wanted = ((-ppf(alpha + 2 * h) + 16 * ppf(alpha + h) - 30 * ppf(alpha) + 16 * ppf(alpha - h) - ppf(alpha - 2 * h))
              / (12 * h * h)).sum()  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_forward_mode_agrees_with_reverse() -> None:
    a = c64([0.4, 1.5, 7.0])
    f = lambda v: R.gamma((3,), v, dtype="float64", generator=R.Generator(5))
    _, pushed = tg.jvp(f, (a,), (tg.ones_like(a),))
    same(pushed, tg.grad(lambda v: tg.sum(f(v)))(a), rtol=1e-13)
    same(tg.jacobian(f)(a), np.diag(pushed.numpy()), rtol=1e-13)


def test_vectors_move_with_mean_and_covariance() -> None:
    cov = np.array([[2.0, 0.5], [0.5, 1.0]])
    f = lambda m, c: R.multivariate_normal(m, c @ c.mT, (3,), "float64", R.Generator(1))
    tg.testing.check_grads(f, [np.zeros(2), np.linalg.cholesky(cov)])


def test_elements_chosen_get_their_gradients() -> None:
    x = c64([1.0, 2.0, 3.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = R.choice(x, 50, generator=R.Generator(2))
    same(tape.gradient(y, x), [float((y.numpy() == v).sum()) for v in (1, 2, 3)])


def test_recomputing_draws_the_same_numbers() -> None:
    a = c64([0.5, 3.0])

    def f(v: Any) -> Any:
        x = R.gamma((2,), v, dtype="float64") * R.beta((2,), v, 2.0, dtype="float64")
        return tg.sum(x * tg.astype(R.poisson((2,), 20.0), "float64") * R.standard_t((2,), 5.0, dtype="float64"))

    found = []
    for g in (f, tg.recompute_grad(f)):
        R.seed(4)
        with tg.GradientTape() as tape:
            tape.watch(a)
            y = g(a)
        found.append((y.numpy(), tape.gradient(y, a).numpy(), R.default_generator.state))
    assert found[0][2] == found[1][2]
    same(found[0][:2], found[1][:2], rtol=0)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda v: R.poisson((3,), v, "float64"), "random_poisson"),
        (lambda v: R.binomial((3,), 9, v, "float64"), "random_binomial"),
        (lambda v: R.geometric((3,), v, "float64"), "random_geometric"),
        (lambda v: R.multinomial(9, tg.stack([v, 1 - v]), (3,), "float64"), "random_binomial"),
    ],
)
def test_counts_have_no_gradient(f: Any, name: str) -> None:
    v = c64(0.4)
    with tg.GradientTape() as tape:
        tape.watch(v)
        y = f(v)
    with pytest.raises(NoGradientError, match=name):
        tape.gradient(y, v)
    with pytest.raises(NoGradientError, match=name):
        tg.jvp(f, (v,), (c64(1.0),))
