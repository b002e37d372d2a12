"""What others do for an optimizer: they cut variables over processes, or scale the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


class Parts(Protocol):
    """Of each variable, the part that this process updates; others update the rest (``tg.distributed.shard``)."""

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Of the part, and of its slots."""

    def made(self, variable: Variable, slot: Variable) -> None:
        """``slot``, of the part's shape, was made for ``variable``."""

    def gradient(self, g: Any, variable: Variable) -> Tensor:
        """The part of a gradient."""

    def value(self, variable: Variable) -> Tensor:
        """The part of the present value."""

    def total(self, squares: Tensor) -> Tensor:
        """The sum of what all processes give."""

    def assign(self, variables: Sequence[Variable], new: Sequence[Tensor]) -> None:
        """Give the variables the values whose parts are ``new``."""


class Scaler(Protocol):
    """Who has scaled the loss (:class:`tapegrad.optim.LossScaler`)."""

    def taken(self, gradients: Sequence[Tensor]) -> tuple[list[Any], Tensor]:
        """The gradients to apply, zeros where they are not to be, and whether they are, on the device."""

    def steps(self, iterations: Any) -> Tensor:
        """Which real change the one after ``iterations`` calls is, from 1, in float64 on the device."""
