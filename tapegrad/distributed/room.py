"""Room: the memory that a collective takes for itself, for what comes from other ranks and what goes to them.

It is declared with the collective, so the ledger counts it (category ``communication``), a budget makes way for it, and
a dry run knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tapegrad.device.types import Array, DType, Namespace

Taken = tuple[int, DType]
"""The elements and the dtype of an array that is taken of a room."""
_ALIGNED = 16
"""Bytes of which each array begins at a multiple."""


def bytes_of(taken: Iterable[Taken]) -> int:
    """The bytes of a room of which these arrays are taken."""
    return sum(_aligned(size * dtype.itemsize) for size, dtype in taken)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Room:
    """Memory that is cut into arrays of one dimension; ``memory``: bytes (None: of each array's own)."""

    def __init__(self, xp: Namespace, memory: Array | None) -> None:
        self._xp, self._memory, self._at = xp, memory, 0

    def take(self, size: int, dtype: DType) -> Array:
        """The next array, whose values do not count."""
        if self._memory is None:
            return self._xp.empty(size, dtype)
        begin, nbytes = self._at, size * dtype.itemsize
        self._at += _aligned(nbytes)
        return self._memory[begin : begin + nbytes].view(dtype)
