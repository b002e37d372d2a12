"""Reductions in the order of ranks: their bits depend on nothing but the ranks' values.

MPI and NCCL add in orders that depend on the library, on sizes, and on how values are cut into pieces.  Here each rank
reduces one part of all values, rank 0's first, then each gets all parts: the same bytes on the wire, and the bits of a
process alone that adds the same values one after the other.  Half types are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.distributed.engine import Done, Engine, Transfer
from tapegrad.distributed.room import Room, Taken

AT_ONCE = 4096
"""Bytes up to which every rank reduces all values itself: one message to wait for in place of two."""


def bounds(size: int, parts: int) -> list[int]:
    """Where ``parts`` equal parts of ``size`` elements begin, and the end; the first ones are longer by 1."""
    each, more = divmod(size, parts)
    return [i * each + min(i, more) for i in range(parts + 1)]


def taken_by_all_reduce(size: int, dtype: DType, engine: Engine, op: str = "sum") -> list[Taken]:
    """What an :class:`AllReduce` of ``size`` elements takes of a room: the ranks' parts, and what it adds them in."""
    if engine.size == 1:
        return []
    if size * dtype.itemsize <= AT_ONCE:
        return [(size, dtype)] * (1 + engine.size) + taken_by_reduced(size, dtype, op)
    at = bounds(size, engine.size)
    mine = at[engine.rank + 1] - at[engine.rank]
    return [(mine, dtype)] * engine.size + taken_by_reduced(mine, dtype, op)


def taken_by_reduced(size: int, dtype: DType, op: str = "sum") -> list[Taken]:
    """What :func:`reduced` takes for ``size`` elements: half types are added in another one."""
    wide = accumulator(dtype) if op == "sum" else dtype
    return [] if wide == dtype else [(size, wide)] * 2


def reduced(xp: Namespace, pieces: Sequence[Array], op: str, out: Array, room: Room) -> None:
    """Reduce arrays of one dtype, in their order, into ``out``; the first one is written over."""
    combine = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[op]
    total, *rest = pieces
    if wide := taken_by_reduced(out.size, out.dtype, op):
        total, more = [room.take(*lies) for lies in wide]
        xp.copyto(total, pieces[0])
    for piece in rest:
        if wide:
            xp.copyto(more, piece)
        combine(total, more if wide else piece, out=total)
    xp.copyto(out, total, casting="same_kind")


class AllReduce:
    """Reduces an array of one dimension in place; a transfer of two messages, of which the second needs the first."""

    def __init__(self, engine: Engine, xp: Namespace, array: Array, op: str, room: Room) -> None:
        self._engine, self._array, ticket = engine, array, engine.ticket()
        self._share: Callable[[], Transfer] | None = None
        self._reduce: Callable[[], None] | None = None
        if engine.size == 1:
            self._now: Transfer = Done()
            return
        if array.nbytes <= AT_ONCE:
            mine, copy = array, room.take(array.size, array.dtype)
            xp.copyto(copy, array)
            pieces = [room.take(array.size, array.dtype) for _ in range(engine.size)]
            self._now = engine.all_gather(copy, pieces, ticket)
        else:
            at = bounds(array.size, engine.size)
            parts = [array[i:j] for i, j in zip(at, at[1:], strict=False)]
            mine = parts[engine.rank]
            pieces = [room.take(mine.size, mine.dtype) for _ in parts]
            self._now = engine.exchange(list(enumerate(parts)), list(enumerate(pieces)), ticket)
            self._share = lambda: engine.all_gather(mine, parts, ticket, True)
        self._reduce = lambda: reduced(xp, pieces, op, mine, room)
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
