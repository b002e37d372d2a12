"""Random numbers from counters: Philox4x64-10, so that a drawing recipe yields the same bits whenever it runs.

A generator is a key and a position.  The position is a cell: a rerun of a checkpointed function draws what its first
run drew, and leaves the stream where it is.  A drawn value's recipe holds its key and position, not the generator.

Parameters may be tensors, which broadcast with ``shape``.  Where a distribution varies smoothly with them a draw has
their gradients: as a function of them and of fixed uniform numbers, or, of gamma numbers and what is made of them, at
fixed probability.
"""

from __future__ import annotations

from tapegrad.random.choosing import categorical, choice
from tapegrad.random.continuous import (
    cauchy,
    exponential,
    gumbel,
    laplace,
    logistic,
    pareto,
    power,
    rayleigh,
    triangular,
    weibull,
)
from tapegrad.random.discrete import binomial, geometric, integers, multinomial, negative_binomial, poisson
from tapegrad.random.gammas import beta, chisquare, dirichlet, f, gamma, loggamma, standard_t
from tapegrad.random.normals import lognormal, multivariate_normal, standard_normal, truncated_normal
from tapegrad.random.stream import METHODS, Generator, default_generator, seed
from tapegrad.random.uniforms import bernoulli, normal, permutation, uniform
from tapegrad.spellings import explain

randint = integers

__all__ = [
    "Generator", "bernoulli", "beta", "binomial", "categorical", "cauchy", "chisquare", "choice", "default_generator",
    "dirichlet", "exponential", "f", "gamma", "geometric", "gumbel", "integers", "laplace", "loggamma", "logistic",
    "lognormal", "multinomial", "multivariate_normal", "negative_binomial", "normal", "pareto", "permutation",
    "poisson", "power", "randint", "rayleigh", "seed", "standard_normal", "standard_t", "triangular",
    "truncated_normal", "uniform", "weibull",
]  # fmt: skip

_APART = {"Generator", "default_generator", "randint", "seed"}
METHODS.update({name: globals()[name] for name in __all__ if name not in _APART})
explain(globals(), __name__)
