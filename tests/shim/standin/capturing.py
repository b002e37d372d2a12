"""Graphs: what is put on a capturing stream is written down, and done whenever the graph is launched.

A graph keeps no memory alive: it holds addresses, as a real one does.  Whatever a capture does not bear invalidates it,
and ``end_capture`` says so; then the stream can be used again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

from . import state

_numbers = itertools.count(1)


class Capture:
    """What one stream has been asked since ``begin_capture``."""

    def __init__(self, stream: Any):
        self.stream, self.works, self.broken = stream, [], ""
        self.thread = threading.get_ident()


class Graph:
    """Works in order; ``launch`` puts them on a stream."""

    def __init__(self, works: list[Callable[[], None]]):
        self.works = works
        self.graph, self.graphExec = (0x6A00_0000 + next(_numbers) for _ in range(2))

    def launch(self, stream: Any = None) -> None:
        """Do all works, on a stream or the current one."""
        from .cuda import get_current_stream

        stream = stream or get_current_stream()
        if written(Graph.launch, self, stream=stream.ptr):
            return
        state.log("graph", stream.ptr, name=str(self.graphExec))
        with stream:
            for work in self.works:
                work()

    def upload(self, stream: Any = None) -> None:
        """Nothing is left to be done."""


def of(stream: int | None = None) -> Capture | None:
    """The capture of a stream, given by its pointer, or of the current one."""
    if not state.captures:
        return None
    return state.captures.get(state.stream_pointer() if stream is None else stream)


def invalid(capture: Capture, status: int, text: str) -> Exception:
    """The error of something that a capture does not bear."""
    capture.broken = text
    return state.CUDARuntimeError(status, text)


def refuse(stream: int | None, what: str, error: type[Exception] | None = None) -> None:
    """Raise if the stream is capturing; with ``error``, which is CuPy's own, the capture stays valid."""
    if (capture := of(stream)) is not None:
        if error is not None:
            raise error(f"{what} during stream capture is currently unsupported")
        raise invalid(capture, 900, f"cudaErrorStreamCaptureUnsupported: {what}: operation not permitted when stream "
                                    "is capturing")  # fmt: skip


def refuse_everywhere(what: str) -> None:
    """The same of what concerns all streams that this thread lets capture; in relaxed mode others may go on."""
    for pointer, capture in list(state.captures.items()):
        if capture.thread == threading.get_ident():
            refuse(pointer, what)


def written(f: Callable[..., Any], *args: Any, stream: int | None = None, **kwargs: Any) -> bool:
    """Whether the call has become a part of a graph, instead of being made."""
    capture = of(stream)
    if capture is None:
        return False
    if state.thread.tracing is not None:
        state.thread.tracing.asked = True
        return True
    args, kwargs = _loose(args), {key: _loose(value) for key, value in kwargs.items()}

    def work() -> None:
        _check((args, tuple(kwargs.values())))
        f(*args, **kwargs)

    capture.works.append(work)
    return True


class _Trace:
    """A call made for the shapes of its results: the memory that it was given, and whether it asked the stream."""

    def __init__(self, allocator: Callable[[int], Any]):
        self.allocator, self.lent, self.asked = allocator, [], False

    def __call__(self, size: int) -> Any:
        self.lent.append(pointer := self.allocator(size))
        return pointer


def recorded(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes new arrays become a part of a graph, in memory of the allocator in force.

    On a capturing stream it is called for the shapes of its results, and writes nothing; each launch of the graph calls
    it again and gives it the same memory.
    """

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        capture = of()
        if capture is None or state.thread.tracing is not None:
            return f(*args, **kwargs)
        from . import pool

        trace = state.thread.tracing = _Trace(pool.get_allocator())
        try:
            with pool.using_allocator(trace):
                result = f(*args, **kwargs)
        finally:
            state.thread.tracing = None
        if trace.asked:
            lent = [_loose(pointer) for pointer in trace.lent]

            def work(*args: Any, **kwargs: Any) -> None:
                _check(tuple(pointer for pointer in lent if pointer.mem.size))
                places = iter(lent)
                with pool.using_allocator(lambda size: next(places)):
                    f(*args, **kwargs)

            written(work, *args, **kwargs)
        return result

    return call


def _loose(value: Any) -> Any:
    """The same without what keeps memory alive."""
    from . import memory
    from .array import ndarray

    if type(value) in (tuple, list):
        return type(value)(_loose(one) for one in value)
    if type(value) is dict:
        return {key: _loose(one) for key, one in value.items()}
    if isinstance(value, memory.MemoryPointer):
        mem = memory.UnownedMemory(value.mem.ptr, value.mem.size, None, value.device_id)
        mem.lender = value.mem.lender or (None if isinstance(value.mem, memory.UnownedMemory) else ref(value.mem))
        return memory.MemoryPointer(mem, value.ptr - mem.ptr)
    if isinstance(value, ndarray):
        view = object.__new__(ndarray)
        view.base, view.data = None, _loose(value.data)
        view._look(value.shape, value.dtype, value.strides)
        return view
    return value


def _check(value: Any) -> None:
    """Raise if memory of an array has gone, even if there is other memory where it was."""
    from . import memory
    from .array import ndarray, span

    if type(value) in (tuple, list, dict):
        for one in value.values() if type(value) is dict else value:
            _check(one)
    elif isinstance(value, memory.MemoryPointer) or (isinstance(value, ndarray) and value.size):
        pointer, (start, size) = (value.data, span(value)) if isinstance(value, ndarray) else (value, (value.ptr, 1))
        if pointer.mem.lender is not None and pointer.mem.lender() is None:
            memory.illegal()
        memory.check_range(start, size)


def begin(stream: Any, mode: int | None = None) -> None:
    """``Stream.begin_capture``."""
    if stream.ptr in (0, 1):
        raise RuntimeError("cannot capture on the default (legacy) stream")
    if stream.ptr in state.captures:
        raise state.CUDARuntimeError(401, "cudaErrorIllegalState: the stream is capturing already")
    state.captures[stream.ptr] = Capture(stream)


def end(stream: Any) -> Graph:
    """``Stream.end_capture``."""
    if stream.ptr not in state.captures:
        raise RuntimeError("cannot end the capture of a stream that is not capturing")
    capture = state.captures.pop(stream.ptr)
    if capture.broken:
        raise state.CUDARuntimeError(901, "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error "
                                          f"during capture ({capture.broken})")  # fmt: skip
    return Graph(capture.works)
