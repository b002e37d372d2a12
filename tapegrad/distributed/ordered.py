"""Reductions in the order of ranks: their bits depend on nothing but the ranks' values.

MPI and NCCL add in orders that depend on the library, on sizes, and on how values are cut into pieces.  Here each rank
reduces one part of all values, rank 0's first, then each gets all parts: the same bytes on the wire, and the bits of a
process alone that adds the same values one after the other.  Half types are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.engine import Engine, Transfer

AT_ONCE = 4096
"""Bytes up to which every rank reduces all values itself: one message to wait for in place of two."""


def bounds(size: int, parts: int) -> list[int]:
    """Where ``parts`` equal parts of ``size`` elements begin, and the end; the first ones are longer by 1."""
    each, more = divmod(size, parts)
    return [i * each + min(i, more) for i in range(parts + 1)]


def reduced(xp: Namespace, pieces: Sequence[Array], op: str, out: Array) -> None:
    """Reduce arrays of one dtype, in their order, into ``out``."""
    combine = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[op]
    wide = accumulator(out.dtype) if op == "sum" else out.dtype
    total = pieces[0].astype(wide)
    for piece in pieces[1:]:
        combine(total, piece.astype(wide, copy=False), out=total)
    xp.copyto(out, total, casting="same_kind")


class AllReduce:
    """Reduces an array of one dimension in place; a transfer of two messages, of which the second needs the first."""

    def __init__(self, engine: Engine, xp: Namespace, array: Array, op: str = "sum") -> None:
        self._engine, self._array, ticket = engine, array, engine.ticket()
        self._share: Callable[[], Transfer] | None = None
        if array.nbytes <= AT_ONCE or engine.size == 1:
            mine, pieces = array, [xp.empty_like(array) for _ in range(engine.size)]
            self._now = engine.all_gather(array.copy(), pieces, ticket)
        else:
            at = bounds(array.size, engine.size)
            parts = [array[i:j] for i, j in zip(at, at[1:], strict=False)]
            mine = parts[engine.rank]
            pieces = [xp.empty_like(mine) for _ in parts]
            self._now = engine.exchange(list(enumerate(parts)), list(enumerate(pieces)), ticket)
            self._share = lambda: engine.all_gather(mine, parts, ticket, True)
        self._reduce: Callable[[], None] | None = lambda: reduced(xp, pieces, op, mine)
        if engine.queues(array):
            self.done()

    def done(self) -> bool:
        """Whether the array is reduced; does what is to be done with what has come."""
        if self._reduce is not None:
            after = self._engine.follow(self._now, self._reduce, self._array)
            if after is None:
                return False
            self._reduce = None
            self._now = after if self._share is None else self._share()
        return self._now.done()
