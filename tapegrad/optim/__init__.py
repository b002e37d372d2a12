"""Optimizers: Keras' (SGD, Adam, AdamW) for variables, and SciPy's for any structure of numbers.

``minimize`` is scipy.optimize.minimize with exact derivatives; ``scipy_objective`` makes an objective for other
functions of SciPy.
"""

from __future__ import annotations

from tapegrad.optim.optimizers import SGD, Adam, AdamW, Optimizer, clip_by_global_norm
from tapegrad.optim.with_scipy import minimize, scipy_objective

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_by_global_norm", "minimize", "scipy_objective"]
