"""Each launch on the stand-in twice: by the host's compiler, and by NVRTC's PTX on a copy of memory; then a comparison.

Where the PTX has no approximate or fused instruction, every bit is the same (but for what a NaN's bits are).  Else
CUDA's mathematical functions were at work, of whose errors ``bounds.py`` tells.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from shim import host, nvrtc

from .memory import Global
from .parse import PTXError
from .run import Program, launch

MOST_BYTES, MOST_THREADS = 1 << 27, 1 << 18
"""Launches beyond these are left to the host alone."""
_LOOSE = re.compile(r"\b(fma\.|mma\.|call\b|\w+\.approx|\w+\.full)")


class Disagreement(AssertionError):
    """PTX and host gave different bytes."""


class PTXFault(host.KernelFault):
    """The machine code did something forbidden, or is not understood."""


@cache
def program(text: str, options: tuple[str, ...], arch: int) -> Program:
    """What NVRTC makes of a text, ready to run."""
    return Program(nvrtc.ptx(text, options, arch))


@dataclass
class Record:
    """What has run: kernels by name, dtype and architecture; launches that were too large."""

    runs: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    programs: dict[Program, str] = field(default_factory=dict)  # with the CUDA C++ they were made of
    left_out: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The kernels that have run."""
        return {name for name, _, _ in self.runs}


@dataclass(frozen=True)
class Bound:
    """How far apart results may be where CUDA's functions were at work: units in the last place of each number.

    Of a number below ``floor`` the units are those of the floor; None: the largest of the array is the floor.
    """

    ulps: float
    floor: float | None = 0.0


@dataclass
class Watch:
    """How launches are compared: on which architectures, and by which bounds, that of a kernel by its name."""

    arches: tuple[int, ...] = (80,)
    bound: Callable[[str], Bound] = lambda name: Bound(8, None)
    record: Record = field(default_factory=Record)
    mutate: Callable[[str], str] | None = None


_watches: list[Watch] = []


class Twin:
    """A kernel that runs twice at each launch while somebody watches."""

    def __init__(self, function: Any, text: str, options: tuple[str, ...]) -> None:
        self._function, self._text, self._options = function, text, options

    @property
    def _watch(self) -> Watch:
        return _watches[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0,
                 **more: Any) -> None:  # fmt: skip
        if not _watches:
            return self._function(grid, block, args, shared_mem=shared_mem, **more)
        name, watch = self._function.name, self._watch
        pieces = _pieces(args)
        threads = int(np.prod([int(n) for n in (*grid, *block)]))
        if sum(size for _, size in pieces) > MOST_BYTES or threads > MOST_THREADS:
            watch.record.left_out[name] += 1
            return self._function(grid, block, args, shared_mem=shared_mem, **more)
        try:
            results = [self._by_ptx(arch, pieces, grid, block, args, shared_mem) for arch in watch.arches]
        except PTXError as error:
            raise PTXFault(str(error)) from error
        self._function(grid, block, args, shared_mem=shared_mem, **more)
        for arch, (memory, exact) in zip(watch.arches, results):
            watch.record.runs[name, _kind(self._options), arch] += 1
            self._compare(arch, memory, exact, pieces, args)

    def _by_ptx(self, arch: int, pieces: list[tuple[int, int]], grid: Any, block: Any, args: Any, shared: int) -> Any:
        name, watch = self._function.name, self._watch
        if watch.mutate is None:
            made = program(self._text, self._options, arch)
        else:
            made = Program(watch.mutate(nvrtc.ptx(self._text, self._options, arch)))
        watch.record.programs[made] = self._text
        constants = [(address, variable.size) for address, variable in made.constants()]
        memory = Global([*pieces, *constants])
        for start, size in pieces:
            memory.part(start, size)[:] = _bytes(start, size)
        code = made.code(name)
        launch(made, name, [int(n) for n in grid], [int(n) for n in block], _pack(code.function, args), memory, shared)
        exact = not any(_LOOSE.search(ins.text) for ins in code.function.code)
        return memory, exact

    def _compare(self, arch: int, memory: Global, exact: bool, pieces: list[tuple[int, int]], args: Any) -> None:
        for start, size in pieces:
            got, wanted = memory.part(start, size), _bytes(start, size)
            left = got != wanted
            if not left.any():
                continue
            for low, high, dtype in [*_arrays(args, start, size), (0, size, _default(self._options))]:
                high -= (high - low) % dtype.itemsize
                if left[low:high].any():
                    parts = (np.ascontiguousarray(x[low:high]).view(dtype) for x in (got, wanted))
                    self._compare_numbers(arch, exact, *parts, left[low:high].copy())
                    left[low:high] = False
            if left.any():
                raise Disagreement(f"{self._label(arch)}: bytes of no array differ")

    def _compare_numbers(self, arch: int, exact: bool, one: np.ndarray, other: np.ndarray, left: np.ndarray) -> None:
        """``left``: the bytes that differ and that no array before has explained."""
        name, bound, worst = self._function.name, self._watch.bound(self._function.name), self._watch.record.worst
        error = distance(one, other, 0.0 if exact else _largest(other) if bound.floor is None else bound.floor)
        error = np.where(left.reshape(len(one), -1).any(axis=1), error, 0)
        at = int(np.argmax(error))
        worst[name] = max(worst.get(name, 0), float(error[at]))
        if error[at] > (0 if exact else bound.ulps):
            far = f"{error[at]:g} units apart, " + ("exact" if exact else f"{bound.ulps:g} allowed")
            raise Disagreement(
                f"{self._label(arch)}: element {at} of {one.dtype}: {one[at]} by PTX, {other[at]} on the host, {far}"
            )

    def _label(self, arch: int) -> str:
        macros = " ".join(one for one in self._options if one.startswith("-D") and "HEADERS" not in one)
        return f"kernel {self._function.name} of compute_{arch} {macros}"


def distance(one: np.ndarray, other: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """How many units in the last place two arrays are apart, element by element; infinite for integers that differ.

    A unit is that of the larger number, at least that of ``floor``, for complex numbers of the larger part.  Numbers
    are flushed as the device does: those below 1.2e-38 are 0, but for float16 and float64.
    """
    if one.dtype.kind not in "fcV":
        return np.where(one == other, 0.0, np.inf)
    limits = ml_dtypes.finfo(one.real.dtype if one.dtype.kind == "c" else one.dtype)
    parts = [x.view(x.real.dtype).reshape(-1, 2) if x.dtype.kind == "c" else x[:, None] for x in (one, other)]
    least = float(limits.smallest_normal)
    with np.errstate(all="ignore"):
        a, b = (x.astype(np.float64) for x in parts)
        if limits.minexp == -126:  # float32, and bfloat16, which is computed in it
            a, b = (np.where(np.abs(x) <= least, 0, x) for x in (a, b))
        size = np.fmax(np.abs(a), np.abs(b))
        size = np.where(np.isfinite(size), size, 0).max(axis=1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(np.maximum(size, max(floor, least)))) - limits.nmant)
        error = np.abs(a - b) / unit
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error)).max(axis=1)


def _largest(x: np.ndarray) -> float:
    """Of the finite numbers."""
    if x.dtype.kind not in "fcV":
        return 0.0
    size = np.abs(x if x.dtype.kind == "c" else x.astype(np.float64))
    return float(size[np.isfinite(size)].max(initial=0))


def _kind(options: tuple[str, ...]) -> str:
    return next((one[4:] for one in options if one.startswith("-DT=")), "")


def _default(options: tuple[str, ...]) -> np.dtype:
    """The dtype of arrays that a kernel reaches through addresses in memory; bytes, where no macro says it."""
    name = _kind(options).removeprefix("tg_") or "uint8"
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _span(arg: Any) -> tuple[int, int] | None:
    if isinstance(arg, np.ndarray) and not (arg.ndim == 0 and arg.dtype.names):
        low, high = np.lib.array_utils.byte_bounds(arg)
        return low, high - low
    if hasattr(arg, "data") and hasattr(arg.data, "ptr") and hasattr(arg, "dtype"):
        from shim.standin.array import span

        return span(arg)
    return None


def _pieces(args: Sequence[Any]) -> list[tuple[int, int]]:
    """All memory that kernels may touch now."""
    own = [found for arg in args if isinstance(arg, np.ndarray) and (found := _span(arg)) is not None]
    return sorted({piece for piece in [*host.registered(), *own] if piece[1]})


def _arrays(args: Sequence[Any], start: int, size: int) -> Iterator[tuple[int, int, np.dtype]]:
    """The arrays among the arguments that lie in a piece: where in it, and of which dtype."""
    for arg in args:
        found = _span(arg)
        if found is not None and found[0] >= start and sum(found) <= start + size:
            yield found[0] - start, sum(found) - start, np.dtype(arg.dtype)


def _bytes(start: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(start, ctypes.POINTER(ctypes.c_uint8)), (size,))


def _pack(function: Any, args: Sequence[Any]) -> bytes:
    out = b""
    if len(args) != len(function.params):
        raise PTXError(f"kernel {function.name}: {len(args)} arguments, it has {len(function.params)}")
    for number, (arg, param) in enumerate(zip(args, function.params), 1):
        raw = host._argument(arg)[0]
        if len(raw) != param.size:
            raise PTXError(f"kernel {function.name}: parameter {number} has {param.size} bytes, given are {len(raw)}")
        out = out.ljust(-(-len(out) // param.align) * param.align, b"\0") + raw
    return out


@contextmanager
def watching(watch: Watch) -> Iterator[Record]:
    """Inside, every launch on the stand-in runs twice and is compared."""
    original = host.HostModule.get_function

    def get_function(module: Any, name: str) -> Any:
        function = original(module, name)
        return Twin(function, module.code, module.options)

    host.HostModule.get_function = get_function  # type: ignore[method-assign]
    _watches.append(watch)
    try:
        yield watch.record
    finally:
        _watches.remove(watch)
        host.HostModule.get_function = original  # type: ignore[method-assign]
