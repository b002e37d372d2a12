"""Adagrad."""

from __future__ import annotations

from typing import Unpack

from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Schedule
from tapegrad.tensor import Tensor


class Adagrad(Optimizer):
    """Divides by the root of the sum of all squares (Duchi, Hazan and Singer, JMLR 12, 2011).

    ``s = s + g^2`` from ``initial_accumulator_value`` on, ``x -= rate g / sqrt(s + epsilon)``.  As in Keras and optax
    ``epsilon`` is under the root; PyTorch adds its own behind it, and begins with 0.  ``options``: see
    :class:`Optimizer`.
    """

    slot_names = ("accumulator",)

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.initial_accumulator_value = checks.at_least(
            self, "initial_accumulator_value", initial_accumulator_value, 0.0
        )
        self.epsilon = checks.at_least(self, "epsilon", epsilon, 0.0)

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value if slot == "accumulator" else 0.0

    @property
    def rows_alone(self) -> bool:  # type: ignore[override]
        """Without decay: then a row without a gradient, and its sum of squares, stay as they are anyway."""
        return not self.weight_decay

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return updates.of_tensors(Adagrad.formula(self, rate, step), (x, g, *slots), None)

    def formula(self, rate: float, step: int) -> updates.Formula:
        return updates.adagrad_formula(rate, self.epsilon)
