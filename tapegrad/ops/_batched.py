"""How ``vmap`` applies operations whose operands play different parts (see ``Primitive.batch``)."""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.primitive import REGISTRY
from tapegrad.device.types import Params
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.elementwise.arithmetic import add
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, permute_dims, reshape
from tapegrad.tensor import Tensor

Companions = list[Tensor | None]


def full(x: Tensor, companion: Tensor | None, n: int) -> Tensor:
    """The operand for all ``n`` examples."""
    return broadcast_to(expand_dims(x, 0), (n, *x.shape)) if companion is None else companion


def widened(x: Tensor, companion: Tensor, ndim: int) -> Tensor:
    """``companion`` with axes of length 1 behind the batch's, for an operand that counts as one of ``ndim`` axes."""
    if x.ndim >= ndim:
        return companion
    return reshape(companion, (len(companion), *(1,) * (ndim - x.ndim), *x.shape))


def matmul(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
    """Of ``matmul``: leading axes are broadcast, so one matrix for all examples is not repeated."""
    ndim = max(x.ndim for x in operands)
    pairs = zip(operands, companions, strict=True)
    return barrier(REGISTRY["matmul"], *(x if c is None else widened(x, c, ndim) for x, c in pairs))


def all_but(name: str, *plain: int) -> Callable:
    """``batch`` of an operation all of whose operands get the batch axis, but those at positions ``plain``.

    The others have to be alike in rank; else None: example by example.
    """

    def batch(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
        ranks = {x.ndim for i, x in enumerate(operands) if i not in plain}
        if len(ranks) > 1 or any(companions[i] is not None for i in plain):
            return None
        pairs = enumerate(zip(operands, companions, strict=True))
        return barrier(REGISTRY[name], *(x if i in plain else full(x, c, n) for i, (x, c) in pairs), **params)

    return batch


def take(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
    """Of ``take``: rows of all examples lie one after the other."""
    prim, axis = REGISTRY["take"], params["axis"]
    (x, places), (many, wheres) = operands, companions
    if wheres is None:
        return barrier(prim, full(x, many, n), places, axis=axis + 1)
    if many is None:
        return moveaxis(barrier(prim, x, wheres, axis=axis), axis, 0)
    m = x.shape[axis]
    rows = moveaxis(many, axis + 1, 1)
    rows = reshape(rows, (n * m, *rows.shape[2:]))
    rows_taken = barrier(prim, rows, _offset(wheres, n, m), axis=0)
    k = places.ndim
    order = (0, *range(1 + k, 1 + k + axis), *range(1, 1 + k), *range(1 + k + axis, rows_taken.ndim))
    return permute_dims(rows_taken, order)


def scatter_add(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
    """Of ``scatter_add``, likewise."""
    prim, axis, m = REGISTRY["scatter_add"], params["axis"], params["n"]
    (x, places), (many, wheres) = operands, companions
    many = full(x, many, n)
    if wheres is None:
        return barrier(prim, many, places, axis=axis + 1, n=m)
    k = places.ndim
    order = (0, *range(1 + axis, 1 + axis + k), *range(1, 1 + axis), *range(1 + axis + k, many.ndim))
    sums = barrier(prim, permute_dims(many, order), _offset(wheres, n, m), axis=0, n=n * m)
    return moveaxis(reshape(sums, (n, m, *sums.shape[1:])), 1, 1 + axis)


def _offset(places: Tensor, n: int, m: int) -> Tensor:
    """Positions in ``n`` runs of ``m`` each, one after the other."""
    starts = arange(n, device=places.device) * m
    return add(places, reshape(starts, (n, *(1,) * (places.ndim - 1))))
