"""How ``vmap`` applies operations whose operands play different parts (see ``Primitive.batch``)."""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.primitive import REGISTRY
from tapegrad.device.types import Params
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, reshape
from tapegrad.tensor import Tensor

Companions = list[Tensor | None]


def for_all(x: Tensor, companion: Tensor | None, n: int) -> Tensor:
    """The operand for all ``n`` examples."""
    return broadcast_to(expand_dims(x, 0), (n, *x.shape)) if companion is None else companion


def widened(x: Tensor, companion: Tensor, ndim: int) -> Tensor:
    """``companion`` with axes of length 1 behind the batch's, for an operand that counts as one of ``ndim`` axes."""
    if x.ndim >= ndim:
        return companion
    return reshape(companion, (len(companion), *(1,) * (ndim - x.ndim), *x.shape))


def all_but(name: str, *plain: int) -> Callable[[list[Tensor], Companions, int, Params], Tensor | None]:
    """``batch`` of an operation whose operands all get the batch axis, except those at positions ``plain``.

    The other operands must have one rank; otherwise None: example by example.
    """

    def batch(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
        ranks = {x.ndim for i, x in enumerate(operands) if i not in plain}
        if len(ranks) > 1 or any(companions[i] is not None for i in plain):
            return None
        pairs = enumerate(zip(operands, companions, strict=True))
        return barrier(REGISTRY[name], *(x if i in plain else for_all(x, c, n) for i, (x, c) in pairs), **params)

    return batch
