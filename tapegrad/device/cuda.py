"""CUDA devices, through CuPy: imported when a device is first asked for, never by ``import tapegrad``.

A device counts as available only when a kernel of ours has been compiled and launched on it: a driver without NVRTC,
or NVRTC without a driver, is found here and not in the middle of a training step.

What only a look at values can tell, such as an index out of range, is asked of the device when it is next waited for
(:meth:`CudaDevice.later`): a training step does not wait for a GPU.  ``TAPEGRAD_CHECK_AT_ONCE=1`` asks at once.

Streams: everything runs on CuPy's current stream, after what was asked of the device on any other: the new stream first
waits for an event on each.  So a tensor made on one stream may be used on another.  An array of the user's belongs to
the stream that is current when it is handed in (``asarray``).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from tapegrad.device import cpu, cxx
from tapegrad.device.base import Device
from tapegrad.device.host_scalar import HostScalar
from tapegrad.errors import DeviceError, DeviceMemoryError, KernelError

_MOST_CHECKS = 256
_PROBE = 'extern "C" __global__ void tg_probe(int* x) { *x = 42; }'


class CudaDevice(Device):
    """One GPU: CuPy's functions, memory from CuPy's pool."""

    __slots__ = ("_busy", "_checks", "_lock", "_runtime", "_stream_of", "index")

    def __init__(self, index: int, cupy: Any) -> None:
        super().__init__(f"cuda:{index}", "cuda", cupy, 0, lazy=True)
        self.index = index
        self._runtime = cupy.cuda.runtime
        self._stream_of = cupy.cuda.get_current_stream
        self._busy: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._checks: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple:
        return _again, (self.index,)

    def order(self) -> Any:
        """Make the current stream wait for what this device was asked on others; returns it.

        Whoever asks something afterwards marks the stream (:meth:`_asked`): only then is there something to wait for.
        """
        stream, busy = self._stream_of(), self._busy
        if not busy or (len(busy) == 1 and stream.ptr in busy):
            return stream
        with self._lock:
            for pointer, other in list(busy.items()):
                if pointer != stream.ptr:
                    event = self.xp.cuda.Event(disable_timing=True)
                    event.record(other)
                    stream.wait_event(event)
                    busy[stream.ptr] = stream  # before the other goes: who comes next must wait for one of them
                    del busy[pointer]
        return stream

    def _asked(self, stream: Any) -> None:
        if stream.ptr not in self._busy:
            with self._lock:
                self._busy[stream.ptr] = stream

    @contextmanager
    def active(self) -> Any:
        """This device is CuPy's current one inside the block, its stream ordered after earlier work."""
        if self._runtime.getDevice() == self.index:
            yield from self._ordered()
        else:
            with self.xp.cuda.Device(self.index):
                yield from self._ordered()

    def _ordered(self) -> Iterator[None]:
        stream = self.order()
        try:
            yield
        finally:  # what raised may have asked something before it did
            self._asked(stream)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised C-contiguous array from CuPy's pool.  Raises DeviceMemoryError (MemoryError)."""
        try:
            if self._runtime.getDevice() == self.index:
                stream = self.order()
                found = self.xp.empty(shape, dtype)
                self._asked(stream)
                return found
            with self.active():
                return self.xp.empty(shape, dtype)
        except MemoryError as e:  # CuPy has given back its unused blocks and tried again by then
            pool, (free, total) = self.xp.get_default_memory_pool(), self._runtime.memGetInfo()
            raise DeviceMemoryError(
                f"{self}: no room for {dtype.name}{list(shape)}, {prod(shape) * dtype.itemsize} bytes: "
                f"{pool.used_bytes()} bytes are in use, {pool.free_bytes()} idle in the pool, {free} of {total} "
                "free on the device; tg.recompute_grad keeps fewer intermediates"
            ) from e

    def constant(self, value: Any, dtype: Any) -> Any:
        """A number that kernels take as an argument."""
        return HostScalar(np.asarray(value, dtype=dtype), self)

    def array(self, x: Any, dtype: Any = None, copy: bool = True) -> Any:
        """``x`` as a CuPy array here, or a 0-d host value as an argument of kernels.

        Arrays of other libraries in CUDA memory come through ``__cuda_array_interface__`` or DLPack, without a copy
        where asked; both order their streams.  Raises NotATensorError.
        """
        xp = self.xp
        with self.active():
            if isinstance(x, xp.ndarray):
                found = x
            elif cpu.is_on_gpu(x):
                found = xp.asarray(x)
            elif hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] == 2:
                found = xp.from_dlpack(x)
            else:
                return self._upload(x, dtype)
            if found.device.id != self.index:
                found, copy = xp.array(found, order="C"), False
            cxx.known("asarray", found.dtype)
            if any(n % found.itemsize for n in (*found.strides, found.data.ptr)):
                found, copy = xp.array(found, order="C"), False  # a field of packed records; kernels count in elements
            if dtype is not None and found.dtype != dtype:
                found, copy = found.astype(dtype), False
            return xp.array(found, order="C") if copy else found

    def _upload(self, x: Any, dtype: Any) -> Any:
        found = cpu.CPU.array(x, dtype, copy=False)
        cxx.known("asarray", found.dtype)
        if not found.ndim:
            return HostScalar(np.array(found), self)
        return self.xp.asarray(np.ascontiguousarray(found))

    def numpy(self, x: Any) -> Any:
        """A NumPy copy, fetched after everything that was asked of the device."""
        if type(x) is HostScalar:
            return x.value.copy()
        with self.active():
            found = x.get()
        if self._checks:
            self._check()
        return found

    def later(self, check: Callable[[], None]) -> None:
        """Call ``check`` after the next value has been read; with many waiting, at once.

        Each holds a number or two on the device until then.
        """
        self._checks.append(check)
        if len(self._checks) >= _MOST_CHECKS or os.environ.get("TAPEGRAD_CHECK_AT_ONCE") == "1":
            self._check()

    def _check(self) -> None:
        waiting, self._checks = self._checks, []  # a check reads values, too
        while waiting:
            try:
                waiting.pop(0)()
            except BaseException:
                self._checks[:0] = waiting  # the others wait for the next reading
                raise

    def is_view(self, x: Any, of: Any) -> bool:
        """Whether ``x`` lies within the memory that ``of`` was cut from."""
        return x.size > 0 and x.data.mem is of.data.mem

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> Any:
        """The function ``name`` of CUDA C++ ``text``.  Raises KernelError showing the numbered source."""
        with self.active():
            try:
                return self.xp.RawModule(code=text, options=options).get_function(name)
            except Exception as e:
                lines = "\n".join(f"{i:4} {line}" for i, line in enumerate(text.splitlines(), 1))
                raise KernelError(f"{name} does not compile for {self}: {e}\n{lines}") from e

    def launch(self, function: Any, grid: tuple, block: tuple, args: tuple, shared: int = 0) -> None:
        """Run a compiled function on the current stream.  Errors of the driver are CuPy's."""
        if self._runtime.getDevice() == self.index:
            stream = self.order()
            function(grid, block, args, shared_mem=shared)
            self._asked(stream)
        else:
            with self.active():
                function(grid, block, args, shared_mem=shared)


class Probe:
    """Whether CUDA is available, and if not, why and what mends it."""

    def __init__(self, cupy: Any, count: int, why: str = "", fix: str = "") -> None:
        self.cupy = cupy
        self.count = count
        self.why = why
        self.fix = fix


_found: list[Probe] = []
_devices: dict[int, CudaDevice] = {}
_lock = threading.RLock()


def probe() -> Probe:
    """Look for a usable CUDA device, once: import CuPy, ask the driver, compile a kernel and launch it."""
    with _lock:
        if not _found:
            _found.append(_probe())
        return _found[0]


def forget() -> None:
    """Probe again next time (for tests, and after something was installed)."""
    with _lock:
        _found.clear()
        _devices.clear()


def _probe() -> Probe:
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return Probe(None, 0, "CuPy is not installed", "pip install 'tapegrad[cuda12]' (or [cuda13])")
    try:
        cupy = importlib.import_module("cupy")
    except Exception as e:  # ImportError, OSError, a missing library: each means the same here
        return Probe(None, 0, f"CuPy does not import: {e}", "reinstall it: pip install 'tapegrad[cuda12]'")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        version = cupy.cuda.runtime.driverGetVersion()
        fix = "install an NVIDIA driver" if not version else f"update the driver (it offers CUDA {version // 1000})"
        return Probe(cupy, 0, f"no CUDA device: {e}", fix)
    if not count:
        return Probe(cupy, 0, "the driver sees no CUDA device", "check CUDA_VISIBLE_DEVICES and nvidia-smi")
    try:
        x = cupy.zeros(1, dtype="int32")
        cupy.RawModule(code=_PROBE).get_function("tg_probe")((1,), (1,), (x,))
        if int(x[0]) != 42:
            raise KernelError("the kernel ran and did nothing")
    except Exception as e:
        fix = "install the CUDA libraries beside CuPy: pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk])"
        return Probe(cupy, 0, f"a kernel cannot be run: {type(e).__name__}: {e}", fix)
    return Probe(cupy, count)


def is_array(x: object) -> bool:
    """Whether ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")  # nobody has such an array without having imported it
    return cupy is not None and isinstance(x, cupy.ndarray)


def available() -> bool:
    """Whether a kernel can be launched."""
    return probe().count > 0


def get(index: int) -> CudaDevice:
    """The device number ``index``.  Raises DeviceError saying why there is none."""
    found = probe()
    if not found.count:
        raise DeviceError(f"device 'cuda:{index}' is not available: {found.why}; to mend it: {found.fix}")
    if not 0 <= index < found.count:
        raise DeviceError(f"device 'cuda:{index}' is not available; there are {found.count} CUDA devices, from cuda:0")
    with _lock:
        device = _devices.get(index)
        if device is None:
            device = _devices[index] = CudaDevice(index, found.cupy)
        return device


def _again(index: int) -> CudaDevice:
    return get(index)
