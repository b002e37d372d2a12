"""Special functions and distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
from table.coverage_case import Case, case, uniform

import tapegrad as tg

X, Y = uniform(3, 4), uniform(4, seed=1)
BIG = uniform(3, 4, low=1.5, high=4.0, seed=2)
ABOVE = uniform(4, low=1.2, high=3.0, seed=3)
COUNTS = np.array([[0, 1, 4, 2], [3, 0, 1, 7], [2, 2, 5, 1]])
SIMPLEX = np.array([0.2, 0.3, 0.5])
COV = np.array([[2.0, 0.3], [0.3, 1.0]])

_UNARY = (
    "erf digamma erfc erfinv i0 i1 log_ndtr logit ndtr ndtri entr gamma i0e i1e erfcx dawsn exp1 expi j0 j1 rgamma "
    "spence y0 y1 sici fresnel"
).split()
_BINARY = "betaln xlog1py xlogy beta kl_div rel_entr owens_t poch boxcox boxcox1p".split()

CASES: dict[str, Case] = {
    **{f"special.{name}": case(f"special.{name}", X) for name in _UNARY},
    **{f"special.{name}": case(f"special.{name}", X, Y) for name in _BINARY},
    "special.logsumexp": case("special.logsumexp", X, axis=1),
    "special.sigmoid": case("special.expit", X),
    "special.lgamma": case("special.gammaln", X),
    "special.polygamma": case("special.polygamma", 2, X),
    "special.mvlgamma": case("special.multigammaln", BIG, 3),
    "special.zeta": case("special.zeta", 3.0, ABOVE, note="differentiable in q"),
    "special.betainc": case("special.betainc", X, Y, X[::-1].copy(), tol=1e-3),
    "special.erfcinv": case("special.erfcinv", X),
    "special.gammainc": case("special.gammainc", BIG, ABOVE, tol=1e-3),
    "special.gammaincc": case("special.gammaincc", BIG, ABOVE, tol=1e-3),
    "special.comb": case("special.comb", BIG, X),
    "special.expn": case("special.expn", 3, X),
    "special.hyp1f1": case("special.hyp1f1", 1.5, 2.5, X, note="differentiable in x"),
    "special.iv": case("special.iv", 2, X, note="differentiable in x"),
    "special.ive": case("special.ive", 2, X, note="differentiable in x"),
    "special.jv": case("special.jv", 2, X, note="differentiable in x"),
    "special.yn": case("special.yn", 2, X, note="differentiable in x"),
    "special.wofz": case("special.wofz", X),
}


def _stats(distribution: str, names: str, *args: Any, **options: Any) -> None:
    for name in names.split():
        CASES[f"scipy.stats.{distribution}.{name}"] = case(f"stats.{distribution}.{name}", *args, **options)


_stats("norm", "cdf logcdf logpdf logsf pdf sf", X, Y, ABOVE)
_stats("beta", "logpdf pdf", X, ABOVE, ABOVE[::-1].copy())
_stats("beta", "cdf", X, ABOVE, ABOVE[::-1].copy(), tol=1e-3)
_stats("chi2", "logpdf pdf", X, ABOVE)
_stats("chi2", "cdf", X, ABOVE, tol=1e-3)
_stats("gamma", "logpdf pdf", X, ABOVE)
_stats("gamma", "cdf", X, ABOVE, tol=1e-3)
_stats("t", "logpdf pdf", X, ABOVE)
_stats("t", "cdf logcdf", X, ABOVE, tol=1e-3)
_stats("poisson", "logpmf pmf", COUNTS, ABOVE)
_stats("poisson", "cdf", COUNTS, ABOVE, tol=1e-3)
CASES["scipy.stats.dirichlet.logpdf"] = case(
    "stats.dirichlet.logpdf", ABOVE[:3], call=lambda a: tg.stats.dirichlet.logpdf(SIMPLEX, a)
)
CASES["scipy.stats.dirichlet.pdf"] = case(
    "stats.dirichlet.pdf", ABOVE[:3], call=lambda a: tg.stats.dirichlet.pdf(SIMPLEX, a)
)
_stats("multivariate_normal", "logpdf pdf", X[:, :2].copy(), Y[:2].copy(), COV)
CASES["scipy.stats.multivariate_normal.entropy"] = case(
    "stats.multivariate_normal.entropy", COV, call=lambda c: tg.stats.multivariate_normal.entropy(np.zeros(2), c)
)
LEFT_OUT: dict[str, str] = {}
