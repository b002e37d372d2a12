"""``RawModule`` and ``RawKernel``: CUDA C++ compiled and run by the host shim."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import numpy as np

from . import capturing, memory, state
from .array import ndarray, span


class CompileException(Exception):
    """NVRTC refused the source; the message is its log."""

    def __init__(self, msg: str, source: str, name: str, options: tuple, backend: str = "nvrtc"):
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend
        super().__init__()

    def __str__(self) -> str:
        return self._msg

    __repr__ = get_message = __str__


class CUDADriverError(RuntimeError):
    """An error of the CUDA driver; ``status`` is its number."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def host_shim() -> Any:
    """The module that compiles CUDA C++ for the host, told of all device memory."""
    module = importlib.import_module("..host", __package__)
    memory.set_shim(module)
    return module


class RawModule:
    """CUDA C++ text, compiled once a device, when a kernel of it is first asked for."""

    def __init__(self, code: str | None = None, *, path: str | None = None, options: tuple = (),
                 backend: str = "nvrtc", translate_cucomplex: bool = False, enable_cooperative_groups: bool = False,
                 name_expressions: Any = None, jitify: Any = None):  # fmt: skip
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if type(options) is not tuple:
            raise TypeError(f"Expected tuple, got {type(options).__name__}")
        if code is None or backend != "nvrtc":
            raise NotImplementedError("the stand-in compiles text given as code, as NVRTC does")
        self.code, self.options, self.backend, self.file_path = code, options, backend, path
        self.name_expressions, self.enable_cooperative_groups = name_expressions, enable_cooperative_groups
        self._compiled: dict[int, Any] = {}

    def compile(self, log_stream: Any = None) -> None:
        """Compile for the current device."""
        self._module(state.thread.device)

    def _module(self, device: int) -> Any:
        if device not in self._compiled:
            state.require_compiler()
            capturing.refuse_everywhere("loading a module")
            shim = host_shim()
            state.compiles.append((self.code, self.options, device))
            try:
                module = shim.HostModule(self.code, self.options, check=state.config.check)
            except shim.CompileError as error:
                raise CompileException(str(error), self.code, "host", self.options) from error
            self._compiled[device] = module
        return self._compiled[device]

    def get_function(self, name: str) -> RawKernel:
        """The kernel of this name, as a new object at each call."""
        kernel = RawKernel(self.code, name, self.options)
        kernel._owner = self
        kernel._function(state.thread.device)
        return kernel


#: Arguments of a launch.
TAKEN = (ndarray, memory.MemoryPointer, np.ndarray, np.generic, bool, int, float, complex)


@functools.cache
def _constants(code: str, name: str, count: int) -> frozenset[int]:
    """The places of a kernel's parameters that point to constants; none where the text does not show it."""
    found = re.search(rf"\b{name}\s*\(([^()]*)\)\s*\{{", code)
    params = found[1].split(",") if found else []
    if len(params) != count:
        return frozenset()
    return frozenset(i for i, one in enumerate(params) if re.match(r"\s*const\b[^*]*\*", one))


class RawKernel:
    """One kernel, launched on the current stream of the current device."""

    def __init__(self, code: str, name: str, options: tuple = (), backend: str = "nvrtc",
                 translate_cucomplex: bool = False, *, enable_cooperative_groups: bool = False,
                 jitify: Any = None):  # fmt: skip
        self.code, self.name, self.options, self.backend = code, name, options, backend
        self._owner = RawModule(code, options=options, backend=backend)
        self.max_dynamic_shared_size_bytes = 49152

    def compile(self, log_stream: Any = None) -> None:
        """Compile for the current device."""
        self._function(state.thread.device)

    def _function(self, device: int) -> Any:
        module = self._owner._module(device)
        try:
            return module.get_function(self.name)
        except Exception as error:
            if isinstance(error, host_shim().CompileError | ValueError | KeyError | AttributeError):
                raise CUDADriverError(500, "CUDA_ERROR_NOT_FOUND: named symbol not found") from error
            raise

    def __call__(self, grid: tuple, block: tuple, args: tuple, *, shared_mem: int = 0, stream: Any = None) -> None:
        if type(grid) is not tuple or type(block) is not tuple or type(args) is not tuple:
            raise TypeError("grid, block and args must be tuples")
        function = self._function(state.thread.device)
        pointer = None if stream is None else stream.ptr
        if capturing.written(self, grid, block, args, shared_mem=shared_mem, stream=pointer):
            return
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise CUDADriverError(1, "CUDA_ERROR_INVALID_VALUE: invalid argument")
        given, arrays, constant = [], [], _constants(self.code, self.name, len(args))
        for place, arg in enumerate(args):
            if isinstance(arg, np.ndarray) and arg.size == 1 and not arg.dtype.names:
                arg = arg.reshape(())[()]  # taken by value
            if not isinstance(arg, TAKEN) or (isinstance(arg, np.ndarray) and arg.size != 1):
                raise TypeError(f"Unsupported type {type(arg)}")
            if isinstance(arg, ndarray):
                if getattr(arg.data.mem, "_segment", True) is None:
                    raise state.CUDARuntimeError(700, "cudaErrorIllegalAddress: the array's memory was freed")
                arrays.append((span(arg), place in constant))
            given.append(np.uint64(arg.ptr) if isinstance(arg, memory.MemoryPointer) else arg)
        number = state.stream_pointer() if stream is None else stream.ptr
        touched = tuple(one for one, _ in arrays)
        written = tuple(one for one, read_only in arrays if not read_only)
        state.launches.append(state.Launch(self.name, grid, block, number, self.code))
        if "clock64" in self.code:
            state.spin(number)
        state.log("launch", number, name=self.name, reads=touched, writes=written)
        function(grid, block, tuple(given), shared_mem=shared_mem)
        if state.config.fault_after is not None and state.fault.left is None:
            state.fault.left = state.config.fault_after
