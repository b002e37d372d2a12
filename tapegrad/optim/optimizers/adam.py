"""Adam and AdamW."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Unpack

from tapegrad import ops
from tapegrad.core.live_numbers import present
from tapegrad.core.state import thread
from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Schedule
from tapegrad.tensor import Tensor


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), in the order of computation at the end of section 2 of the paper.

    ``m = beta_1 m + (1 - beta_1) g``, ``v = beta_2 v + (1 - beta_2) g^2``, ``x -= a m / (sqrt(v) + epsilon)`` with
    ``a = rate sqrt(1 - beta_2^t) / (1 - beta_1^t)``.  As in Keras, ``epsilon`` is the paper's epsilon hat; the epsilon
    of its Algorithm 1, which PyTorch uses, is larger by ``1 / sqrt(1 - beta_2^t)``.
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.beta_1 = checks.share(self, "beta_1", beta_1)
        self.beta_2 = checks.share(self, "beta_2", beta_2)
        self.epsilon = checks.at_least(self, "epsilon", epsilon, 0.0)

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return updates.of_tensors(Adam.formula(self, rate, step), (x, g, *slots), None)

    def formula(self, rate: float, step: int) -> updates.Formula:
        return updates.adam_formula(self._factor_of(rate, step), self.beta_1, self.beta_2, self.epsilon)

    def _factor_of(self, rate: float, step: int) -> Any:
        if isinstance(step, Tensor):
            return self._factor_on_device(rate, step)
        return thread.executor.number(partial(self._factor, rate, step))

    def _factor_on_device(self, rate: Any, step: Tensor) -> Any:
        first, second = (updates.weight_of(beta, step) for beta in (self.beta_1, self.beta_2))
        return updates.scalar(rate, step) * ops.sqrt(second) / first

    def _factor(self, rate: float, step: int) -> float:
        rate, step = present(rate), present(step)
        return rate * math.sqrt(1.0 - self.beta_2**step) / (1.0 - self.beta_1**step)


class AdamW(Adam):
    """Adam with decoupled weight decay on by default (Loshchilov and Hutter, arXiv 1711.05101), as in Keras."""

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, weight_decay, **options)
