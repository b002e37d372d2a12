"""Checks of values on a device that the host does not wait for: kernels write what they find to one record.

The record lies in pinned host memory, to which a device writes by itself, and only where something is wrong: reading it
costs no copy.  The host looks when it has waited for the device anyway, since it reads a value.  The record holds what
the first launch finds wrong, its least and greatest wrong value; what later launches find before the record is read is
lost (``kernels/check.cuh``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from tapegrad.core import locks

Describe = Callable[[int, int, int, int], Exception]
"""The error for wrong values: the least and the greatest of them, and the bounds that the launch was given."""

RECORD = np.dtype([("ticket", "u8"), *((name, "i8") for name in ("kind", "low", "high", "least", "most"))])
"""``tg_record`` of ``kernels/check.cuh``."""

_CHECK = np.dtype([("at", "u8"), ("ticket", "u8"), ("kind", "i8"), ("low", "i8"), ("high", "i8")])
_LIMITS = np.iinfo(np.int64)

_kinds: dict[Hashable, int] = {}
_errors: list[Describe] = []
_lock = locks.lock()


def kind(name: Hashable, error: Describe) -> int:
    """The number of a kind of check; kinds of one ``name`` are the same and have one error."""
    number = _kinds.get(name)
    if number is None:
        with _lock:
            number = _kinds.setdefault(name, len(_errors))
            if number == len(_errors):
                _errors.append(error)
    return number


class Checks:
    """The record of one device; ``memory``: so many bytes of host memory as a NumPy array of bytes."""

    def __init__(self, memory: Any) -> None:
        self._record = memory.view(RECORD)
        self._ticket = memory.view(np.uint64)
        self._address = int(memory.ctypes.data)
        self._numbers = itertools.count(1)
        self._lock = locks.lock()
        self.clear()

    def argument(self, kind: int, low: int, high: int) -> Any:
        """What a kernel takes as its ``tg_check``, for one launch."""
        return np.array((self._address, next(self._numbers), kind, low, high), _CHECK)

    def look(self) -> None:
        """Raise the error of what the record holds, if anything; the caller has waited for the device."""
        if self._ticket[0]:
            with self._lock:
                ticket, number, low, high, least, most = self._record[0].item()
                self.clear()
            if ticket:
                raise _errors[number](least, most, low, high)

    def clear(self) -> None:
        """Empty the record; the caller has waited for the device."""
        self._record[0] = (0, 0, 0, 0, _LIMITS.max, _LIMITS.min)
