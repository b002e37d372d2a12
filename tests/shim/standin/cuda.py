"""Devices, streams and events: everything runs at once on the host, and is written down."""

from __future__ import annotations

import itertools
from typing import Any

from . import blas, capturing, memory, pool, state

_numbers = itertools.count(1)


class Device:
    """One of the pretended devices."""

    def __init__(self, device: int | Device | None = None):
        self.id = state.thread.device if device is None else int(device)
        self._entered: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> None:
        state.require_device(self.id)
        state.thread.device = self.id

    def __enter__(self):
        before = state.thread.device
        self.use()
        self._entered.append(before)
        return self

    def __exit__(self, *error):
        state.thread.device = self._entered.pop()

    def synchronize(self) -> None:
        state.require_device(self.id)
        capturing.refuse_everywhere("synchronizing the device")
        _done.update(_pending)
        state.spinning.clear()
        state.log("device synchronize")

    @property
    def compute_capability(self) -> str:
        state.require_device(self.id)
        return "90"

    @property
    def mem_info(self) -> tuple[int, int]:
        state.require_device(self.id)
        held = pool.default._pools.get(self.id)
        taken = (held.total() if held else 0) + state.workspaces.get(self.id, 0) + memory.outside(self.id)
        return state.config.memory - taken, state.config.memory

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id + 1:02X}:00.0"

    @property
    def attributes(self) -> dict[str, int]:
        state.require_device(self.id)
        return {
            "MultiProcessorCount": 132, "WarpSize": 32, "MaxThreadsPerBlock": 1024, "MaxBlockDimX": 1024,
            "MaxGridDimX": 2**31 - 1, "MaxGridDimY": 65535, "MaxGridDimZ": 65535, "MaxSharedMemoryPerBlock": 49152,
            "MaxSharedMemoryPerBlockOptin": 232448, "MaxThreadsPerMultiProcessor": 2048, "L2CacheSize": 52428800,
            "MaxRegistersPerBlock": 65536, "ComputeCapabilityMajor": 9, "ComputeCapabilityMinor": 0,
        }  # fmt: skip

    @property
    def cublas_handle(self) -> int:
        state.require_device(self.id)
        handles = state.thread.handles
        if self.id not in handles:
            with self:
                blas.require_room()
            state.workspaces[self.id] = state.workspaces.get(self.id, 0) + state.config.workspace
            handles[self.id] = blas.create()
        return handles[self.id]


#: The recorded points that nothing has waited for yet, with their streams.
_pending: dict[int, int] = {}
_done: set[int] = set()


def wait(stream: int) -> None:
    """Wait, as the host, for everything on a stream: a kernel that spins ends."""
    _done.update(mark for mark, s in _pending.copy().items() if s == stream)
    if stream in state.spinning:
        state.spinning.clear()


def says_done(mark: int) -> bool:
    """Whether work is to look done that nothing has waited for."""
    says = state.config.stream_done
    return says(mark) if callable(says) else says


class Event:
    """A point on a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False):
        state.require_device()
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr, self._mark, self._timing = 0xE000_0000 + next(_numbers), 0, not disable_timing
        self._capture: capturing.Capture | None = None
        self._stuck = False
        self._spinning: set[int] = set()

    def record(self, stream: Any = None) -> None:
        stream = stream or get_current_stream()
        self._capture = capturing.of(stream.ptr)
        if self._capture is not None:
            return
        self._mark, self._stuck = next(_numbers), stream.ptr in state.stuck
        self._spinning = state.spinning if stream.ptr in state.spinning else set()
        _pending[self._mark] = stream.ptr
        state.log("record", stream.ptr, event=self.ptr)

    @property
    def done(self) -> bool:
        self._require_outside("asking for an event")
        if self._stuck or self._spinning:
            return False
        if not self._mark or self._mark in _done:
            return True
        if says_done(self._mark):
            _done.add(self._mark)
            state.log("event done", event=self.ptr)
        return self._mark in _done

    def _require_outside(self, what: str) -> None:
        if self._capture is not None:
            capturing.refuse(self._capture.stream.ptr, what)

    def synchronize(self) -> None:
        self._require_outside("synchronizing an event")
        if self._stuck:
            raise AssertionError("a hang: the host waits for an event that will not be done")
        if self._mark:
            _done.add(self._mark)
        self._spinning.clear()
        state.log("event synchronize", event=self.ptr)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events, both recorded, both with timing."""
    if not (start_event._mark and end_event._mark and start_event._timing and end_event._timing):
        raise state.CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle")
    return float(end_event._mark - start_event._mark)


class _Stream:
    """What a stream can do, whoever made it."""

    ptr: int
    device_id: int

    def __int__(self) -> int:
        return self.ptr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __enter__(self):
        state.require_device()
        if self.device_id not in (-1, state.thread.device):
            raise RuntimeError(f"This stream is only usable on device {self.device_id}")
        state.thread.streams.setdefault(state.thread.device, []).append(self)
        state.thread.entered.append(state.thread.device)
        return self

    def __exit__(self, *error):
        state.thread.streams[state.thread.entered.pop()].pop()

    def use(self):
        state.thread.streams[state.thread.device] = [self]
        return self

    @property
    def done(self) -> bool:
        capturing.refuse(self.ptr, "asking for a stream")
        done = self.ptr not in state.spinning and says_done(0)
        if done:
            state.log("stream done", self.ptr)
        return done

    def synchronize(self) -> None:
        capturing.refuse(self.ptr, "synchronizing a stream")
        if self.ptr in state.stuck:
            raise AssertionError("a hang: the host waits for a stream that will not be done")
        wait(self.ptr)
        state.log("stream synchronize", self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        capture, of = capturing.of(self.ptr), event._capture
        if capture is not of:
            text = "cudaErrorStreamCaptureIsolation: a dependency between a capturing stream and what is outside"
            raise capturing.invalid(capture or of, 905, text)  # type: ignore[arg-type]
        if capture is not None:
            return
        if event._stuck:
            state.stuck.add(self.ptr)
        if event._spinning:
            event._spinning.add(self.ptr)
        state.log("wait", self.ptr, event=event.ptr)

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        if not capturing.written(_launch_host_func, callback, arg, stream=self.ptr):
            _launch_host_func(callback, arg, self.ptr)

    def add_callback(self, callback: Any, arg: Any) -> None:
        state.log("host function", self.ptr)
        callback(self, 0, arg)

    def is_capturing(self) -> bool:
        state.require_sound()
        capture = capturing.of(self.ptr)
        if capture is not None and capture.broken:
            raise state.CUDARuntimeError(901, "cudaErrorStreamCaptureInvalidated: " + capture.broken)
        return capture is not None

    def begin_capture(self, mode: int | None = None) -> None:
        capturing.begin(self, mode)

    def end_capture(self) -> capturing.Graph:
        return capturing.end(self)


class Stream(_Stream):
    """A stream made here."""

    null: Stream
    ptds: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None):
        state.require_device()
        self.is_non_blocking, self.priority = non_blocking, priority or 0
        self.ptr = 0 if null else 2 if ptds else 0x5000_0000 + next(_numbers)
        self.device_id = -1 if null or ptds else state.thread.device
        if non_blocking:
            state.non_blocking.add(self.ptr)
        if self.device_id >= 0:
            state.homes[self.ptr] = self.device_id

    @classmethod
    def from_external(cls, obj: Any) -> ExternalStream:
        version, pointer = obj.__cuda_stream__()
        return ExternalStream(pointer)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


class ExternalStream(_Stream):
    """A stream that another library made, known by its pointer."""

    def __init__(self, ptr: int, device_id: int = -1):
        # The runtime's names for the legacy default stream: 0, and 1 where 0 is taken.
        self.ptr, self.device_id = 0 if ptr == 1 else ptr, device_id


def _default_stream(pointer: int) -> Stream:
    stream = object.__new__(Stream)
    stream.ptr, stream.device_id, stream.is_non_blocking, stream.priority = pointer, -1, False, 0
    return stream


Stream.null, Stream.ptds = _default_stream(0), _default_stream(2)


def _launch_host_func(callback: Any, arg: Any, stream: int | None = None) -> None:
    state.log("host function", stream)
    callback(arg)


def get_current_stream(device_id: int = -1) -> Any:
    """This thread's current stream on its current device."""
    if not isinstance(device_id, int):
        raise TypeError("an integer is required")
    stack = state.thread.streams.get(state.thread.device if device_id < 0 else device_id)
    return stack[-1] if stack else Stream.null


def event_record(event: int, stream: int) -> None:
    """Record an event, given by its pointer, on a stream, given by its pointer (1: the legacy default one)."""
    state.log("record", 0 if stream == 1 else stream, event=event)


def memcpy(dst: int, src: int, size: int, kind: int, stream: int = 0) -> None:
    """Copy bytes between addresses, of the kind given."""
    memory.raw(dst, size)[...] = memory.raw(src, size)
    reads, writes = ((src, size),), ((dst, size),)
    name = {1: "h2d", 2: "d2h", 3: "d2d"}.get(kind, "copy")
    state.log(name, stream, reads=reads if kind != 1 else (), writes=writes if kind != 2 else ())
