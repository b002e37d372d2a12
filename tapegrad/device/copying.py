"""Copies between a CUDA device and pinned host memory, on streams of their own, while kernels run.

CuPy has no ``record_stream``: memory whose last array goes is lent again at once to the stream it was allocated on,
whatever other streams still do with it.  So three rules make a copy right:

- out: the side stream waits for an event on the current stream, after the last writer; the array is kept until the
  copy's event is done, or until the current stream has been made to wait for it;
- in: the array is allocated on the current stream, whose earlier kernels may still use that memory; so the side
  stream waits for an event on it, and the current stream waits for the copy's event before the array is used;
- a slab that is lent again is written to after the event of the last copy that used it.

"The current stream" stands for all streams the device works on: each waits for the others' work before it is used
(:meth:`CudaDevice.order`), and that takes in what they were made to wait for.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from tapegrad.core import locks
from tapegrad.device.cuda import CudaDevice
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.pinned import Slab, Slabs
from tapegrad.device.types import Array, DType
from tapegrad.errors import DeviceMemoryError, OffloadError


class _Lane:
    """One direction: its stream, and the arrays kept until a copy is done."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.kept: deque[tuple[Any, Any]] = deque()  # (event, array), in about the order of the copies


class Copier:
    """Takes arrays of one device into pinned host memory and brings them back.

    ``limit``: bytes that may be pinned (:class:`tapegrad.device.pinned.Slabs`).
    """

    def __init__(self, device: CudaDevice, limit: int | None = None) -> None:
        self.device = device
        self._cuda = device.xp.cuda
        self.slabs = Slabs(self._cuda.PinnedMemory, limit)
        self._lock = locks.lock()
        with device.active():
            # Non-blocking: else they and the default stream would wait for each other.  Two: one for each direction.
            self._out, self._in = (_Lane(self._cuda.Stream(non_blocking=True)) for _ in range(2))
        # Arrays and pinned memory must outlive the copies that use them.
        weakref.finalize(self, _settle, self._out, self._in).atexit = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of device memory that the caller has let go of and that copies still use."""
        return sum(array.nbytes for lane in (self._out, self._in) for _, array in list(lane.kept))

    def put(self, x: Any) -> HostSlot:
        """Start copying array ``x`` out; the caller may drop it at once; its memory is free when the copy is done.

        An array that is not C-contiguous takes as many bytes again on the device meanwhile.
        Raises OffloadError, DeviceMemoryError.
        """
        with self._lock, self.device.active():
            self.reclaim()
            if type(x) is HostScalar:
                x = x.on_device()
            x = self.device.xp.ascontiguousarray(x).reshape(x.shape)  # a 0-d array becomes one of one dimension
            slab = written = None
            if x.nbytes:
                slab = self.slabs.take(x.nbytes)
                if slab.last is not None:
                    self._out.stream.wait_event(slab.last)
                self._out.stream.wait_event(self._mark(self._cuda.get_current_stream()))
                x.data.copy_to_host_async(slab.ptr, x.nbytes, self._out.stream)
                slab.last = written = self._mark(self._out.stream)
                self._out.kept.append((written, x))
            return HostSlot(self, x.shape, x.dtype, slab, written)

    def reclaim(self, nbytes: int | None = None) -> int:
        """Let go of device arrays whose copies are done; returns their bytes.

        With ``nbytes``, let go of so many (or all there are): the current stream waits for copies that are not done.
        The caller does not.
        """
        freed = 0
        with self._lock:
            for lane in (self._out, self._in):
                while lane.kept and lane.kept[0][0].done:
                    freed += lane.kept.popleft()[1].nbytes
            if nbytes is not None and freed < nbytes and (self._out.kept or self._in.kept):
                with self.device.active():
                    stream = self._cuda.get_current_stream()
                    while freed < nbytes and (kept := self._out.kept or self._in.kept):
                        event, array = kept.popleft()
                        stream.wait_event(event)
                        freed += array.nbytes
                        del array
        return freed

    def _bring(self, slot: HostSlot) -> tuple[Any, Any]:
        """An array on the device that a copy is filling, and the event after the copy (None: nothing to copy)."""
        with self._lock, self.device.active():
            try:
                array = self.device.empty(slot.shape, slot.dtype)
            except DeviceMemoryError:
                if not self.reclaim(slot.nbytes):
                    raise
                array = self.device.empty(slot.shape, slot.dtype)
            if slot._slab is None:
                return array, None
            into = self._in.stream
            into.wait_event(self._mark(self._cuda.get_current_stream()))
            into.wait_event(slot._written)
            array.data.copy_from_host_async(slot._slab.ptr, array.nbytes, into)
            slot._slab.last = done = self._mark(into)
            return array, done

    def _wait(self, event: Any) -> None:
        with self.device.active():
            self._cuda.get_current_stream().wait_event(event)

    def _mark(self, stream: Any) -> Any:
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return event


def _settle(*lanes: _Lane) -> None:
    """Wait for all copies."""
    for lane in lanes:
        lane.stream.synchronize()


class HostSlot:
    """The bytes of one array in host memory."""

    def __init__(self, copier: Copier, shape: tuple[int, ...], dtype: DType, slab: Slab | None, written: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.nbytes = dtype.itemsize
        for n in shape:
            self.nbytes *= n
        self._copier = copier
        self._slab = slab
        self._written = written
        self._coming: tuple[Any, Any] | None = None
        self._dropped = False

    def prefetch(self) -> None:
        """Allocate the array and start copying; the caller has reserved ``nbytes``.  Raises DeviceMemoryError."""
        if self._dropped:
            raise OffloadError(f"the slot of {self.dtype.name}{list(self.shape)} was dropped; its bytes are gone")
        if self._coming is None:
            self._coming = self._copier._bring(self)

    def get(self) -> Array:
        """A fresh array on the device, which the current stream may use.  Raises DeviceMemoryError."""
        self.prefetch()
        assert self._coming is not None
        (array, done), self._coming = self._coming, None
        if done is not None:
            self._copier._wait(done)
        return array

    def drop(self) -> None:
        """Give the slab back, once the copies that use it are done."""
        self._dropped = True
        coming, self._coming = self._coming, None
        if coming is not None and coming[1] is not None:  # nothing waits for the copy, which needs its array
            self._copier._in.kept.append((coming[1], coming[0]))
        slab, self._slab = self._slab, None
        if slab is not None:
            self._copier.slabs.give(slab)

    __del__ = drop
