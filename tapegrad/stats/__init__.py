"""Densities and distribution functions under scipy.stats' names, differentiable in the number and all parameters."""

from __future__ import annotations

from tapegrad.spellings import explain
from tapegrad.stats import multivariate, univariate
from tapegrad.stats.multivariate import *  # noqa: F403
from tapegrad.stats.univariate import *  # noqa: F403

__all__ = [*multivariate.__all__, *univariate.__all__]
explain(globals(), __name__)
