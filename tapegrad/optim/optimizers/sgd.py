"""SGD: gradient descent, with momentum or Nesterov's."""

from __future__ import annotations

from typing import Unpack

from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Schedule
from tapegrad.tensor import Tensor


class SGD(Optimizer):
    """Gradient descent, optionally with momentum (Polyak, 1964) or Nesterov's (Sutskever et al., ICML 2013).

    Without momentum ``x -= rate * g``; with it ``v = momentum * v - rate * g`` and ``x += v``, or with ``nesterov``
    ``x += momentum * v - rate * g``.  ``options``: see :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.momentum = checks.share(self, "momentum", momentum)
        self.nesterov = nesterov
        if momentum:
            self.slot_names = ("momentum",)

    @property
    def rows_alone(self) -> bool:  # type: ignore[override]
        """Without momentum and decay: then a row without a gradient stays as it is anyway."""
        return not (self.momentum or self.weight_decay)

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return updates.of_tensors(SGD.formula(self, rate, step), (x, g, *slots), None)

    def formula(self, rate: float, step: int) -> updates.Formula:
        if self.slot_names:
            return updates.momentum_formula(rate, self.momentum, self.nesterov)
        return updates.sgd_formula(rate)
