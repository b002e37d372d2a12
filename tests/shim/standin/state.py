"""What the stand-in was told to be (devices, faults) and what it has done since (logs)."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

INSUFFICIENT_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
MISSING_NVRTC = 'Failure finding "libnvrtc.so": No such file: libnvrtc.so*'
MISSING_HEADERS = "Failed to find CUDA headers. Please install the CUDA headers with `pip install cupy-cuda12x[ctk]`."

#: ``stream_done=False`` makes ``Stream.done`` and ``Event.done`` False until something waits for them, a function says
#: it each time it is asked; ``check=True`` has the host shim watch every access that a kernel makes; ``pinned``: bytes
#: of host memory that can be pinned; ``workspace``: what a handle of cuBLAS takes of a device beside the pool, and
#: ``workspace_fails`` the status where there is no room; ``nccl``: whether the library is there, ``nccl_patience``:
#: seconds after which a stream is stuck on which NCCL waits for other ranks. ``fault_after``: the next launch fails,
#: that many calls after it succeed, and all after these raise an error of the status ``fault``.
DEFAULTS: dict[str, Any] = {
    "devices": 2, "nvrtc": True, "headers": True, "allocation_fails_at": None, "memory": 8 << 30, "stream_done": True,
    "check": False, "pinned": 1 << 40, "workspace": 8 << 20, "workspace_fails": 1, "nccl": True,
    "nccl_patience": 10.0, "fault_after": None, "fault": 700,
}  # fmt: skip
config = SimpleNamespace(**DEFAULTS)


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime; ``status`` is its number."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Entry(NamedTuple):
    """One thing put on a stream: reads and writes are tuples of (address, bytes); event is an event's number.

    Kinds: op, launch, h2d, d2h, d2d, copy, memset, malloc, free, record, wait, host function; what the host learns:
    event, stream or device synchronize, event or stream done (somebody asked, and it was); pin and unpin.
    ``own``: memory that it uses for itself, a product's workspace. ``host``: the host's side of h2d, d2h, pin
    and unpin; ``name``: "waits" where the host waited for a copy, "new" of a malloc that took memory from the
    device and not from the pool.
    """

    kind: str
    stream: int
    name: str = ""
    reads: tuple = ()
    writes: tuple = ()
    event: int = 0
    device: int = 0
    host: tuple = ()
    own: tuple = ()


class Launch(NamedTuple):
    """One launch of a raw kernel."""

    name: str
    grid: tuple
    block: tuple
    stream: int
    code: str


events: list[Entry] = []
#: The same for whoever looks for races: a test that empties ``events`` leaves it as it is.
history: list[Entry] = []
launches: list[Launch] = []
compiles: list[tuple] = []
allocations = SimpleNamespace(count=0)
pinned = SimpleNamespace(bytes=0)
#: How many calls still succeed after a launch that failed.
fault = SimpleNamespace(left=None)
#: By the pointers of streams that are capturing, what they were asked (see ``capturing``).
captures: dict[int, Any] = {}
#: Streams that do not wait for the legacy default stream, nor it for them.
non_blocking: set[int] = set()
#: The device of each stream that was made here.
homes: dict[int, int] = {}


class _Thread(threading.local):
    def __init__(self):
        self.device = 0
        self.streams: dict[int, list] = {}
        self.entered: list[int] = []
        self.hooks: dict[str, Any] = {}
        self.handles: dict[int, int] = {}
        self.allocators: list = []
        self.tracing: Any = None
        self.plans: dict[tuple, Any] = {}


#: Streams on which something waits that will not come.
stuck: set[int] = set()
#: Streams behind a kernel that runs until the host waits for one of them; emptied when it ends.
spinning: set[int] = set()
#: Bytes of each device that cuBLAS holds.
workspaces: dict[int, int] = {}
#: The process that CUDA was first used in, since the last reset; how many resets there were.
process = SimpleNamespace(id=os.getpid(), resets=0)


thread = _Thread()


def configure(**options: Any) -> None:
    """Change what the stand-in pretends to be; no arguments, back to two sound devices."""
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"the stand-in has no option {', '.join(sorted(unknown))}; it has {', '.join(DEFAULTS)}")
    vars(config).update(options or DEFAULTS)
    if not options or "allocation_fails_at" in options:
        allocations.count = 0


def spin(stream: int) -> None:
    """Let a kernel run on a stream until the host waits for it."""
    global spinning
    if not spinning:
        spinning = set()  # events behind an earlier kernel keep its set, which is empty
    spinning.add(stream)


def reset() -> None:
    """Empty the logs and set every option back."""
    configure()
    events.clear()
    history.clear()
    workspaces.clear()
    captures.clear()
    stuck.clear()
    fault.left = None
    spinning.clear()
    process.id, process.resets = os.getpid(), process.resets + 1
    launches.clear()
    compiles.clear()
    thread.__init__()  # type: ignore[misc]


def require_device(number: int | None = None) -> None:
    """Raise as the runtime does where there is no device, or no device of that number."""
    if process.id != os.getpid():
        raise CUDARuntimeError(3, "cudaErrorInitializationError: initialization error")
    if not config.devices:
        raise CUDARuntimeError(35, INSUFFICIENT_DRIVER)
    if number is not None and not 0 <= number < config.devices:
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")


def require_sound() -> None:
    """Raise the error of a launch that failed, once the calls that do not notice it are over."""
    if fault.left is not None:
        if not fault.left:
            raise CUDARuntimeError(config.fault, f"cudaError{config.fault}: of an earlier launch")
        fault.left -= 1


def require_compiler() -> None:
    """Raise as CuPy does at its first kernel where NVRTC or the CUDA headers are missing."""
    require_device()
    if not config.nvrtc:
        raise RuntimeError(MISSING_NVRTC)
    if not config.headers:
        raise RuntimeError(MISSING_HEADERS)


def stream_pointer() -> int:
    """The pointer of this thread's current stream on its current device."""
    stack = thread.streams.get(thread.device)
    return stack[-1].ptr if stack else 0


def _require_uncaptured(kind: str, name: str, stream: int) -> None:
    """Raise for what a capture does not bear, or this stand-in cannot write down."""
    from . import capturing

    if kind in ("malloc", "free", "pin", "unpin", "event done"):
        return
    capturing.refuse(stream, f"{kind} {name}".strip())
    for pointer, capture in captures.items():
        if stream == 0 and pointer not in non_blocking:
            text = "cudaErrorStreamCaptureImplicit: operation would have implicitly depended on a capturing stream"
            raise capturing.invalid(capture, 906, text)


def log(kind: str, stream: int | None = None, **fields: Any) -> None:
    """Note one operation, on the current stream unless told otherwise."""
    if kind not in ("free", "unpin"):
        require_sound()
    if kind == "op" and thread.tracing is not None:  # done by the launches of a graph
        thread.tracing.asked = True
        return
    if captures:
        _require_uncaptured(kind, fields.get("name", ""), stream_pointer() if stream is None else stream)
    entry = Entry(kind, stream_pointer() if stream is None else stream, device=thread.device, **fields)
    events.append(entry)
    history.append(entry)
