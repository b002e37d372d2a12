"""Peaks of functions, held against limits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

from tapegrad.errors import TapegradError
from tapegrad.sizes import format_bytes, parse_bytes
from tapegrad.tracing.contexts import measure
from tapegrad.tracing.metrics import Measure

T = TypeVar("T")
_LINES = 3


class PeakError(TapegradError, AssertionError):
    """A function takes more memory than it may.

    ``took_bytes``: what it took; ``max_bytes``: what it may.
    """

    def __init__(self, message: str, took_bytes: int, max_bytes: int) -> None:
        super().__init__(message)
        self.took_bytes, self.max_bytes = took_bytes, max_bytes


def assert_peak(f: Callable[..., T], *args: Any, max_bytes: int | str, **kwargs: Any) -> T:
    """Run ``f(*args, **kwargs)``, and return its result if it takes at most ``max_bytes``.

    What it takes is the most that tensors hold at once while it runs, in bytes in units of 512, beyond what they held
    before (arguments and variables).  ``max_bytes``: such as ``"50MiB"``.  Raises PeakError (AssertionError), which
    says what was alive at the peak, by category and line; ValueError for a limit that is no size.
    """
    limit = parse_bytes(max_bytes)
    gc.collect()  # garbage of others that went meanwhile would make room
    with measure() as m:
        before = m.live_bytes
        result = f(*args, **kwargs)
    check(getattr(f, "__qualname__", repr(f)), m, before, limit)
    return result


def check(name: str, m: Measure, before: int, limit: int) -> None:
    """Raise PeakError if what ``m`` has measured exceeds ``before`` by more than ``limit`` bytes."""
    took = m.peak_bytes - before
    if took > limit:
        alive = ", ".join(f"{category} {format_bytes(n)}" for category, n in m.peak_by_category.items())
        lines = [f"  {format_bytes(n):>12}  {line}" for line, n in list(m.peak_by_line.items())[:_LINES]]
        message = (
            f"{name} took {format_bytes(took)} ({took} bytes) beyond the {format_bytes(before)} alive before; "
            f"max_bytes is {format_bytes(limit)} ({limit})"
        )
        raise PeakError("\n".join([message, f"at the peak: {alive}", *lines]), took, limit)
