"""Distributions: Kolmogorov and Smirnov's test with SciPy's functions at a fixed seed, counts, shapes, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import tapegrad as tg
from tapegrad import errors

R = tg.random
N = 5000
CONTINUOUS: dict[str, tuple[Any, Any]] = {
    "exponential": (lambda g, **k: g.exponential(N, 2.0, **k), stats.expon(scale=2)),
    "laplace": (lambda g, **k: g.laplace(N, 1.0, 2.0, **k), stats.laplace(1, 2)),
    "logistic": (lambda g, **k: g.logistic(N, 1.0, 2.0, **k), stats.logistic(1, 2)),
    "gumbel": (lambda g, **k: g.gumbel(N, 1.0, 2.0, **k), stats.gumbel_r(1, 2)),
    "cauchy": (lambda g, **k: g.cauchy(N, 1.0, 2.0, **k), stats.cauchy(1, 2)),
    "weibull": (lambda g, **k: g.weibull(N, 1.7, 2.0, **k), stats.weibull_min(1.7, scale=2)),
    "pareto": (lambda g, **k: g.pareto(N, 2.5, **k), stats.lomax(2.5)),
    "power": (lambda g, **k: g.power(N, 2.5, **k), stats.powerlaw(2.5)),
    "rayleigh": (lambda g, **k: g.rayleigh(N, 2.5, **k), stats.rayleigh(scale=2.5)),
    "triangular": (lambda g, **k: g.triangular(N, 1.0, 2.0, 5.0, **k), stats.triang(0.25, 1, 4)),
    "standard_normal": (lambda g, **k: g.standard_normal(N, **k), stats.norm),
    "lognormal": (lambda g, **k: g.lognormal(N, 0.3, 0.6, **k), stats.lognorm(0.6, scale=np.exp(0.3))),
    "truncated": (lambda g, **k: g.truncated_normal(N, -1.0, 2.0, 1.0, 2.0, **k), stats.truncnorm(-1, 2, 1, 2)),
    "right tail": (lambda g, **k: g.truncated_normal(N, 5.0, 7.0, **k), stats.truncnorm(5, 7)),
    "left tail": (lambda g, **k: g.truncated_normal(N, -7.0, -5.0, **k), stats.truncnorm(-7, -5)),
    "gamma": (lambda g, **k: g.gamma(N, 2.5, 3.0, **k), stats.gamma(2.5, scale=3)),
    "large gamma": (lambda g, **k: g.gamma(N, 1e4, **k), stats.gamma(1e4)),
    "small loggamma": (lambda g, **k: g.loggamma(N, 0.01, **k), stats.loggamma(0.01)),
    "loggamma": (lambda g, **k: g.loggamma(N, 0.6, **k), stats.loggamma(0.6)),
    "chisquare": (lambda g, **k: g.chisquare(N, 3.0, **k), stats.chi2(3)),
    "beta": (lambda g, **k: g.beta(N, 0.5, 2.0, **k), stats.beta(0.5, 2)),
    "f": (lambda g, **k: g.f(N, 5.0, 7.0, **k), stats.f(5, 7)),
    "standard_t": (lambda g, **k: g.standard_t(N, 4.0, **k), stats.t(4)),
    "dirichlet": (lambda g, **k: g.dirichlet(np.array([0.5, 1.0, 2.0]), N, **k)[:, 0], stats.beta(0.5, 3)),
}
DISCRETE: dict[str, tuple[Any, Any]] = {
    **{f"poisson {m}": (lambda g, m=m: g.poisson(4 * N, m), stats.poisson(m)) for m in (0.1, 3.0, 9.9, 10.0, 300.0)},
    **{f"binomial {n} {p}": (lambda g, n=n, p=p: g.binomial(4 * N, n, p), stats.binom(n, p))
       for n, p in ((1, 0.3), (10, 0.5), (40, 0.25), (100, 0.9), (100, 0.5), (10**5, 0.001))},
    **{f"geometric {p}": (lambda g, p=p: g.geometric(4 * N, p), stats.geom(p)) for p in (0.1, 0.5, 0.99)},
    "negative_binomial": (lambda g: g.negative_binomial(4 * N, 5, 0.3), stats.nbinom(5, 0.3)),
    "integers": (lambda g: g.integers(4 * N, -3, 7), stats.randint(-3, 7)),
    "multinomial": (lambda g: g.multinomial(20, np.array([0.2, 0.3, 0.5]), 4 * N)[:, 1], stats.binom(20, 0.3)),
    "categorical": (lambda g: g.categorical(np.log([0.5, 0.5]), shape=4 * N), stats.bernoulli(0.5)),
    "choice": (lambda g: g.choice(2, 4 * N, p=np.array([0.7, 0.3])), stats.bernoulli(0.3)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name: str, dtype: str) -> None:
    draw, wanted = CONTINUOUS[name]
    x = draw(R.Generator(11), dtype=dtype).numpy()
    assert x.dtype == dtype and x.shape == (N,)
    assert stats.kstest(x.astype(float), wanted.cdf).pvalue > 1e-3


def p_value(counts: np.ndarray, wanted: Any) -> float:
    """Of the chi-square test, rare outcomes taken together."""
    low, high = int(wanted.ppf(1e-3)), int(wanted.ppf(1 - 1e-3))
    found = np.array([(counts == k).sum() for k in range(low, high + 1)])
    expected = wanted.pmf(np.arange(low, high + 1)) * counts.size
    often = expected > 10
    found, expected = found[often], expected[often]
    if (left := counts.size - expected.sum()) > 10:
        found, expected = np.append(found, counts.size - found.sum()), np.append(expected, left)
    return float(stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name: str) -> None:
    draw, wanted = DISCRETE[name]
    x = draw(R.Generator(12)).numpy()
    assert x.dtype == np.int64 and x.shape == (4 * N,)
    assert p_value(x, wanted) > 1e-3


def test_the_tests_can_fail() -> None:
    x = R.Generator(11).gamma(N, 2.5).numpy().astype(float)
    assert stats.kstest(x, stats.gamma(2.7).cdf).pvalue < 1e-3
    assert p_value(R.Generator(12).poisson(4 * N, 10.0).numpy(), stats.poisson(10.3)) < 1e-3


def test_vectors() -> None:
    cov = np.array([[2.0, 0.5], [0.5, 1.0]])
    x = R.Generator(1).multivariate_normal(np.array([1.0, 2.0]), cov, (100, 200), "float64").numpy()
    assert x.shape == (100, 200, 2)
    np.testing.assert_allclose(x.mean((0, 1)), [1, 2], atol=0.04)
    np.testing.assert_allclose(np.cov(x.reshape(-1, 2).T), cov, atol=0.06)
    d = R.Generator(1).dirichlet(np.ones((3, 4)), 5).numpy()
    assert d.shape == (5, 3, 4)
    np.testing.assert_allclose(d.sum(-1), 1, rtol=1e-6)
    m = R.Generator(1).multinomial(np.array([5, 9]), np.full(3, 1 / 3), (4, 2)).numpy()
    assert m.shape == (4, 2, 3) and (m.sum(-1) == [5, 9]).all() and (m >= 0).all()


def test_parameters_broadcast_with_the_shape_and_every_element_is_drawn() -> None:
    a = np.array([[0.5], [50.0]])
    for f in (R.gamma, R.exponential, R.weibull, R.chisquare, R.poisson, R.laplace):
        x = f((3,), a).numpy()
        assert x.shape == (2, 3) and np.unique(x[1]).size > 1, f
    assert R.gamma((), 2.0).shape == () and R.gamma((0, 3), 2.0).shape == (0, 3) and R.beta((), a, a.T).shape == (2, 2)
    assert R.poisson((0,), 3.0).shape == (0,) and R.integers((2, 0), 5).shape == (2, 0)
    assert R.gamma(3, 2.0, dtype="float16").dtype == np.float16


def test_extremes() -> None:
    g = R.Generator(2)
    assert (g.binomial(50, 7, 1.0).numpy() == 7).all() and not g.binomial(50, 7, 0.0).numpy().any()
    assert not g.poisson(50, 0.0).numpy().any() and (g.geometric(50, 1.0).numpy() == 1).all()
    assert np.isnan(g.gamma(3, np.nan).numpy()).all() and np.isnan(g.beta(3, 1.0, [np.nan]).numpy()).all()
    u = g.loggamma(1000, 1e-4).numpy()
    assert np.isfinite(u).all() and u.min() < -1000
    assert np.isfinite(g.beta(1000, 1e-3, 1e-3).numpy()).all()
    for draw in (g.gumbel, g.logistic, g.exponential, g.cauchy, g.pareto):
        assert np.isfinite(draw(10**5).numpy()).all()


def test_integers() -> None:
    g = R.Generator(3)
    assert set(g.integers(200, 3).numpy()) == {0, 1, 2}
    assert set(g.integers(200, 1, 3, endpoint=True).numpy()) == {1, 2, 3}
    assert g.integers((2, 3), -5, 5, "int8").dtype == np.int8
    wide = g.integers(1000, -(2**63), 2**63).numpy()
    assert wide.min() < -(2**62) and wide.max() > 2**62
    assert g.integers(1000, 0, 2**64, "uint64").numpy().max() > 2**63
    assert R.randint is R.integers


def test_half_of_the_words_are_rejected_and_the_rest_is_even() -> None:
    x = R.Generator(4).integers(4 * N, 0, 2**63 + 1, "uint64").numpy()
    assert stats.kstest(x.astype(float) / 2**63, "uniform").pvalue > 1e-3


def test_choice() -> None:
    g = R.Generator(5)
    assert sorted(g.choice(6, 6, replace=False).numpy()) == list(range(6))
    rows = np.arange(12.0).reshape(4, 3)
    assert g.choice(rows, (2, 5)).shape == (2, 5, 3) and g.choice(rows, 2, axis=1).shape == (4, 2)
    assert g.choice([3.0, 4.0]).item() in (3.0, 4.0) and g.choice(5).shape == ()
    p = np.array([0.5, 0.0, 0.3, 0.2])
    counts = np.bincount(g.choice(4, 8000, p=p).numpy(), minlength=4)
    assert counts[1] == 0 and stats.chisquare(counts[[0, 2, 3]], 8000 * p[[0, 2, 3]]).pvalue > 1e-3
    first = [g.choice(4, 3, False, p).numpy() for _ in range(500)]
    assert all(sorted(f) == [0, 2, 3] for f in first)
    assert stats.chisquare(np.bincount([f[0] for f in first], minlength=4)[[0, 2, 3]], 500 * p[[0, 2, 3]]).pvalue > 1e-3


def test_categorical() -> None:
    logits = np.log(np.array([[0.2, 0.8], [0.5, 0.5], [1.0, 1e-30]]))
    x = R.Generator(6).categorical(logits, shape=(4000, 3)).numpy()
    np.testing.assert_allclose(x.mean(0), [0.8, 0.5, 0.0], atol=0.03)
    assert R.categorical(logits).shape == (3,) and R.categorical(logits, axis=0).shape == (2,)


def test_same_seed_same_bits_and_generators_have_every_function() -> None:
    calls = {
        "gamma": (4, 0.7), "beta": (4, 2.0, 0.5), "poisson": (4, 30.0), "binomial": (4, 90, 0.4), "integers": (4, 9),
        "choice": (9, 4), "categorical": (np.ones((4, 3)),), "standard_t": (4, 3.0), "permutation": (5,),
        "uniform": (4,), "bernoulli": (4, 0.3), "multivariate_normal": (np.zeros(2), np.eye(2)),
    }  # fmt: skip
    for name, args in calls.items():
        g, h = R.Generator(9), R.Generator(9)
        first = getattr(g, name)(*args).numpy()
        assert np.array_equal(first, getattr(h, name)(*args).numpy())
        assert np.array_equal(first, getattr(R, name)(*args, generator=R.Generator(9)).numpy())
        assert not np.array_equal(g.normal(8).numpy(), R.Generator(9).normal(8).numpy()), "the stream moved on"
    functions = set(R.__all__) - {"Generator", "default_generator", "seed", "randint"}
    assert functions <= set(dir(R.Generator(1)))
    with pytest.raises(AttributeError, match="no 'nothing'"):
        R.Generator(1).nothing  # noqa: B018


def test_what_is_drawn_does_not_depend_on_where_attempts_are_rejected() -> None:
    """The stream moves on by the number of elements, whatever is accepted when."""
    states = []
    for alpha in (0.2, 1.0, 3.0, 1e6):
        g = R.Generator(8)
        g.gamma(1000, alpha)
        states.append(g.state)
    assert len(set(states)) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda g: g.gamma((-1,), 2.0), errors.ShapeError),
        (lambda g: g.gamma((3,), np.ones(4)), errors.ShapeError),
        (lambda g: g.gamma(3, 1j), errors.DTypeError),
        (lambda g: g.gamma(3, np.array([1j] * 3)), errors.DTypeError),
        (lambda g: g.gamma(3, 1.0, dtype="int64"), errors.DTypeError),
        (lambda g: g.gamma(3, "one"), errors.NotATensorError),
        (lambda g: g.integers(3, 5, 5), errors.DomainError),
        (lambda g: g.integers(3, 0, 300, "int8"), errors.DomainError),
        (lambda g: g.integers(3, 0, 300, "float32"), errors.DTypeError),
        (lambda g: g.choice(3, 4, replace=False), errors.DomainError),
        (lambda g: g.choice(0, 4), errors.DomainError),
        (lambda g: g.choice(3, 2, p=np.ones(4)), errors.ShapeError),
        (lambda g: g.categorical(np.ones((3, 0))), errors.ShapeError),
        (lambda g: g.categorical(np.ones((3, 2)), shape=(4,)), errors.ShapeError),
        (lambda g: g.dirichlet(1.0), errors.ShapeError),
        (lambda g: g.multinomial(3, 0.5), errors.ShapeError),
        (lambda g: g.multivariate_normal(np.ones(2), np.eye(3)), errors.ShapeError),
    ],
)
def test_bad_input_draws_nothing(call: Any, error: type) -> None:
    g = R.Generator(7)
    state = g.state
    with pytest.raises(error):
        call(g)
    assert g.state == state


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("poisson", [-1.0]), ("poisson", [np.nan]), ("poisson", [np.inf]), ("binomial", [-1, 0.5]),
        ("binomial", [1, 1.5]), ("binomial", [2.5, 0.5]), ("negative_binomial", [0, 0.5]),
        ("negative_binomial", [1, 1.5]), ("geometric", [0.0]), ("geometric", [np.nan]),
        ("bernoulli", [1.5]), ("bernoulli", [np.nan]), ("uniform", [1.0, 0.0]),
        ("normal", [0.0, -1.0]), ("lognormal", [0.0, -1.0]), ("truncated_normal", [1.0, 1.0]),
        ("truncated_normal", [-2.0, 2.0, 0.0, -1.0]), ("exponential", [-1.0]), ("laplace", [0.0, -1.0]),
        ("logistic", [0.0, -1.0]), ("gumbel", [0.0, -1.0]), ("cauchy", [0.0, -1.0]), ("weibull", [0.0]),
        ("weibull", [1.0, -1.0]), ("pareto", [0.0]), ("power", [0.0]), ("rayleigh", [-1.0]),
        ("triangular", [0.0, 2.0, 1.0]), ("triangular", [1.0, 1.0, 1.0]), ("gamma", [0.0]), ("gamma", [1.0, -1.0]),
        ("loggamma", [-1.0]), ("chisquare", [0.0]), ("beta", [0.0, 1.0]), ("beta", [1.0, 0.0]), ("f", [0.0, 1.0]),
        ("f", [1.0, 0.0]), ("standard_t", [0.0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["numbers", "arrays", "vmap"])
def test_parameters_outside_their_domain(name: str, parameters: list[float], kind: str) -> None:
    g = R.Generator(7)
    state, draw = g.state, getattr(g, name)
    arrays = [np.array([p, p]) for p in parameters]
    with pytest.raises(errors.DomainError, match=f"random.{name}"):
        if kind == "numbers":
            draw(3, *parameters)
        elif kind == "arrays":
            draw((3, 2), *arrays).numpy()
        else:
            tg.vmap(lambda *p: draw((), *p))(*arrays).numpy()
    if kind == "numbers":
        assert g.state == state


@pytest.mark.parametrize(
    "draw",
    [
        lambda scale: R.exponential((2,), scale),
        tg.function(lambda scale: R.exponential((2,), scale)),
        tg.vmap(lambda scale: R.exponential((), scale)),
    ],
)
def test_one_element_outside_its_domain(draw: Any) -> None:
    for _ in range(3):
        draw(tg.asarray([1.0, 2.0]))
    with pytest.raises(errors.DomainError, match="scale >= 0"):
        draw(tg.asarray([1.0, -2.0])).numpy()


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.choice(2, 3, p=[0.5, 0.6]),
        lambda g: g.choice(2, 3, p=[-0.5, 1.5]),
        lambda g: g.choice(2, 3, p=[np.nan, 1.5]),
        lambda g: g.choice(3, 2, replace=False, p=[0.0, 1.0, 0.0]),
        lambda g: g.multinomial(3, [-0.1, 0.9, 0.2]),
        lambda g: g.multinomial(3, [0.9, 0.9, 0.1]),
        lambda g: g.multinomial(3, [np.nan, 0.5]),
        lambda g: g.multinomial(-3, [0.5, 0.5]),
        lambda g: g.multinomial(2.5, [1.0]),
        lambda g: g.dirichlet([0.0, 1.0]),
        lambda g: g.dirichlet(np.array([[1.0, 1.0], [1.0, -1.0]])),
    ],
)
def test_impossible_chances(call: Any) -> None:
    with pytest.raises(errors.DomainError, match="random.(choice|multinomial|dirichlet)"):
        call(R.Generator(7)).numpy()


def test_chances_that_sum_to_one_but_for_rounding() -> None:
    p = tg.softmax(tg.asarray(np.linspace(0, 5, 1000), dtype="float32"))
    assert R.choice(1000, 3, p=p).shape == (3,) and R.multinomial(5, p).numpy().sum() == 5
    assert R.multinomial(3, [0.1, 0.1]).numpy().sum() == 3  # the last is what is left
    assert np.isnan(R.exponential(3, np.nan).numpy()).all() and np.isnan(R.dirichlet([np.nan, 1.0]).numpy()).all()
