"""A stand-in for the part of CuPy that a CuPy-backed library calls, so that its control flow runs without a GPU.

``install()`` makes it ``cupy``; kernels run through the host shim, and what was launched, compiled and put on
streams is written down in ``launches``, ``compiles`` and ``events``.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import numpy as np

from . import (
    blas,
    capturing,
    creation,
    cuda,
    kernels,
    libcublas,
    libcudnn,
    linalg,
    memory,
    namespace,
    nccl,
    pinned,
    pool,
    scipy,
    scipy_signal,
    sparse,
    state,
)
from .state import configure, events, launches, reset

__all__ = ["compiles", "configure", "events", "install", "launches", "reset", "uninstall"]

_saved: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name == "compiles":
        return len(state.compiles)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def _constant(value: Any) -> Any:
    def answer(*args: Any) -> Any:
        return value

    return answer


def _device_count() -> int:
    state.require_device()
    return state.config.devices


def _runtime() -> types.ModuleType:
    return _module(
        "cupy_backends.cuda.api.runtime",
        CUDARuntimeError=state.CUDARuntimeError,
        getDeviceCount=_device_count,
        getDevice=lambda: state.require_device() or state.thread.device,
        setDevice=lambda number: cuda.Device(number).use(),
        deviceSynchronize=lambda: cuda.Device().synchronize(),
        driverGetVersion=lambda: 12080 if state.config.devices else 0,
        runtimeGetVersion=_constant(12090),
        memGetInfo=lambda: cuda.Device().mem_info,
        deviceCanAccessPeer=lambda one, other: int(one != other),
        getDeviceProperties=lambda number: state.require_device(number) or {
            "name": b"Stand-in", "major": 9, "minor": 0, "multiProcessorCount": 132, "warpSize": 32,
            "totalGlobalMem": state.config.memory, "sharedMemPerBlock": 49152, "sharedMemPerBlockOptin": 232448,
            "maxThreadsPerBlock": 1024, "maxThreadsPerMultiProcessor": 2048, "l2CacheSize": 52428800,
        },
        eventRecord=cuda.event_record,
        memcpy=cuda.memcpy,
        memcpyAsync=cuda.memcpy,
        memset=lambda ptr, value, size: memory.raw(ptr, size).fill(value),
        memcpyHostToHost=0, memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDeviceToDevice=3, memcpyDefault=4,
        streamLegacy=1, streamPerThread=2, streamNonBlocking=1, streamDefault=0,
        eventDefault=0, eventBlockingSync=1, eventDisableTiming=2, is_hip=False,
        CUDA_R_32F=0, CUDA_R_64F=1, CUDA_R_16F=2, CUDA_C_32F=4, CUDA_C_64F=5, CUDA_R_16BF=14,
    )  # fmt: skip


def _nvrtc_version() -> tuple[int, int]:
    if not state.config.nvrtc:
        raise RuntimeError(state.MISSING_NVRTC)
    return 12, 9


def is_available() -> bool:
    """Whether there is a device; never raises."""
    return state.config.devices > 0


def _build() -> dict[str, Any]:
    namespace.build()
    creation.build()
    blas_module = blas.build()
    runtime = _runtime()
    driver = _module("cupy_backends.cuda.api.driver", CUDADriverError=kernels.CUDADriverError,
                     get_build_version=_constant(12090))  # fmt: skip
    memory_module = _module(
        "cupy.cuda.memory", OutOfMemoryError=memory.OutOfMemoryError, MemoryPool=pool.MemoryPool,
        MemoryPointer=memory.MemoryPointer, Memory=memory.Memory, BaseMemory=memory.BaseMemory,
        UnownedMemory=memory.UnownedMemory, PooledMemory=memory.PooledMemory, alloc=pool.alloc,
        set_allocator=pool.set_allocator, get_allocator=pool.get_allocator,
    )  # fmt: skip
    compiler = _module("cupy.cuda.compiler", CompileException=kernels.CompileException)
    nvrtc = _module("cupy_backends.cuda.libs.nvrtc", getVersion=_nvrtc_version)
    stream = _module("cupy.cuda.stream", Stream=cuda.Stream, ExternalStream=cuda.ExternalStream, Event=cuda.Event,
                     get_current_stream=cuda.get_current_stream, get_elapsed_time=cuda.get_elapsed_time)  # fmt: skip
    device = _module("cupy.cuda.device", Device=cuda.Device, get_device_id=lambda: state.thread.device,
                     get_cublas_handle=lambda: cuda.Device().cublas_handle)  # fmt: skip
    pinned_memory = _module("cupy.cuda.pinned_memory", PinnedMemory=pinned.PinnedMemory,
                     PinnedMemoryPointer=pinned.PinnedMemoryPointer,
                     alloc_pinned_memory=pinned.alloc_pinned_memory)  # fmt: skip
    nccl_module = _module("cupy.cuda.nccl", available=True, **{
        name: value for name, value in vars(nccl).items() if not name.startswith("_") and name != "annotations"
        and getattr(value, "__module__", nccl.__name__) == nccl.__name__ and not isinstance(value, types.ModuleType)
    })  # fmt: skip
    graph = _module("cupy.cuda.graph", Graph=capturing.Graph)
    hook = _module("cupy.cuda.memory_hook", MemoryHook=pool.MemoryHook)
    top = _module(
        "cupy.cuda", runtime=runtime, driver=driver, memory=memory_module, compiler=compiler, nvrtc=nvrtc,
        stream=stream, device=device, pinned_memory=pinned_memory, memory_hook=hook, cublas=blas_module,
        graph=graph, Graph=capturing.Graph,
        using_allocator=pool.using_allocator,
        is_available=is_available, get_local_runtime_version=_constant(12090), MemoryHook=pool.MemoryHook,
    )  # fmt: skip
    for part in (stream, device, pinned_memory, memory_module):
        for name, value in vars(part).items():
            if not name.startswith("_") and name not in ("OutOfMemoryError", "PooledMemory"):
                setattr(top, name, value)
    cupy = namespace.module
    vars(cupy).update(cuda=top, is_available=is_available, RawModule=kernels.RawModule, RawKernel=kernels.RawKernel,
                      get_default_memory_pool=lambda: pool.default, __version__="14.2.0",
                      __path__=[])  # fmt: skip
    top.__path__ = []  # type: ignore[attr-defined]
    cupyx = _module(
        "cupyx", empty_pinned=pinned.empty_pinned, __path__=[],
        zeros_pinned=lambda shape, dtype=float, order="C": _zeroed(pinned.empty_pinned(shape, dtype, order)),
        scatter_add=lambda a, slices, value: a.scatter_add(slices, value),
        scatter_max=lambda a, slices, value: a.scatter_max(slices, value),
        scatter_min=lambda a, slices, value: a.scatter_min(slices, value),
    )  # fmt: skip
    modules = {"cupy": cupy, "cupyx": cupyx, "cupy.cuda": top, "cupy.cuda.runtime": runtime}
    sparse.build(_module, modules)
    scipy_signal.build(_module, modules)
    scipy.build(_module, modules)
    linalg.build(_module, modules)
    backends = _module("cupy_backends", __path__=[], cuda=_module("cupy_backends.cuda", __path__=[]))
    backends.cuda.libs = _module("cupy_backends.cuda.libs", __path__=[], cublas=blas_module, nvrtc=nvrtc)
    backends.cuda.api = _module("cupy_backends.cuda.api", __path__=[], runtime=runtime, driver=driver)
    for one in (backends, backends.cuda, backends.cuda.libs, backends.cuda.api, runtime, driver, memory_module,
                compiler, nvrtc, stream, device, pinned_memory, hook, graph, blas_module, nccl_module):  # fmt: skip
        modules[one.__name__] = one
    for name, one in modules.items():
        one.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=hasattr(one, "__path__"))
    return modules


def _zeroed(array: np.ndarray) -> np.ndarray:
    array.fill(0)
    return array


def install() -> types.ModuleType:
    """Make the stand-in what ``import cupy`` gives, with sound devices and empty logs; returns it."""
    if not _saved:
        ours = ("cupy", "cupyx", "cupy_backends")
        _saved.update({name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ours})
        _saved.setdefault("", None)
        sys.modules.update(_modules)
    reset()
    _modules["cupy.cuda.nccl"].available = state.config.nccl
    pool.default._pools.clear()
    pool.set_allocator(pool.default.malloc)
    libcublas.offer()
    libcudnn.forbid()
    return namespace.module


def uninstall() -> None:
    """Take the stand-in away, its devices sound again; what was there before is there again."""
    if _saved:
        state.configure()
        for name in _modules:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in _saved.items() if name})
        _saved.clear()
        libcublas.withdraw()
        libcudnn.withdraw()


_modules = _build()
