"""Reductions in the order of ranks: their bits depend on nothing but the ranks' values.

MPI and NCCL add in orders that depend on the library, on sizes, and on how values are cut into pieces.  Here each rank
reduces one part of all values, rank 0's first, then each gets all parts: the same bytes on the wire, and the bits of a
process alone that adds the same values one after the other.  Half types are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapegrad.device import CPU
from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array
from tapegrad.distributed.engine import Engine, Transfer

_AT_ONCE = 4096
"""Bytes up to which every rank reduces all values itself: one message to wait for in place of two."""


def bounds(size: int, parts: int) -> list[int]:
    """Where ``parts`` equal parts of ``size`` elements begin, and the end; the first ones are longer by 1."""
    each, more = divmod(size, parts)
    return [i * each + min(i, more) for i in range(parts + 1)]


def reduced(pieces: Sequence[Array], op: str, out: Array) -> None:
    """Reduce arrays of one dtype, in their order, into ``out``."""
    xp = CPU.xp
    combine = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[op]
    wide = accumulator(out.dtype) if op == "sum" else out.dtype
    total = pieces[0].astype(wide)
    for piece in pieces[1:]:
        combine(total, piece.astype(wide, copy=False), out=total)
    xp.copyto(out, total, casting="same_kind")


class AllReduce:
    """Reduces an array of one dimension in place; a transfer of two messages, of which the second needs the first."""

    def __init__(self, engine: Engine, array: Array, op: str = "sum") -> None:
        self._engine, self._array, self._op = engine, array, op
        self._ticket = engine.ticket()
        self._steps: list[Callable[[], Transfer | None]] = []
        small = array.nbytes <= _AT_ONCE or engine.size == 1
        self._now = self._whole() if small else self._in_parts()

    def _whole(self) -> Transfer:
        array = self._array
        pieces = [CPU.xp.empty_like(array) for _ in range(self._engine.size)]
        self._steps = [lambda: reduced(pieces, self._op, array)]
        return self._engine.all_gather(array.copy(), pieces, self._ticket)

    def _in_parts(self) -> Transfer:
        engine, array = self._engine, self._array
        at = bounds(array.size, engine.size)
        parts = [array[i:j] for i, j in zip(at, at[1:], strict=False)]
        mine = parts[engine.rank]
        pieces = [CPU.xp.empty_like(mine) for _ in parts]
        share = lambda: engine.all_gather(mine, parts, self._ticket, True)
        self._steps = [lambda: reduced(pieces, self._op, mine), share]
        return engine.exchange(list(enumerate(parts)), list(enumerate(pieces)), self._ticket)

    def done(self) -> bool:
        """Whether the array is reduced; does what is to be done with what has come."""
        while self._now.done():
            if not self._steps:
                return True
            self._now = self._steps.pop(0)() or self._now
        return False
