"""CUDA graphs: what a function asks of a stream, captured, and the memory that it works in meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from tapegrad.errors import GraphError

if TYPE_CHECKING:
    from tapegrad.device.base import Device


class Scratch:
    """Lends memory that is there already, after each ``restart`` from its beginning: works of a graph share it."""

    def __init__(self, device: Device) -> None:
        self._device, self._memory = device, None
        self._size = self._at = 0
        self.lacks = 0
        """Bytes that would have been enough, if they were not."""

    def use(self, memory: Any) -> None:
        """Lend the bytes of an array from now on."""
        self._memory, self._size = memory, memory.nbytes
        self.restart()

    def restart(self) -> None:
        """What has been lent is wanted no more."""
        self._at = self.lacks = 0

    def __call__(self, nbytes: int) -> Any:
        """A pointer to that many bytes, as CuPy's allocators give it.  Raises GraphError."""
        start, self._at = self._at, self._at + -(-nbytes // _APART) * _APART
        if self._at > self._size or self._memory is None:
            self.lacks = self._at
            raise GraphError(f"{nbytes} bytes are allocated, which a CUDA graph must not do")
        cuda = self._device.xp.cuda
        owned = cuda.UnownedMemory(self._memory.data.ptr + start, nbytes, self._memory, self._device.index)
        return cuda.MemoryPointer(owned, 0)


_APART = 512
"""Bytes of which places in scratch memory are multiples, as in CuPy's pool."""


def refused(nbytes: int) -> NoReturn:
    """An allocator that has no memory.  Raises GraphError."""
    raise GraphError(f"{nbytes} bytes are allocated, which a CUDA graph must not do")


def captured(stream: Any, f: Callable[[], object]) -> Any:
    """The graph of what ``f`` asks of the current stream, which is ``stream``.  Raises GraphError."""
    failure: Exception | None = None
    stream.begin_capture()
    try:
        f()
    except Exception as e:
        failure = e
    finally:  # always: otherwise the stream would continue to capture
        try:
            graph = stream.end_capture()
        except Exception as e:
            failure = failure or e
    try:
        if failure is not None:
            raise GraphError(f"{type(failure).__name__}: {failure}") from failure
        return graph
    finally:
        failure = None  # its traceback refers to this frame
