"""Optimizers under Keras' names, arguments and defaults."""

from __future__ import annotations

from tapegrad.optim.optimizers.adagrad import Adagrad
from tapegrad.optim.optimizers.adam import Adam, AdamW
from tapegrad.optim.optimizers.helpers import Parts
from tapegrad.optim.optimizers.lamb import LAMB
from tapegrad.optim.optimizers.lazy import LazyAdam, LazyAdamW, LazySGD
from tapegrad.optim.optimizers.lbfgs import LBFGS, Minimum
from tapegrad.optim.optimizers.lion import Lion
from tapegrad.optim.optimizers.optimizer import Optimizer
from tapegrad.optim.optimizers.rmsprop import RMSprop
from tapegrad.optim.optimizers.sgd import SGD

__all__ = [
    "LAMB", "LBFGS", "SGD", "Adagrad", "Adam", "AdamW", "LazyAdam", "LazyAdamW", "LazySGD", "Lion", "Minimum",
    "Optimizer", "Parts", "RMSprop",
]  # fmt: skip
