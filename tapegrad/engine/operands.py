"""Copies of the arrays that users pass as operands: one of each array, while it has the same content.

A use of a NumPy or CuPy array takes a copy, since the user may change it.  While something refers to the copy (a tape's
record, a lazy value), a later use of the array compares its bits with the copy's, and shares that if they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

from tapegrad.core.buffer import Buffer
from tapegrad.device import Device, contents
from tapegrad.device.numerics import bits

_LEAST_SWEPT = 64


class Operands:
    """The copies, by where the arrays are."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, tuple[ref[Any], ref[Buffer]]] = {}
        """The array that owns the memory, and the copy."""
        self._sweep_at = _LEAST_SWEPT
        self._watched: set[ref[Buffer]] = set()

    def copy(self, x: Any, device: Device, make: Callable[[], Buffer]) -> tuple[Buffer, bool]:
        """Return a copy of ``x`` on ``device``, and whether it is one that others have; else ``make`` has made it."""
        location = contents.location(x, device)
        if location is None:
            return make(), False
        owner, key = location
        buffer = self._known(owner, key, x, device)
        if buffer is not None:
            return buffer, True
        buffer = make()
        if len(self._copies) >= self._sweep_at:
            self._copies = {k: pair for k, pair in list(self._copies.items()) if pair[1]() is not None}
            self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._copies))
        self._copies[key] = ref(owner), ref(buffer)
        self._note(key, x, device)
        return buffer, False

    def watch(self, buffer: Buffer) -> None:
        """From now on ``buffer`` is watched, and no copy of the array that it was made of, which is a constant."""
        self._watched.add(ref(buffer, self._watched.discard))

    def _known(self, owner: Any, key: Hashable, x: Any, device: Device) -> Buffer | None:
        pair = self._copies.get(key)
        if pair is None or pair[0]() is not owner:  # another array may be there by now
            return None
        buffer = pair[1]()
        if buffer is None or pair[1] in self._watched:
            return None
        return buffer if self._same(key, buffer, x, device) else None

    def _same(self, key: Hashable, buffer: Buffer, x: Any, device: Device) -> bool:
        return buffer.array is not None and contents.same(device, buffer.array, x)

    def _note(self, key: Hashable, x: Any, device: Device) -> None:
        """The copy has the content of ``x``."""


class DryOperands(Operands):
    """Those of a dry run, whose copies have no content: checksums of the arrays stand for it.

    ``outside``: copies that there were before; the run would share them.
    """

    def __init__(self, outside: Operands) -> None:
        super().__init__()
        self._outside = outside
        self._sums: dict[Hashable, bytes] = {}

    def watch(self, buffer: Buffer) -> None:
        """As :meth:`Operands.watch`."""
        super().watch(buffer)
        self._outside.watch(buffer)

    def _known(self, owner: Any, key: Hashable, x: Any, device: Device) -> Buffer | None:
        return super()._known(owner, key, x, device) or self._outside._known(owner, key, x, device)

    def _same(self, key: Hashable, buffer: Buffer, x: Any, device: Device) -> bool:
        return self._sums[key] == self._sum(x, device)

    def _note(self, key: Hashable, x: Any, device: Device) -> None:
        self._sums[key] = self._sum(x, device)

    def _sum(self, x: Any, device: Device) -> bytes:
        return bits.checksum(x if hasattr(x, "__array_interface__") else device.numpy(x))
