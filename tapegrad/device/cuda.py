"""CUDA devices, through CuPy: imported when a device is first asked for, never by ``import tapegrad``.

A device counts as available only when a kernel of ours has been compiled and launched on it: a driver without NVRTC,
or NVRTC without a driver, is noticed here and not in the middle of a training step.

Errors that depend on values, such as an index out of range, are noted by kernels and raised when a value is next read
(:mod:`tapegrad.device.checks`), so a training step does not wait for a GPU.  With ``TAPEGRAD_CHECK_AT_ONCE=1``, read
when a device is first used, the host waits after each launch.

Streams: everything runs on CuPy's current stream, after what was asked of the device on any other: the new stream first
waits for an event on each.  So a tensor made on one stream may be used on another.  An array of the user's belongs to
the stream that is current when it is handed in (``asarray``).
"""

from __future__ import annotations

import gc as garbage
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, TypeVar

import numpy as np

from tapegrad.core import locks
from tapegrad.device import abstract_array, cpu, cublas, cuda_types, cudnn, foreign
from tapegrad.device.base import Device
from tapegrad.device.checks import RECORD, Checks
from tapegrad.device.cudnn import CuDNN
from tapegrad.device.graphs import Scratch, captured, refused
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.oom_retry import other_allocator, outside, pool_room, retried, unusable
from tapegrad.device.probe import Probe, look
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import DeviceError, KernelError

T = TypeVar("T")


_PLAIN_SHARED = 48 * 1024
"""Bytes of shared memory that a block may have without being asked for."""

_PER_THREAD = 2
"""The pointer by which CUDA knows the default stream of the calling thread."""


class CudaDevice(Device):
    """One GPU: CuPy's functions, memory from CuPy's pool."""

    __slots__ = (
        "_before", "_busy", "_capturing", "_checks", "_cudnn", "_current", "_lent", "_lock", "_runtime", "at_once"
    )  # fmt: skip

    def __init__(self, index: int, cupy: Namespace) -> None:
        super().__init__(f"cuda:{index}", "cuda", cupy, 0, lazy=True, index=index)
        self._runtime = cupy.cuda.runtime
        self._current = cupy.cuda.get_current_stream
        self._busy: dict[int, Any] = {}
        self._capturing: set[int] = set()
        self._lock = locks.lock()
        self._checks: Checks | None = None
        self._before: int | None = None
        self._cudnn: tuple[CuDNN | None] | None = None
        self._lent: deque[tuple[Any, Any]] = deque()
        self.at_once = os.environ.get("TAPEGRAD_CHECK_AT_ONCE") == "1"

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.index,)

    def call(self, f: Callable[..., T], /, *args: object, **kwargs: object) -> T:
        """What ``f`` returns, called where this device is CuPy's current one.

        The current stream waits for what this device was asked on others, and is marked afterwards: only then is there
        something to wait for.
        """
        if self._runtime.getDevice() != self.index:
            with self.active():
                return f(*args, **kwargs)
        stream, busy = self._stream_of(), self._busy
        try:
            if len(busy) > 1 or (busy and stream.ptr not in busy):
                self._order(stream)
            return f(*args, **kwargs)
        except RuntimeError as e:
            self._translate(e)
            raise
        finally:  # before the exception, work may have been queued
            if stream.ptr not in busy:
                self._mark(stream)

    def _stream_of(self) -> Any:
        """Return CuPy's current stream.  Raises DeviceError for one on which this device cannot keep order."""
        stream = self._current()
        if stream.ptr and stream.ptr not in self._capturing:  # one of the user's
            if stream.ptr == _PER_THREAD:
                raise DeviceError(
                    "CUDA: per-thread default streams are one stream in name and another in each thread, so works of "
                    "several threads cannot be ordered: unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or give each thread "
                    "a cupy.cuda.Stream of its own"
                )
            try:
                capturing = stream.is_capturing()
            except RuntimeError as e:
                self._translate(e)
                raise
            if capturing:
                raise DeviceError(
                    "CUDA: the current stream is being captured by the program itself, and what tapegrad asks of it "
                    "would wait for other streams and use memory that is lent to others later: end the capture first, "
                    "or capture the step by tg.function"
                )
        return stream

    @contextmanager
    def active(self) -> Iterator[None]:
        """This device is CuPy's current one inside the block, its stream ordered after earlier work."""
        with nullcontext() if self._runtime.getDevice() == self.index else self.xp.cuda.Device(self.index):
            stream = self._stream_of()
            try:
                self._order(stream)
                yield
            except RuntimeError as e:
                self._translate(e)
                raise
            finally:
                self._mark(stream)

    def _translate(self, error: Exception, kernel: str = "") -> None:
        """Raise the exception of tapegrad's for a lack of memory or a failed kernel, named ``kernel`` if known."""
        translated = outside(error) or unusable(error, self, kernel)
        if translated is not None:
            raise translated from error

    def graph(self, f: Callable[[], object], scratch: Scratch | None = None) -> Any:
        """What ``f`` asks of this device, as a CUDA graph: nothing of it is done before the graph is launched.

        Memory and kernels must be there: inside, nothing is allocated, compiled, waited for or copied to the host; what
        asks for memory gets some of ``scratch``.  The stream is one of its own that waits for no other; the graph is in
        the order of the stream that launches it.

        Raises GraphError, whose cause is what ``f`` or CUDA has raised.
        """
        with nullcontext() if self._runtime.getDevice() == self.index else self.xp.cuda.Device(self.index):
            stream = self.xp.cuda.Stream(non_blocking=True)
            self._capturing.add(stream.ptr)
            collects = garbage.isenabled()
            garbage.disable()  # what is collected may unload a module or destroy an event
            try:
                with stream, self.xp.cuda.using_allocator(refused if scratch is None else scratch):
                    return captured(stream, f)
            finally:
                self._capturing.discard(stream.ptr)
                if collects:
                    garbage.enable()

    def scratch(self) -> Scratch:
        """For graphs of this device."""
        return Scratch(self)

    def _order(self, stream: Any) -> None:
        """Make ``stream`` wait for all others that have been asked something."""
        if stream.ptr in self._capturing:
            return
        busy = self._busy
        with self._lock:
            for pointer, other in list(busy.items()):
                if pointer != stream.ptr:
                    event = self.xp.cuda.Event(disable_timing=True)
                    event.record(other)
                    stream.wait_event(event)
                    busy[stream.ptr] = stream  # before the other is removed: the next stream must wait for one of them
                    del busy[pointer]

    def _mark(self, stream: Any) -> None:
        if stream.ptr in self._capturing:
            return
        with self._lock:
            self._busy.setdefault(stream.ptr, stream)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """An uninitialised C-contiguous array from CuPy's pool.  Raises DeviceMemoryError (MemoryError)."""
        try:
            busy = self._busy
            if self._runtime.getDevice() == self.index and len(busy) == 1 and self._stream_of().ptr in busy:
                return self.xp.empty(shape, dtype)  # nothing to wait for, and nothing is asked of the stream
            return self.call(self.xp.empty, shape, dtype)
        except MemoryError as e:
            return self._empty_after(e, shape, dtype)
        except RuntimeError as e:
            self._translate(e)
            raise

    def _empty_after(self, lack: MemoryError, shape: tuple[int, ...], dtype: DType) -> Any:
        """CuPy has given back its unused blocks and tried again by then."""
        again = lambda: self.call(self.xp.empty, shape, dtype)
        return retried(lack, self, f"{dtype.name}{list(shape)}", prod(shape) * dtype.itemsize, again)

    def arrays(self, lies: Sequence[tuple[tuple[int, ...], DType]]) -> list[Any]:
        """As :meth:`empty` makes each; in one go where there is nothing to wait for."""
        busy, empty, made = self._busy, self.xp.empty, list[Any]()
        if self._runtime.getDevice() == self.index and len(busy) == 1 and self._stream_of().ptr in busy:
            try:
                for shape, dtype in lies:
                    made.append(empty(shape, dtype))
                return made
            except MemoryError as e:
                made.append(self._empty_after(e, *lies[len(made)]))
            except RuntimeError as e:
                self._translate(e)
                raise
        return [*made, *super().arrays(lies[len(made) :])]

    def give_back(self) -> None:
        """Unused blocks go from CuPy's pool to the driver: neighbours become one.  Another allocator keeps its own."""
        with self.active():
            self.xp.get_default_memory_pool().free_all_blocks()

    def usage(self) -> tuple[int, int]:
        """Bytes of CuPy's pool in use, by any code here, and its idle bytes; (-1, 0) with another allocator."""
        with self.active():
            if other_allocator(self.xp) is not None:
                return -1, 0
            pool = self.xp.get_default_memory_pool()
            return pool.used_bytes(), pool.free_bytes()

    def room(self, nbytes: int) -> str:
        """Text for an error: whether memory is full or fragmented, and what would fit."""
        with self.active():
            theirs = self._cudnn[0].outside_bytes if self._cudnn and self._cudnn[0] else 0
            return pool_room(self.xp, nbytes, cublas.outside_bytes(self.index), theirs)

    def limit(self, nbytes: int | None) -> None:
        """CuPy's pool holds at most so many bytes here, but not more than the limit it had before."""
        with self.active():
            pool = self.xp.get_default_memory_pool()
            before = pool.get_limit() if self._before is None else self._before
            pool.set_limit(size=min(nbytes or before, before or nbytes or 0))
            self._before = None if nbytes is None else before

    def constant(self, value: complex, dtype: DType) -> HostScalar:
        """A number that kernels take as an argument."""
        return HostScalar(np.asarray(value, dtype=dtype), self)

    def array(self, x: object, dtype: DType | None = None, copy: bool = True) -> Any:
        """``x`` as a CuPy array here, or a 0-d host value as an argument of kernels.

        Arrays of other libraries in CUDA memory come through DLPack or ``__cuda_array_interface__``
        (:mod:`tapegrad.device.foreign`), without a copy where asked.  Raises NotATensorError.
        """
        xp = self.xp
        with self.active():
            if isinstance(x, xp.ndarray):
                array, theirs = x, None
            elif foreign.index(x) is not None:
                array = theirs = foreign.imported(xp, x)
            else:
                return self._upload(x, dtype)
            if array.device.id != self.index:
                array, copy = self._from_another(array), False
            cuda_types.known("asarray", array.dtype)
            if any(n % array.itemsize for n in (*array.strides, array.data.ptr)):
                array, copy = xp.array(array, order="C"), False  # a field of packed records; kernels count in elements
            if dtype is not None and array.dtype != dtype:
                array, copy = array.astype(dtype), False
            if copy:
                array = xp.array(array, order="C")
            if theirs is not None and array is not theirs:
                self._keep(theirs)
            return array

    def _from_another(self, x: Any) -> Array:
        """A C-contiguous copy of an array on another device, made on the current stream here.

        That waits for the stream there, and the stream there for it: its memory may be lent again once ``x`` has gone.
        """
        source, cuda = get(x.device.id), self.xp.cuda
        with source.active():
            near, before = self.xp.ascontiguousarray(x), cuda.Event(disable_timing=True)
            before.record(self._stream_of())
        array = self.empty(x.shape, x.dtype)
        with self.active():
            stream, after = self._stream_of(), cuda.Event(disable_timing=True)
            stream.wait_event(before)
            array.data.copy_from_device_async(near.data, near.nbytes, stream)
            after.record(stream)
        with source.active():
            self._stream_of().wait_event(after)
        return array

    def _keep(self, theirs: object) -> None:
        """Keep another library's array until the work asked for so far is done: it may be freed on any stream."""
        with self._lock:
            while self._lent and self._lent[0][0].done:
                self._lent.popleft()
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(self._stream_of())
            self._lent.append((event, theirs))

    def _upload(self, x: object, dtype: DType | None) -> Array | HostScalar:
        array = cpu.CPU.array(x, dtype, copy=False)
        cuda_types.known("asarray", array.dtype)
        if not array.ndim:
            return HostScalar(np.array(array), self)
        array = np.ascontiguousarray(array)
        try:
            return self.xp.asarray(array)
        except MemoryError as e:
            return retried(e, self, "an array of the user's", array.nbytes, lambda: self.xp.asarray(array))

    def numpy(self, x: Any) -> Array:
        """A NumPy copy, fetched after everything that was asked of the device."""
        if type(x) is HostScalar:
            return x.value.copy()
        with self.active():
            array = x.get()
        if self._checks is not None:
            self._checks.look()
        return array

    def shared(self, x: Any, owner: object) -> Array:
        """A CuPy array on the memory of ``x`` (CuPy has no read-only arrays)."""
        if type(x) is HostScalar:
            return x.on_device()
        cuda = self.xp.cuda
        steps = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)] if x.size else []
        before = -sum([step for step in steps if step < 0])  # bytes in front of the first element
        size = before + sum([step for step in steps if step > 0]) + x.itemsize if x.size else 0
        with self.active():
            memory = cuda.UnownedMemory(x.data.ptr - before, size, (x, owner), self.index)
            return self.xp.ndarray(x.shape, x.dtype, cuda.MemoryPointer(memory, before), strides=x.strides)

    def save(self, x: Any, into: Any) -> None:
        """Copy to host memory, and wait for it."""
        target = np.ndarray(x.shape, x.dtype, into)
        if type(x) is HostScalar:
            target[...] = x.value
        else:
            with self.active():
                x.get(out=target)

    def load(self, x: Any, data: Any) -> None:
        """Copy from host memory, and wait: the caller may drop the buffer afterwards."""
        with self.active():
            x.set(np.ndarray(x.shape, x.dtype, data))
            self._stream_of().synchronize()

    def placed(self, memory: Any, offset: int, shape: tuple[int, ...], dtype: DType, strides: Any) -> Array:
        """A CuPy array on the bytes of ``memory``."""
        return self.xp.ndarray(shape, dtype, memory.data + offset, strides)

    def send(self, x: Any, host: Array) -> None:
        """Copy on the current stream; the driver reads so few bytes before it returns."""
        stream, busy = self._stream_of(), self._busy
        if len(busy) == 1 and stream.ptr in busy and self._runtime.getDevice() == self.index:
            x.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream)  # as in :meth:`empty`
        else:
            self.call(lambda: x.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream_of()))

    @property
    def checks(self) -> Checks:
        """The record of wrong values that kernels have met."""
        if self._checks is None:
            with self._lock:
                if self._checks is None:
                    pinned = self.xp.cuda.PinnedMemory(RECORD.itemsize)
                    memory = np.ndarray((RECORD.itemsize,), np.uint8, self.xp.cuda.PinnedMemoryPointer(pinned, 0))
                    self._checks = Checks(memory)
        return self._checks

    @property
    def cudnn(self) -> CuDNN | None:
        """cuDNN here, at its first use; None where it is not installed, cannot be used or is not wanted."""
        if self._cudnn is None:
            with self._lock:
                self._cudnn = self._cudnn or (cudnn.made(self.xp, self.index),)
        return self._cudnn[0]

    def wait(self, kernel: str = "") -> None:
        """Wait for all work on this device.  Raises DeviceError if a kernel has failed, named ``kernel`` if known."""
        with self.active():
            try:
                self._stream_of().synchronize()
            except RuntimeError as e:
                self._translate(e, kernel)
                raise

    def is_view(self, x: Any, of: Any) -> bool:
        """Whether ``x`` lies within the memory that ``of`` was cut from."""
        if type(x) is abstract_array.AbstractArray:
            return np.may_share_memory(x, of)
        return x.size > 0 and x.data.mem is of.data.mem

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> Any:
        """The function ``name`` of CUDA C++ ``text``.  Raises KernelError showing the numbered source."""
        try:
            return self._compiled(text, name, options)
        except MemoryError as e:
            return retried(e, self, f"the code of {name}", 0, lambda: self._compiled(text, name, options))

    def _compiled(self, text: str, name: str, options: tuple[str, ...]) -> Any:
        with self.active():
            try:
                return self.xp.RawModule(code=text, options=options).get_function(name)
            except Exception as e:
                if outside(e) is not None:
                    raise
                lines = "\n".join(f"{i:4} {line}" for i, line in enumerate(text.splitlines(), 1))
                raise KernelError(f"{name} does not compile for {self}: {e}\n{lines}") from e

    def launch(
        self, function: Any, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """Run a compiled function on the current stream; with ``TAPEGRAD_CHECK_AT_ONCE=1`` wait for it.

        Errors of the driver are CuPy's.  Raises DeviceError if a kernel, this one or an earlier one, has failed.
        """
        if 0 in grid:
            return  # CuPy would launch one block
        busy = self._busy
        try:
            if shared > _PLAIN_SHARED and function.max_dynamic_shared_size_bytes < shared:
                function.max_dynamic_shared_size_bytes = shared
            if len(busy) == 1 and self._runtime.getDevice() == self.index and self._stream_of().ptr in busy:
                function(grid, block, args, shared_mem=shared)  # nothing to wait for, and the stream is marked
            else:
                self.call(function, grid, block, args, shared_mem=shared)
        except (MemoryError, RuntimeError) as e:
            lack = e if isinstance(e, MemoryError) else outside(e)
            if lack is None:
                self._translate(e)
                raise
            again = lambda: self.call(function, grid, block, args, shared_mem=shared)
            retried(lack, self, "a kernel's memory", 0, again)
        if self.at_once:
            self.wait(function.name)
            if self._checks is not None:
                self._checks.look()


_found: list[Probe] = []
_devices: dict[int, CudaDevice] = {}
_lock = locks.lock()


def probe() -> Probe:
    """Look for a usable CUDA device, once: import CuPy, ask the driver, compile a kernel and launch it."""
    with _lock:
        if not _found:
            _found.append(look())
        return _found[0]


_FORKED = "this process was forked from one that had used CUDA, where CUDA works no more"
_SPAWN = (
    "start processes with multiprocessing.get_context('spawn') (or 'forkserver', before CUDA is used), or work on the "
    "CPU here: tg.set_default_device('cpu')"
)


class _Forked:
    """Takes the place of the CUDA runtime in a forked child."""

    def __getattr__(self, name: str) -> Any:
        raise DeviceError(f"no CUDA device can be used: {_FORKED}; {_SPAWN}")


def _forked() -> None:
    """In a forked child: using one of the parent's devices raises an error that says why it cannot work."""
    if _found and _found[0].count:
        _found[0] = Probe(_found[0].cupy, 0, _FORKED, _SPAWN)
        while _devices:  # a budget for work on the CPU asks nothing of them
            device = _devices.popitem()[1]
            device._runtime, device._checks = _Forked(), None


locks.in_child(_forked)


def forget() -> None:
    """Probe again at the next use (for tests, and after an installation)."""
    with _lock:
        _found.clear()
        _devices.clear()


def available() -> bool:
    """Whether a kernel can be launched."""
    return probe().count > 0


def known() -> list[CudaDevice]:
    """The devices that have been asked for."""
    with _lock:
        return list(_devices.values())


def get(index: int) -> CudaDevice:
    """The device number ``index``.  Raises DeviceError saying why there is none."""
    libraries = probe()
    if not libraries.count:
        raise DeviceError(f"device 'cuda:{index}' is not available: {libraries.why}; to mend it: {libraries.fix}")
    if not 0 <= index < libraries.count:
        raise DeviceError(
            f"device 'cuda:{index}' is not available; there are {libraries.count} CUDA devices, from cuda:0"
        )
    with _lock:
        device = _devices.get(index)
        if device is None:
            device = _devices[index] = CudaDevice(index, libraries.cupy)
        return device


def _again(index: int) -> CudaDevice:
    return get(index)
