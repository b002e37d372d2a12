"""One row of the coverage table: a function of ours, called with arguments in the interior of its domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest


@dataclass(frozen=True)
class Case:
    """``name``: the path of our function under ``tapegrad``; float arrays among ``args`` are what is differentiated.

    ``order``: up to which order it is checked; ``call``: in place of a plain call; ``note``: what a reader has to know.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    order: int = 2
    call: Callable | None = None
    note: str = ""
    tol: float = 1e-4

    @property
    def leaves(self) -> list[np.ndarray]:
        """The arrays to differentiate in."""
        return [x for x in nest.leaves(self.args) if _is_smooth(x)]

    def function(self, *smooth: Any) -> list[tg.Tensor]:
        """The function of just these arrays: its inexact results."""
        given = iter([tg.asarray(x) for x in smooth])
        args = nest.map_leaves(lambda x: next(given) if _is_smooth(x) else x, self.args)
        y = (self.call or self.target())(*args, **self.kwargs)
        found = [leaf for leaf in nest.leaves(y) if isinstance(leaf, tg.Tensor)]
        return [t for t in found if t.dtype.kind in "fcV"]

    def target(self) -> Callable:
        """Our function."""
        return reduce(getattr, self.name.split("."), tg)


def case(
    name: str,
    *args: Any,
    order: int = 2,
    call: Callable | None = None,
    note: str = "",
    tol: float = 1e-4,
    **kwargs: Any,
) -> Case:
    """A row; see :class:`Case`."""
    return Case(name, args, kwargs, order, call, note, tol)


def _is_smooth(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "fc"


def uniform(*shape: int, low: float = 0.2, high: float = 0.9, seed: int = 0) -> np.ndarray:
    """Float64 numbers in ``[low, high)``, all different."""
    return np.random.default_rng(seed).uniform(low, high, shape)
