"""Copies of the arrays that users pass as operands: one of each array, while it has the same content.

A use of a NumPy or CuPy array takes a copy, since the user may change it.  While something refers to the copy (a tape's
record, a lazy value), a later use of the array compares its bits with the copy's, and shares that if they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

from tapegrad.core.buffer import Buffer
from tapegrad.device import Device, contents
from tapegrad.device.numerics import bits


class Operands:
    """The copies, by where the arrays are."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[Hashable, Buffer] = WeakValueDictionary()
        self._owners: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def copy(self, x: Any, device: Device, make: Callable[[], Buffer]) -> tuple[Buffer, bool]:
        """Return a copy of ``x`` on ``device``, and whether it is one that others have; else ``make`` has made it."""
        location = contents.location(x, device)
        if location is None:
            return make(), False
        owner, key = location
        buffer = self._known(owner, key, x, device)
        if buffer is not None:
            return buffer, True
        buffer = self._copies[key] = make()
        self._owners[key] = owner
        self._note(key, x, device)
        return buffer, False

    def forget(self, buffer: Buffer) -> None:
        """From now on ``buffer`` is no copy: it is watched, and the array that it was made of is a constant."""
        for key in [key for key, b in self._copies.items() if b is buffer]:
            self._copies.pop(key, None)

    def _known(self, owner: Any, key: Hashable, x: Any, device: Device) -> Buffer | None:
        buffer = self._copies.get(key)
        if buffer is None or self._owners.get(key) is not owner:  # another array may be there by now
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

    def forget(self, buffer: Buffer) -> None:
        """As :meth:`Operands.forget`."""
        super().forget(buffer)
        self._outside.forget(buffer)

    def _known(self, owner: Any, key: Hashable, x: Any, device: Device) -> Buffer | None:
        return super()._known(owner, key, x, device) or self._outside._known(owner, key, x, device)

    def _same(self, key: Hashable, buffer: Buffer, x: Any, device: Device) -> bool:
        return self._sums[key] == self._sum(x, device)

    def _note(self, key: Hashable, x: Any, device: Device) -> None:
        self._sums[key] = self._sum(x, device)

    def _sum(self, x: Any, device: Device) -> bytes:
        return bits.checksum(x if hasattr(x, "__array_interface__") else device.numpy(x))
