"""The state of a thread: its recorders, its gradient walks, its executor.  Only this module changes it.

It is changed for the length of a call, by :func:`during`, which is given what to call.  An interrupt (Ctrl-C) comes
where a Python function begins, where a call has returned, or at a jump backwards.  In :func:`holding` no such place
lies between the call and the statement that puts the state back, so nothing can come in between.  In a ``with`` block
one does: an ``__exit__`` written in Python may be interrupted at its first instruction, and a generator of
``contextlib``'s ends whenever its traceback is dropped.

Only what the user enters by ``with`` takes a pair: a tape :func:`tell`, :func:`tell_no_more`, an autocast
:func:`cast_from_now`, :func:`cast_no_more`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from tapegrad.core.locks import lock
from tapegrad.core.threads import Local

if TYPE_CHECKING:
    from tapegrad.core.buffer import Buffer
    from tapegrad.core.protocols import BatchRecorder, Executor, Recorder

T = TypeVar("T")


class _Thread(Local):
    """What is going on in this thread."""

    recorders: tuple[Recorder, ...] = ()
    """Told of every node, outermost first."""
    hidden: tuple[Recorder, ...] = ()
    """Recorders that are not told for the moment, though the work is part of what they record."""
    walks: int = 0
    """Gradient walks under way."""
    deferring: list[Buffer] | None = None
    """While a gradient walk runs: the reductions that wait to share a kernel."""
    batches: tuple[BatchRecorder, ...] = ()
    """The recorders for which a value is one example of many: asked before one is read."""
    autocasts: tuple[Any, ...] = ()
    """The half dtypes of the autocasts that have been entered, outermost first (None: a disabled one); the last is in
    force.  ``ops/casting.py`` asks it where it makes operands of what a user passes, and nobody else does."""
    precision: str | None = None
    """The precision of float32 products in a rerun, which repeats that of its first run; None: the process's."""
    refused: tuple[tuple[str, int] | None, type[Exception], str] | None = None
    """The user's line where the conversion of a value was last refused, and the error."""
    executor: Executor
    """What does works (see :func:`install`)."""


thread = _Thread()


class Changes(TypedDict, total=False):
    """New values of what :data:`thread` holds."""

    recorders: tuple[Recorder, ...]
    hidden: tuple[Recorder, ...]
    walks: int
    deferring: list[Buffer] | None
    batches: tuple[BatchRecorder, ...]
    autocasts: tuple[Any, ...]
    precision: str | None
    executor: Executor


def during(f: Callable[..., T], *args: object, **changes: Unpack[Changes]) -> T:
    """What ``f(*args)`` returns; while it runs, :data:`thread` holds the ``changes``."""
    return holding(thread, f, *args, **changes)


def holding(local: threading.local, f: Callable[..., T], *args: object, **changes: object) -> T:
    """What ``f(*args)`` returns; while it runs, ``local`` holds the ``changes`` for this thread."""
    before = {name: getattr(local, name) for name in changes}
    try:
        local.__dict__.update(changes)
        return f(*args)
    finally:
        local.__dict__.update(before)


_MOST_FRAMES = 20_000
"""Added for nested calls: more than a thousand of them take, and less than the C stack holds."""
_frames = 0
_deepening = lock()


def nested(frames: int, f: Callable[..., T], *args: object) -> T:
    """Return what ``f(*args)`` returns, a call that may contain others of its kind to any depth.

    The interpreter's limit of recursion shall count the user's frames alone: the ``frames`` of the engine's own are
    added to it meanwhile.
    """
    _deepen(frames)
    try:
        return f(*args)
    finally:
        _deepen(-frames)


def _deepen(frames: int) -> None:
    global _frames
    with _deepening:
        before, _frames = _frames, _frames + frames
        sys.setrecursionlimit(sys.getrecursionlimit() + min(_frames, _MOST_FRAMES) - min(before, _MOST_FRAMES))


def install(executor: Executor) -> None:
    """Let ``executor`` do the works of every thread, but where :func:`during` says otherwise."""
    _Thread.executor = executor


def unrecorded(f: Callable[..., T], *args: object) -> T:
    """What ``f(*args)`` returns; no tape records what it does, but who follows a batch goes on (see ``batches``)."""
    outer, batches = thread.recorders, thread.batches
    following = tuple([r for r in outer if r in batches]) if batches else ()
    return during(f, *args, recorders=following, hidden=outer or thread.hidden)


def tell(recorder: Recorder, position: int | None = None) -> None:
    """Tell ``recorder`` of what happens from now on, after ``position`` others (None: after all).

    An interrupt may come when that is done already: the caller undoes it.
    """
    others = thread.recorders
    thread.recorders = (*others, recorder) if position is None else (*others[:position], recorder, *others[position:])


def tell_no_more(recorder: Recorder) -> None:
    """Tell ``recorder`` of nothing from now on."""
    recorders = thread.recorders
    if recorder in recorders:
        position = recorders.index(recorder)
        thread.recorders = recorders[:position] + recorders[position + 1 :]


PRECISIONS = ("highest", "high")


def default_precision() -> str:
    """The precision of float32 products before one is chosen: what ``CUPY_TF32`` says."""
    return PRECISIONS[os.environ.get("CUPY_TF32") == "1"]


chosen = [default_precision()]
"""The precision of float32 products in every thread that no rerun says otherwise of."""


def choose_precision(precision: str) -> None:
    """Float32 products have this precision from now on, in every thread that no rerun says otherwise of."""
    chosen[:] = [precision]


def chosen_precision() -> str:
    """What was chosen last."""
    return chosen[0]


def precision() -> str:
    """The precision of float32 products that begin now in this thread."""
    return thread.precision or chosen[0]


def refuse(line: tuple[str, int] | None, error: Exception) -> None:
    """Note the error with which the conversion of a value is refused at the user's ``line``, but not its traceback."""
    thread.refused = line, type(error), str(error)


def last_refusal() -> tuple[tuple[str, int] | None, type[Exception], str] | None:
    """Return what :func:`refuse` noted last, and forget it."""
    refused, thread.refused = thread.refused, None
    return refused


def cast_from_now(dtype: Any) -> None:
    """An autocast to ``dtype`` (None: a disabled one) begins."""
    thread.autocasts = (*thread.autocasts, dtype)


def cast_no_more() -> None:
    """The innermost autocast ends."""
    thread.autocasts = thread.autocasts[:-1]
