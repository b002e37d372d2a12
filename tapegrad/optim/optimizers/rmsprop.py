"""RMSprop, plain, centered, or with momentum."""

from __future__ import annotations

from typing import Unpack

from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Schedule
from tapegrad.tensor import Tensor


class RMSprop(Optimizer):
    """Divides by a moving root mean square of the gradients (Tieleman and Hinton, Coursera lecture 6.5, 2012).

    ``s = rho s + (1 - rho) g^2``, ``x -= rate g / sqrt(s + epsilon)``; ``centered``: ``s`` less the square of the mean
    gradient ``a = rho a + (1 - rho) g`` in its place (Graves, arXiv 1308.0850, equations 38 to 45); ``momentum``:
    ``v = momentum v + rate g / sqrt(...)``, ``x -= v``.  As there, in Keras and in optax ``epsilon`` is under the root;
    PyTorch adds its own behind it, and keeps the rate out of ``v``.  ``options``: see :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.rho = checks.share(self, "rho", rho)
        self.momentum = checks.share(self, "momentum", momentum)
        self.epsilon = checks.at_least(self, "epsilon", epsilon, 0.0)
        self.centered = centered
        self.slot_names = ("mean_square", *("mean_gradient",) * bool(centered), *("momentum",) * bool(momentum))

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return updates.of_tensors(RMSprop.formula(self, rate, step), (x, g, *slots), None)

    def formula(self, rate: float, step: int) -> updates.Formula:
        centered, moved = bool(self.centered), bool(self.momentum)
        return updates.rmsprop_formula(rate, self.rho, self.momentum, self.epsilon, centered, moved)
