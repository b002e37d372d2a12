"""NumPy's methods of arrays that are functions here: those that do not change the array in place."""

from __future__ import annotations

from typing import Any

from tapegrad.ops.create import mapping
from tapegrad.ops.index import choices, partial_sort, sort
from tapegrad.ops.products import products
from tapegrad.ops.reduce import averages, cumulative
from tapegrad.ops.shape import diagonals
from tapegrad.tensor import Tensor, TensorLike, bind_method


def _argsort(self: Tensor, axis: int | None = -1, **options: Any) -> Tensor:
    """Positions of the elements in order along ``axis`` (None: in the flattened array): see ``tg.argsort``."""
    return sort.argsort(self.ravel(), axis=0, **options) if axis is None else sort.argsort(self, axis=axis, **options)


def _compress(self: Tensor, condition: TensorLike, axis: int | None = None) -> Tensor:
    """The slices along ``axis`` where ``condition`` holds: see ``tg.compress``."""
    return choices.compress(condition, self, axis)


def _searchsorted(self: Tensor, v: TensorLike, side: str = "left", sorter: TensorLike | None = None) -> Tensor:
    """Where to insert ``v`` so that the vector stays sorted: see ``tg.searchsorted``."""
    return sort.searchsorted(self, v, side=side, sorter=sorter)


def bind_methods() -> None:
    """Called once, when the ops are imported."""
    for f in (
        averages.ptp, choices.choose, cumulative.cumprod, diagonals.diagonal, diagonals.trace, mapping.copy,
        partial_sort.argpartition, products.dot,
    ):  # fmt: skip
        bind_method(f.__name__, f)
    for method in (_argsort, _compress, _searchsorted):
        bind_method(method.__name__[1:], method)
