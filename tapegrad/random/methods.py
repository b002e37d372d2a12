"""Which functions are a generator's methods, too."""

from __future__ import annotations

from tapegrad.random import choosing, continuous, discrete, gammas, normals, uniforms

_PARTS = {
    choosing: ("categorical", "choice"),
    continuous: (
        "cauchy", "exponential", "gumbel", "laplace", "logistic", "pareto", "power", "rayleigh", "triangular",
        "weibull",
    ),
    discrete: ("binomial", "geometric", "integers", "multinomial", "negative_binomial", "poisson"),
    gammas: ("beta", "chisquare", "dirichlet", "f", "gamma", "loggamma", "standard_t"),
    normals: ("lognormal", "multivariate_normal", "standard_normal", "truncated_normal"),
    uniforms: ("bernoulli", "normal", "permutation", "uniform"),
}  # fmt: skip
FUNCTIONS = {name: getattr(part, name) for part, names in _PARTS.items() for name in names}
