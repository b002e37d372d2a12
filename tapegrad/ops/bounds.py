"""Indices within bounds: what only a look at the values can tell.

On a GPU nothing waits for the look: an index out of range is clipped, and the error is raised when the device is next
waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad.device import dtypes, phantom
from tapegrad.errors import IndexingError
from tapegrad.evaluate import array_of, waiting
from tapegrad.node import thread
from tapegrad.ops.arithmetic import clip
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.selection import where
from tapegrad.tensor import Tensor, materialize
from tapegrad.variable import unrecorded


def checked(op: str, indices: Any, n: int, beside: Tensor) -> Tensor:
    """``indices`` of an axis of ``beside`` as int64 in ``[0, n)``, negative ones counted from the end.

    Raises IndexingError for another dtype and out of range (it looks at the values).
    """
    found = tensor(op, indices, beside)
    if not dtypes.is_integer(found.dtype):
        if found.size or found.dtype.kind == "b":
            raise IndexingError(f"{op}: indices must be integers, got {found.dtype}; use astype, or a mask of bools")
    found = cast(found, dtypes.int64)
    if not found.size:
        return found
    device = found.device
    all_places = every(found)
    if device.lazy:
        with unrecorded():
            require(all_places, -n, n - 1, lambda wrong: _out_of_range(op, wrong, n))
            return clip(where(found < 0, found + n, found), 0, n - 1)
    array = array_of(all_places._buffer)
    if phantom.is_phantom(array):  # taken to be in range, and none negative
        return found
    least, most = int(array.min()), int(array.max())
    if least < -n or most >= n:
        raise _out_of_range(op, least if least < -n else most, n)
    return where(found < 0, found + n, found) if least < 0 else found


def every(x: Tensor) -> Tensor:
    """What a check of ``x`` has to look at: in a batch (see ``vmap``) the values of all examples, else ``x`` itself."""
    found = x._buffer
    for guard in reversed(thread.guards):
        found = guard.whole(found)
    return Tensor(found)


def _out_of_range(op: str, index: int, n: int) -> IndexingError:
    return IndexingError(f"{op}: index {index} is out of range for an axis of length {n}")


def require(x: Tensor, low: int, high: int, error: Callable[[int], Exception]) -> None:
    """Raise ``error(value)`` if some integer in ``x`` lies outside ``[low, high]``.

    On a GPU when it is next waited for: to read a value back at once would stop the pipeline in every step.
    """
    from tapegrad.ops.reductions import max, min  # built on indexing, which is built on this file

    if not x.size:
        return
    with unrecorded(), waiting(x._buffer.node.aval):
        least, most = min(x), max(x)
        materialize(least, most)  # in one kernel

    def check() -> None:
        for wrong in (int(least.item()), int(most.item())):
            if not low <= wrong <= high:
                raise error(wrong)

    if x.device.lazy or not phantom.mode.dry:  # else it would be at once, and a dry run has no values
        x.device.later(check)
