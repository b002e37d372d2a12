"""Where a buffer's bytes go when they may not stay on its device, and how they come back.

A tier takes the bytes of a filled buffer and gives a :class:`Slot`::

    tier = tiers.default(device)
    slot = tier.put(buffer)      # the caller may let buffer.array go now: device memory is (or soon will be) free
    slot.prefetch()              # optional: starts bringing the bytes back
    array = slot.get()           # a fresh array on the buffer's device, with the same bits
    slot.drop()                  # the tier may reuse the place; also when the slot is garbage

Bytes of arrays that come back belong to whoever asked: **reserve** ``slot.nbytes`` **in the budget before** calling
``prefetch`` (which allocates at once) or, without it, ``get``.  A tier serves many threads, a slot one at a time.

A tier is costly to make (:class:`Host` pins memory, :class:`Disk` makes files): make one and keep it.  :class:`Host`
is for CUDA devices: copies overlap with kernels, and a device array that ``put`` was given is kept until its copy is
done; ``tier.reclaim(nbytes)`` frees so many bytes *now*.  :class:`Disk` serves every device.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, Protocol

from tapegrad.core import locks
from tapegrad.core.buffer import Buffer
from tapegrad.device import Device
from tapegrad.device.copying import Copier
from tapegrad.device.cuda import CudaDevice
from tapegrad.device.pinned import size_class
from tapegrad.device.threads import NAME
from tapegrad.errors import DeviceError, OffloadError

if TYPE_CHECKING:
    from tapegrad.device.types import Array, DType

_GROWTH = 2**20  # places that a file grows by, in bytes: asking the disk for room takes longer than copying a page


class Slot(Protocol):
    """The bytes of one buffer in a tier."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""

    def prefetch(self) -> None:
        """Allocate the array on its device (the caller has reserved ``nbytes``) and start filling it.

        Raises DeviceMemoryError.
        """

    def get(self) -> Any:
        """A fresh array on the buffer's device; the one that ``prefetch`` started, once.  Raises DeviceMemoryError."""

    def drop(self) -> None:
        """Give the place back.  A second call does nothing."""


class Tier(Protocol):
    """A place for bytes."""

    def put(self, buffer: Buffer) -> Slot:
        """Take the bytes of a filled buffer.  Raises OffloadError."""

    def reclaim(self, nbytes: int | None = None) -> int:
        """Let go of device memory whose copy is complete, and return its bytes.

        With ``nbytes``, wait for copies until so many bytes (or all there are) have been let go.
        """


class Host:
    """Pinned host memory, for a CUDA device; copies run on streams of their own (:mod:`tapegrad.device.copying`).

    ``limit``: bytes that may be pinned (default: half of the machine's memory); beyond it ordinary memory serves, and
    a PageableWarning says once that copies wait.  Raises DeviceError for a device whose memory the host's is.
    """

    def __init__(self, device: Device, limit: int | None = None) -> None:
        if not isinstance(device, CudaDevice):
            raise DeviceError(f"device {device} has no memory but the host's to offload from; use tiers.Disk")
        self._copier = Copier(device, limit)

    def put(self, buffer: Buffer) -> Slot:
        """Start copying the bytes of a filled buffer out.  Raises OffloadError, DeviceMemoryError."""
        return self._copier.put(buffer.array)

    def reclaim(self, nbytes: int | None = None) -> int:
        """Let go of device arrays whose copies are done; with ``nbytes``, of so many, and kernels wait for the copies.

        Returns the bytes let go of.
        """
        return self._copier.reclaim(nbytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of device memory that buffers have let go of and that copies still use."""
        return self._copier.kept_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory pinned, lent or idle."""
        return self._copier.slabs.pinned_bytes


class Disk:
    """Bytes in unnamed temporary files of ``directory`` (default: the system's), one file a size class.

    A slot's part of the file is mapped only while it is copied, so it never counts as memory of this process; the
    system may still keep it in its page cache, and a directory on a RAM disk saves nothing.  Places are reused after
    ``drop``; the system removes the files when the Disk or the process is gone, however it ends.
    Raises OffloadError where the directory cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = directory
        self._process = os.getpid()
        self._lock = locks.lock()  # a slot may be found to be garbage while this thread holds it
        self._files: dict[int, _File] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.bytes_held = 0
        """Bytes of all slots not dropped."""
        self.bytes_written = 0
        self.bytes_read = 0
        self._open().close()

    def put(self, buffer: Buffer) -> DiskSlot:
        """Write the bytes of a filled buffer; they are in the file on return.  Raises OffloadError."""
        self._check_process()
        aval, array = buffer.node.aval, buffer.array
        slot = DiskSlot(self, aval.shape, array.dtype, aval.device)
        if slot.nbytes:
            slot._place = self._take(size_class(slot.nbytes, mmap.ALLOCATIONGRANULARITY), slot)
            aval.device.save(array, slot._map())
        with self._lock:
            self.bytes_written += slot.nbytes
            self.bytes_held += slot.nbytes
            slot._held = True
        return slot

    def reclaim(self, nbytes: int | None = None) -> int:
        """Nothing to wait for: ``put`` has copied the bytes when it returns."""
        return 0

    def _open(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(buffering=0, dir=self._directory)
        except OSError as e:
            where = self._directory or tempfile.gettempdir()
            raise OffloadError(f"cannot make a file in {os.fspath(where)!r} to offload to: {e.strerror}") from e

    def _take(self, size: int, slot: DiskSlot) -> tuple[_File, int]:
        with self._lock:
            file = self._files.get(size)
            if file is None:
                file = self._files[size] = _File(self._open(), size)
            try:
                return file, file.take()
            except OSError as e:
                total = sum(f.end for f in self._files.values())
                where = self._directory or tempfile.gettempdir()
                raise OffloadError(
                    f"no room for {slot.dtype.name}{list(slot.shape)}, {slot.nbytes} bytes, in {os.fspath(where)!r}: "
                    f"{e.strerror}; {total} bytes are taken there; give Disk a directory with more room"
                ) from e

    def _read(self, slot: DiskSlot, array: Array) -> None:
        slot.device.load(array, slot._map())
        with self._lock:
            self.bytes_read += slot.nbytes

    def _later(self, slot: DiskSlot, array: Array) -> Future[None]:
        with self._lock:
            if self._reader is None:  # one: a disk reads no faster for being asked twice
                self._reader = ThreadPoolExecutor(1, f"{NAME} disk")
            return self._reader.submit(self._read, slot, array)

    def _check_process(self) -> None:
        """A child's slots would lie where its parent's lie."""
        if os.getpid() != self._process:
            raise OffloadError("this Disk belongs to the process that forked this one; make another one here")


class DiskSlot:
    """One buffer's bytes in a file."""

    def __init__(self, disk: Disk, shape: tuple[int, ...], dtype: DType, device: Device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.nbytes = dtype.itemsize
        for n in shape:
            self.nbytes *= n
        self._disk = disk
        self._place: tuple[_File, int] | None = None
        self._held = False
        self._coming: tuple[Any, Future[None]] | None = None

    def prefetch(self) -> None:
        """Allocate the array and start reading it in another thread.  Raises DeviceMemoryError."""
        if self._coming is None and self.nbytes:
            self._check()
            array = self.device.empty(self.shape, self.dtype)
            self._coming = array, self._disk._later(self, array)

    def get(self) -> Any:
        """A fresh array on the buffer's device.  Raises OffloadError, DeviceMemoryError."""
        self._check()
        coming, self._coming = self._coming, None
        if coming is not None:
            coming[1].result()
            return coming[0]
        array = self.device.empty(self.shape, self.dtype)
        if self.nbytes:
            self._disk._read(self, array)
        return array

    def drop(self) -> None:
        """Give the place in the file back, once nothing reads it any more."""
        coming, self._coming = self._coming, None
        if coming is not None and not coming[1].cancel():
            coming[1].exception()  # waits
        place, self._place = self._place, None
        disk = self._disk
        with disk._lock:
            if place is not None:
                place[0].free.append(place[1])
            if self._held:
                self._held = False
                disk.bytes_held -= self.nbytes

    __del__ = drop

    def _check(self) -> None:
        self._disk._check_process()
        if not self._held:
            raise OffloadError(f"the slot of {self.dtype.name}{list(self.shape)} was dropped; its bytes are gone")

    def _map(self) -> mmap.mmap:
        """The slot's part of the file; unmapped when the last reference goes."""
        assert self._place is not None
        file, start = self._place
        try:
            return mmap.mmap(file.file.fileno(), file.size, offset=start)
        except OSError as e:
            raise OffloadError(f"cannot map {file.size} bytes of a temporary file: {e.strerror}") from e


class _File:
    """A file of places of one size."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = file
        self.size = size
        self.end = 0
        self.free: list[int] = []
        weakref.finalize(
            self, file.close
        )  # in a cycle of garbage a file may be found unclosed before a __del__ of ours

    def take(self) -> int:
        """Where a free place starts.  Raises OSError when the disk is full."""
        if self.free:
            return self.free.pop()
        count = max(1, _GROWTH // self.size)
        _extend(self.file, self.end, count * self.size)
        self.free += range(self.end + (count - 1) * self.size, self.end, -self.size)
        self.end += count * self.size
        return self.end - count * self.size


def _extend(file: IO[bytes], start: int, size: int) -> None:
    """Make the disk find room now: a write through a mapping has no way to say that there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), start, size)
    else:  # macOS, Windows
        file.seek(start)
        zeros = memoryview(bytes(min(size, 1 << 20)))
        while size > 0:
            size -= file.write(zeros[:size])


def host(device: Device) -> Tier:
    """A tier in host memory; on the CPU, whose own memory that is, a :class:`Disk`."""
    return Host(device) if isinstance(device, CudaDevice) else Disk()


def default(device: Device) -> Tier:
    """Where a budget on ``device`` offloads to unless told otherwise: :func:`host`."""
    return host(device)
