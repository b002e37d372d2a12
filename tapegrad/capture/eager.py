"""Eager runs of a captured function, under the rules of a captured one; and comparing replays with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from tapegrad import nest
from tapegrad.capture.capture import PACKAGE
from tapegrad.capture.memory import Bits, bits_of
from tapegrad.capture.program import Write
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, Seen, lookout, shadowed
from tapegrad.core.state import during
from tapegrad.engine.realize import realize
from tapegrad.errors import FunctionError
from tapegrad.remat.budget.budget import yielding
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

R = TypeVar("R")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Classes of values that are known by what they say."""


class _Look:
    """Refuses a look at a value by the user's code."""

    def follows(self, buffer: Buffer) -> bool:
        """An index may be another one at the next call."""
        return True

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
            "or tg.while_loop in place of a loop on a value, tg.asarray(a)[i] in place of a[i] of a list or NumPy "
            "array, or return the tensor and read it outside"
        )

    def whole(self, buffer: Buffer) -> Buffer:
        """The value itself."""
        return buffer

    def aliased(self, old: Buffer, new: Buffer) -> None:
        """Nothing to note."""

    def draws(self) -> int:
        """1: what is drawn is drawn once."""
        return 1


_READERS = ("tapegrad.tensor", "tapegrad.variable", "tapegrad.sparse.interop", "tapegrad.ops.interop.sharing", __name__)
_STORES = Variable._content_of.__code__
"""What stores a value in a variable: no number is made of it."""
_LOOK: Any = _Look()


class _Reads(Seen):
    """Cells that were used; the bytes of each variable are the less room."""

    def __init__(self, room: yielding | None, overlays: tuple[object, ...]) -> None:
        super().__init__(overlays)
        self._room = room

    def got(self, cell: Cell, content: object, owner: object) -> None:
        """This thread has read ``content``."""
        new = self._room is not None and cell not in self and cell not in self.made
        super().got(cell, content, owner)
        if new and isinstance(owner, Variable) and self._room is not None:
            self._room.has_read(owner.nbytes)


def called(f: Callable[..., R], args: tuple[Any, ...], named: dict[str, Any]) -> R:
    """What ``f`` returns for copies of lists and dicts: it may change them."""
    own, by_name = nest.map_leaves(lambda x: x, (args, named))
    return f(*own, **by_name)


def eager(
    f: Callable[..., R], args: tuple[Any, ...], named: dict[str, Any], then: Callable[[R], None] | None = None,
    room: yielding | None = None,
) -> R:  # fmt: skip
    """What ``f`` returns.  If it and ``then``, which gets the result, succeed, variables get what ``f`` writes.

    ``room``: the budget in which all tasks of ``f`` are done.
    """
    writes: dict[Cell, Any] = {}
    with shadowed(writes):
        with lookout(partial(_Reads, room)) as seen, nullcontext() if room is None else room:
            result = during(called, f, args, named, batches=(_LOOK,))
            nest.refuse_hidden("tg.function", result)
            if room is not None:
                realize([x._buffer for x in nest.flatten(result) if type(x) is Tensor])
                realize([content for content in writes.values() if isinstance(content, Buffer)])
        if then is not None:
            then(result)
    for cell, content in writes.items():
        cell.set(content, seen[cell][1] if cell in seen else None)
    return result


def difference(replayed: Sequence[Any], eager: Sequence[Any], writes: Sequence[tuple[Write, Any]] = ()) -> str | None:
    """Where bits differ: of results, each as ``bits_of`` tells, and of what variables hold now."""
    if len(replayed) != len(eager):
        return "the number of results"
    for i, (a, b) in enumerate(zip(replayed, map(bits_of, eager), strict=True)):
        if not (a == b if type(a) is type(b) is Bits else _identical(a, b)):
            return f"result {i}"
    for write, content in writes:
        if bits_of(write.cell.get()) != content:
            return f"what is written to {getattr(write.owner, 'name', 'a random stream')}"
    return None


def unlike(again: Sequence[Any], results: Sequence[Any]) -> str | None:
    """Why results other than tensors cannot be given by each call: a second run has given others (None: it has not)."""
    if len(again) != len(results):
        return "the number of results differs from call to call"
    for i, (a, b) in enumerate(zip(again, results, strict=True)):
        if type(b) is not Tensor and not _identical(a, b):
            return f"result {i}, of class {type(b).__name__}, is another one at each call"
    return None


def _identical(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and repr(a) == repr(b))
