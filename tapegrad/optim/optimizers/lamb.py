"""LAMB: Adam with a rate for each variable, for large batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

from tapegrad import ops
from tapegrad.core.live_numbers import present
from tapegrad.core.state import thread
from tapegrad.ops import updates
from tapegrad.optim.clipping import sum_of_squares
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Options, Row, Rows, Schedule
from tapegrad.tensor import Tensor, materialize
from tapegrad.variable import Variable


class LAMB(Optimizer):
    """LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv 1904.00962).

    With Adam's ``m`` and ``v``: ``u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay x``, and
    ``x -= rate |x| / |u| u``, where a norm is that of the whole variable; where one is 0 the quotient is 1 (algorithm
    2, with the identity for phi).  ``weight_decay`` is a part of ``u``, not apart from it as elsewhere.  On CUDA all
    directions of a group are one kernel; norms and steps take three more for each variable.  ``options``: see
    :class:`Optimizer`.
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.beta_1 = checks.share(self, "beta_1", beta_1)
        self.beta_2 = checks.share(self, "beta_2", beta_2)
        self.epsilon = checks.at_least(self, "epsilon", epsilon, 0.0)

    def groups(self, pairs: Sequence[tuple[Tensor, Variable]]) -> list[list[int]]:
        # Ranks that have parts of variables sum norms together: in one collective, however their parts differ in size.
        return super().groups(pairs) if self.parts is None else [list(range(len(pairs)))]

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return LAMB.update_many(self, [x], [g], [slots], rate, step, None)[0]

    def update_many(self, xs: Row, gs: Row, slots: Rows, rate: float, step: int, shrink: float | None) -> Rows:
        betas = self.beta_1, self.beta_2
        scales: list[Any]
        if isinstance(step, Tensor):
            scales = [1.0 / updates.weight_of(beta, step) for beta in betas]
        else:
            scales = [thread.executor.number(partial(_unbiased, beta, step)) for beta in betas]
        ms, vs = ([own[i] for own in slots] for i in (0, 1))
        scale_m, scale_v = scales
        formula = updates.lamb_formula(scale_m, scale_v, self.beta_1, self.beta_2, self.epsilon, self.weight_decay)
        made = updates.of_many(formula, (xs, gs, ms, vs), None)
        new = []
        for x, (u, m, v), lengths in zip(xs, made, self._lengths(xs, [u for u, _, _ in made])):
            new.append((self._moved(x, u, lengths, rate), m, v))
            materialize(*new[-1])
        return new

    def _lengths(self, xs: Row, us: Row) -> list[tuple[Tensor, Tensor]]:
        """The norms of variables and directions, over all their parts."""
        squares: list[Any] = [sum_of_squares(t) for pair in zip(xs, us) for t in pair]
        if self.parts is not None:
            every = self.parts.total(ops.stack(squares))
            squares = [every[i] for i in range(len(squares))]
        lengths = [ops.sqrt(s) for s in squares]
        return list(zip(lengths[::2], lengths[1::2]))

    def _moved(self, x: Tensor, u: Tensor, lengths: tuple[Tensor, Tensor], rate: Any) -> Tensor:
        of_x, of_u = lengths
        none = (of_x == 0) | (of_u == 0)
        trust = ops.where(none, 1.0, of_x / ops.where(none, 1.0, of_u))
        return x - ops.asarray(rate, dtype=x.dtype, device=x.device) * ops.astype(trust, x.dtype) * u


def _unbiased(beta: float, step: Any) -> float:
    return 1.0 / (1.0 - beta ** present(step))
