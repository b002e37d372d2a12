"""Runs CUDA C++ kernels on the CPU, with the launch form of cupy.RawModule."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .build import CompileError, compile_kernels, load_runtime, why_no_compiler
from .source import prepare

__all__ = ["CompileError", "HostFunction", "HostModule", "KernelFault", "register", "unregister", "why_no_compiler"]

SECONDS = 60.0
"""Processor time after which a launch is taken to hang."""


class KernelFault(RuntimeError):
    """A kernel did, or was asked to do, what a device would not have survived or not have noticed."""


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("kinds", ctypes.c_char_p),
    ]


class _Module(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("tls_module", "tls_size", "low", "high")]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("module", ctypes.POINTER(_Module)),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("args", ctypes.c_char_p),
        ("order", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("fault_pc", ctypes.c_uint64),
        ("fault", ctypes.c_char * 1000),
    ]


class HostModule:
    """CUDA C++ text compiled for the CPU; with check, every access to memory is watched."""

    def __init__(self, code: str, options: Sequence[str] = (), *, check: bool = False) -> None:
        self.code = code
        self.options = tuple(options)
        self.check = check
        self._text, self._bounds = prepare(code)
        self._functions: dict[str, HostFunction] = {}
        self._library = self._load("")

    def get_function(self, name: str) -> HostFunction:
        """The kernel of this name; one from a header or a macro is compiled when it is first asked for."""
        if name not in self._functions:
            known = hasattr(self._library, f"tgh_kernel_{name}")
            library = self._library if known else self._load(f"TGH_KERNEL({name})")
            self._functions[name] = HostFunction(library, name, self.check, self._bounds.get(name, ""))
        return self._functions[name]

    def _load(self, extra: str) -> ctypes.CDLL:
        return _load_library(compile_kernels(self._text, self.options, self.check, extra, self.code))


class HostFunction:
    """One kernel, launched as cupy.RawKernel is."""

    def __init__(self, library: ctypes.CDLL, name: str, check: bool, bounds: str) -> None:
        self.name = name
        self._kernel = _Kernel.in_dll(library, f"tgh_kernel_{name}")
        self._path = library._name
        self._check = check
        bound = bounds.split(",")[0].strip()
        self._most_threads = min(1024, int(bound)) if bound.isdecimal() else 1024
        count = self._kernel.count
        self._sizes = self._kernel.sizes[:count]
        self._kinds = self._kernel.kinds.decode()
        self._module = _Module()
        self._runtime = load_runtime()
        self._runtime.tg_describe(ctypes.byref(self._kernel), ctypes.byref(self._module))

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: object = None,
        order: str = "forward",
    ) -> None:
        launch = _Launch(kernel=ctypes.addressof(self._kernel), module=ctypes.pointer(self._module), seconds=SECONDS)
        launch.grid[:] = self._extent("grid", grid)
        launch.block[:] = self._extent("block", block)
        self._check_extents(launch, shared_mem)
        launch.args = self._pack(args)
        launch.shared = shared_mem
        launch.check = self._check
        launch.order, launch.seed = _order(order)
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)] if self._check else []
        for array in arrays:
            register(*_extent_of(array))
        try:
            failed = self._runtime.tg_launch(ctypes.byref(launch))
        finally:
            for array in arrays:
                unregister(_extent_of(array)[0])
        if failed:
            raise KernelFault(launch.fault.decode(errors="replace") + self._place(launch.fault_pc))

    def _extent(self, what: str, given: Sequence[int]) -> list[int]:
        sizes = [int(size) for size in given]
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise KernelFault(f"kernel {self.name}: bad {what} size {tuple(given)}: one to three numbers above zero")
        return sizes + [1] * (3 - len(sizes))

    def _check_extents(self, launch: _Launch, shared_mem: int) -> None:
        grid, block = tuple(launch.grid), tuple(launch.block)
        threads = block[0] * block[1] * block[2]
        if threads > self._most_threads or block[2] > 64:
            raise KernelFault(f"kernel {self.name}: bad block size {block}: at most {self._most_threads} threads")
        if grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise KernelFault(f"kernel {self.name}: bad grid size {grid}: at most (2147483647, 65535, 65535)")
        static = self._module.tls_size
        if shared_mem < 0 or shared_mem + static > 227 * 1024 or static > 48 * 1024:
            sizes = f"{shared_mem} bytes dynamic and {static} static"
            raise KernelFault(
                f"kernel {self.name}: bad shared memory size: {sizes}, at most 227 KiB, 48 of them static"
            )

    def _pack(self, args: Sequence[Any]) -> bytes:
        if len(args) != len(self._sizes):
            raise KernelFault(f"kernel {self.name}: wrong number of arguments: {len(args)}, it has {len(self._sizes)}")
        packed = []
        for number, (arg, size, kind) in enumerate(zip(args, self._sizes, self._kinds), 1):
            raw, given = _argument(arg)
            where = f"of parameter {number}: {type(arg).__name__}"
            if len(raw) != size:
                text = f"kernel {self.name}: wrong argument size {where} has {len(raw)} bytes, the parameter {size}"
                raise KernelFault(text)
            # Of equal size and still another thing: the device would read the bits of the one as the other.
            if (given == "p" and kind != "p") or (given + kind in ("fi", "if", "fp") and size >= 4):
                raise KernelFault(f"kernel {self.name}: wrong argument kind {where} for a parameter of kind {kind!r}")
            packed.append(raw.ljust((size + 15) // 16 * 16, b"\0"))
        return b"".join(packed)

    def _place(self, address: int) -> str:
        if not self._module.low <= address < self._module.high:
            return ""
        # A return address is that of the next instruction.
        command = ["addr2line", "-e", self._path, hex(address - 1 - self._module.low)]
        try:
            place = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""
        known = re.match(r"(?:.*/(?=kernel\.cu:))?(.+:[1-9]\d*)", place)
        return f", at {known[1]}" if known else ""


_registered: list[tuple[int, int]] = []


def registered() -> list[tuple[int, int]]:
    """The bytes that kernels may touch: where each piece begins, and how long it is."""
    return list(_registered)


def register(address: int, nbytes: int) -> None:
    """Tells the checks that kernels may touch these bytes."""
    _registered.append((address, nbytes))
    load_runtime().tg_register(ctypes.c_uint64(address), ctypes.c_uint64(nbytes))


def unregister(address: int) -> None:
    """Tells the checks that the bytes registered at this address are gone."""
    # From the end: what a launch registered goes before what an allocator registered at the same address.
    for i in range(len(_registered) - 1, -1, -1):
        if _registered[i][0] == address:
            del _registered[i]
            break
    load_runtime().tg_unregister(ctypes.c_uint64(address))


_loading = threading.Lock()


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _load_library(path: Path) -> ctypes.CDLL:
    load_runtime()  # first, so that a kernel's need of it is met by what is there
    with _loading:
        return _open(path)


def _order(order: str) -> tuple[int, int]:
    name, _, seed = order.partition(":")
    if name not in ("forward", "reverse", "shuffle") or (name == "shuffle") != bool(seed):
        raise ValueError(f"order is 'forward', 'reverse' or 'shuffle:SEED', not {order!r}")
    return ("forward", "reverse", "shuffle").index(name), int(seed or 0)


def _extent_of(array: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def _argument(arg: Any) -> tuple[bytes, str]:
    """The bytes that a device would be given for an argument, and whether they are a pointer, integer or float."""
    if isinstance(arg, np.ndarray) and not (arg.ndim == 0 and arg.dtype.names):
        return arg.__array_interface__["data"][0].to_bytes(8, "little"), "p"
    if isinstance(arg, np.generic | np.ndarray):
        return arg.tobytes(), {"b": "i", "i": "i", "u": "i", "f": "f"}.get(arg.dtype.kind, "s")
    if isinstance(arg, bool | int):
        return np.int64(arg).tobytes(), "i"
    if isinstance(arg, float):
        return np.float64(arg).tobytes(), "f"
    if isinstance(arg, complex):
        return np.complex128(arg).tobytes(), "s"
    if arg is None:
        return bytes(8), "p"
    if hasattr(arg, "data") and hasattr(arg.data, "ptr"):
        return int(arg.data.ptr).to_bytes(8, "little"), "p"
    if isinstance(arg, ctypes.Structure | ctypes.Union | ctypes.Array):
        return bytes(arg), "s"
    raise TypeError(f"a {type(arg).__name__} cannot be given to a kernel")
