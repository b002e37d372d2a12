"""Lion."""

from __future__ import annotations

from typing import Unpack

from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Schedule
from tapegrad.tensor import Tensor


class Lion(Optimizer):
    """Steps of equal length by the sign of a momentum (Chen et al., "Symbolic discovery of optimization algorithms",
    arXiv 2302.06675, program 1).

    ``x -= rate sign(beta_1 m + (1 - beta_1) g)``, then ``m = beta_2 m + (1 - beta_2) g``.  Rates are a third to a
    tenth of Adam's, weight decay the inverse.  ``options``: see :class:`Optimizer`.
    """

    slot_names = ("momentum",)

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.beta_1 = checks.share(self, "beta_1", beta_1)
        self.beta_2 = checks.share(self, "beta_2", beta_2)

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return updates.of_tensors(Lion.formula(self, rate, step), (x, g, *slots), None)

    def formula(self, rate: float, step: int) -> updates.Formula:
        return updates.lion_formula(rate, self.beta_1, self.beta_2)
