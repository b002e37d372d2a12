"""Optimizers under Keras' names, schedules of their rates, averages of variables; SciPy's for any structure of numbers.

``minimize`` is scipy.optimize.minimize with exact derivatives; ``scipy_objective`` makes an objective for other
functions of SciPy.
"""

from __future__ import annotations

from tapegrad.optim import schedules
from tapegrad.optim.averages import EMA
from tapegrad.optim.clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from tapegrad.optim.optimizers import (
    LAMB,
    LBFGS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LazyAdam,
    LazyAdamW,
    LazySGD,
    Lion,
    Optimizer,
    RMSprop,
)
from tapegrad.optim.scaling import LossScaler
from tapegrad.optim.with_scipy import minimize, scipy_objective
from tapegrad.spellings import explain

__all__ = [
    "EMA",
    "LAMB",
    "LBFGS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LazyAdam",
    "LazyAdamW",
    "LazySGD",
    "Lion",
    "LossScaler",
    "Optimizer",
    "RMSprop",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "minimize",
    "schedules",
    "scipy_objective",
]
explain(globals(), __name__)
