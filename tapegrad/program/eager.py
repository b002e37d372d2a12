"""Eager runs of a captured function, under the rules of a captured one; and comparing replays with them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tapegrad import nest
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, lookout, shadowed
from tapegrad.core.state import during
from tapegrad.device import CPU, is_array
from tapegrad.device.types import Array
from tapegrad.engine.evaluate import array_of
from tapegrad.errors import FunctionError
from tapegrad.program.capture import PACKAGE
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

R = TypeVar("R")


class _Look:
    """Refuses a look at a value by the user's code."""

    def looked_at(self, buffer: Buffer) -> None:
        """Raise FunctionError unless it is this package's code that looks."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _READERS:
            if frame.f_code is _STORES:
                return
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
            return
        raise FunctionError(
            f"{frame.f_code.co_filename}:{frame.f_lineno}: the value of {buffer.node!r} is read inside a captured "
            "function (tg.function), which would be frozen in its program: use tg.where in place of `if`, tg.fori_loop "
            "or tg.while_loop in place of a loop on a value, or return the tensor and read it outside"
        )

    def whole(self, buffer: Buffer) -> Buffer:
        """The value itself."""
        return buffer

    def aliased(self, old: Buffer, new: Buffer) -> None:
        """Nothing to note."""


_READERS = ("tapegrad.tensor", "tapegrad.variable", __name__)
_STORES = Variable._content_of.__code__
"""What stores a value in a variable: no number is made of it."""
_LOOK: Any = _Look()


def eager(f: Callable[..., R], args: tuple[Any, ...], named: dict[str, Any]) -> R:
    """What ``f`` returns; what it writes to variables is written if it succeeds.

    Lists and dicts among the arguments are copies: ``f`` may change them.
    """
    writes: dict[Cell, Any] = {}
    args, named = nest.map_leaves(lambda x: x, (args, named))
    with shadowed(writes), lookout() as seen:
        result = during(functools.partial(f, **named), *args, batches=(_LOOK,))
    for cell, content in writes.items():
        cell.set(content, seen[cell][1] if cell in seen else None)
    return result


def difference(replayed: Sequence[Any], eager: Sequence[Any], writes: Sequence[Any]) -> str | None:
    """Where bits differ; the variables hold what the eager run has written."""
    if len(replayed) != len(eager):
        return "the number of results"
    for i, (a, b) in enumerate(zip(replayed, eager, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not same_bits(array_of(a._buffer), array_of(b._buffer)):
            return f"result {i}"
    for write, content in writes:
        now = write.cell.get()
        same = same_bits(content, array_of(now)) if is_array(content) else content == now
        if not same:
            return f"what is written to {getattr(write.owner, 'name', 'a random stream')}"
    return None


def same_bits(x: Array, y: Array) -> bool:
    x, y = CPU.xp.ascontiguousarray(x), CPU.xp.ascontiguousarray(y)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def copied(x: Any) -> Any:
    return x.copy() if is_array(x) else x
