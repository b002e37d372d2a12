"""When a device has no room: others are asked to drop something, and the request is repeated.

The layers above say how (:func:`helpers`): who drops, and who tells what holds the memory.  A fragmented pool is given
back to the device between two tries, so that what was dropped can be joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad.errors import BudgetError, DeviceMemoryError

if TYPE_CHECKING:
    from tapegrad.device.base import Device

_relieve: Callable[[int], bool] = lambda nbytes: False
_explain: Callable[[], str] = lambda: ""


def helpers(relieve: Callable[[int], bool], explain: Callable[[], str]) -> None:
    """``relieve(nbytes)`` drops about so many bytes, or answers False; ``explain()`` tells what is alive."""
    global _relieve, _explain
    _relieve, _explain = relieve, explain


def retried(error: MemoryError, device: Device, what: str, nbytes: int, make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, after it failed with ``error`` and as often as something can be dropped.

    Raises DeviceMemoryError (MemoryError) saying what was asked for, what holds the memory, and what would fit.
    """
    try:
        while not isinstance(error, BudgetError) and _relieve(nbytes):
            device.give_back()
            try:
                return make()
            except MemoryError as e:
                error = e
        if isinstance(error, DeviceMemoryError):
            raise error
        explanation = _explain()
        raise DeviceMemoryError(
            f"{device}: no room for {what}, {nbytes} bytes: {device.room(nbytes)}; tg.memory_budget keeps within a "
            f"limit, tg.recompute_grad keeps fewer intermediates\n{explanation}"
        ) from error
    finally:
        del error  # its traceback names this frame: a cycle, and what all the frames hold would wait for the collector


def pool_room(cupy: Any, nbytes: int) -> str:
    """What there is of memory on CuPy's current device, where ``nbytes`` could not be had."""
    pool, (free, total) = cupy.get_default_memory_pool(), cupy.cuda.runtime.memGetInfo()
    idle, limit = pool.free_bytes(), pool.get_limit()
    state = "in pieces that are too small (fragmented)" if idle >= nbytes else "(full)"
    fits = max(0, min(free, limit - pool.total_bytes()) if limit else free)
    within = f", {limit} are allowed to the pool" if limit else ""
    return (
        f"{pool.used_bytes()} bytes are in use, {idle} idle in the pool {state}, {free} of {total} free on the "
        f"device{within}; {fits} bytes would fit"
    )
