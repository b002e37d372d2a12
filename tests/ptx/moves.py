"""Moves, conversions, loads, stores and atomics (PTX ISA, sections 9.7.9 and 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .arithmetic import saturated
from .operands import Lanes, Read, Run, Scope, handles, typed, words
from .parse import Immediate, Instruction, Operand, PTXError, Register, Symbol, Vector

F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64
_CACHE = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "gpu", "cta", "sys", "weak",
          "L1::no_allocate", "L1::evict_first", "L1::evict_last", "L2::128B", "L2::256B", "L2::64B"}  # fmt: skip
_SPACES = {"global", "shared", "local", "param", "const", "shared::cta"}


@handles("mov")
def _mov(scope: Scope, ins: Instruction) -> Run:
    kind = ins.words[-1]
    words(ins, kind)
    to, source = ins.operands
    if isinstance(to, Vector):
        return _unpack(scope, to, source, kind)
    if isinstance(source, Vector):
        return _pack(scope, to, source, kind)
    read, write = scope.read(source, kind), scope.write(to, kind)
    return lambda f, lanes: write(f, read(f), lanes)


def _unpack(scope: Scope, to: Vector, source: Operand | None, kind: str) -> Run:
    size = typed(kind).itemsize // len(to.items)
    read, part = scope.read(source, kind), np.dtype(f"u{size}")
    writes = [scope.write(one, f"b{8 * size}") for one in to.items]

    def run(f: Any, lanes: Lanes) -> None:
        parts = np.ascontiguousarray(np.broadcast_to(read(f), f.threads)).view(part).reshape(f.threads, -1)
        for i, write in enumerate(writes):
            write(f, np.ascontiguousarray(parts[:, i]), lanes)

    return run


def _pack(scope: Scope, to: Operand | None, source: Vector, kind: str) -> Run:
    size = typed(kind).itemsize // len(source.items)
    reads, whole = [scope.read(one, f"b{8 * size}") for one in source.items], np.dtype(f"u{typed(kind).itemsize}")
    write = scope.write(to, kind)

    def run(f: Any, lanes: Lanes) -> None:
        parts = np.empty((f.threads, len(reads)), f"u{size}")
        for i, read in enumerate(reads):
            parts[:, i] = read(f)
        write(f, parts.view(whole).reshape(-1), lanes)

    return run


# ---- conversions

_ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}
_FLOATS = ("f16", "bf16", "f32", "f64")


@handles("cvt")
def _cvt(scope: Scope, ins: Instruction) -> Run:
    to, kind = ins.words[-2], ins.words[-1]
    given = set(ins.words[1:-2])
    if odd := given - {"ftz", "sat", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"}:
        raise PTXError(f"modifiers that are not known: {sorted(odd)}")
    if to in ("f16x2", "bf16x2"):
        return _cvt_pair(scope, ins, to, kind, given)
    read, write = scope.read(ins.operands[1], kind, "ftz" in given), scope.write(ins.operands[0], to)
    f = _conversion(to, kind, given)
    return lambda frame, lanes: write(frame, f(np.atleast_1d(read(frame))), lanes)


def _cvt_pair(scope: Scope, ins: Instruction, to: str, kind: str, given: set[str]) -> Run:
    if kind != "f32" or given != {"rn"}:
        raise PTXError("a conversion of pairs that is not known")
    high, low = (scope.read(one, kind) for one in ins.operands[1:])
    narrow = floats.to_float16 if to == "f16x2" else floats.to_bfloat16
    write = scope.write(ins.operands[0], to)

    def run(f: Any, lanes: Lanes) -> None:
        a, b = (narrow(np.atleast_1d(one(f))).astype(U32) for one in (high, low))
        write(f, a << U32(16) | b, lanes)

    return run


def _conversion(to: str, kind: str, given: set[str]) -> Callable[[np.ndarray], np.ndarray]:
    mode = next((one for one in given if one[0] == "r"), "rn")
    if to == "tf32":
        if mode != "rna" or kind != "f32":
            raise PTXError("tf32 is rounded by rna only")
        return floats.to_tf32
    if kind in _FLOATS and to in _FLOATS:
        return _between_floats(to, kind, given, mode)
    if kind in _FLOATS:
        return _to_integer(to, kind, mode)
    if to in _FLOATS:
        return _from_integer(to, mode)
    if "sat" in given:
        raise PTXError("saturation among integers is not known")
    return lambda x: x.astype(typed(to))


def _widened(x: np.ndarray, kind: str) -> np.ndarray:
    """The numbers behind the bits of a narrow float; of others themselves."""
    if kind == "f16":
        return x.view(np.float16).astype(F32)
    if kind == "bf16":
        return (x.astype(U32) << U32(16)).view(F32)
    return x


def _between_floats(to: str, kind: str, given: set[str], mode: str) -> Callable[[np.ndarray], np.ndarray]:
    ftz, sat = "ftz" in given, "sat" in given
    if mode in ("rni", "rzi", "rmi", "rpi") and to == kind and to in ("f32", "f64"):
        inner: Callable[[np.ndarray], np.ndarray] = _ROUND[mode[:2]]
    elif to == kind and to in ("f32", "f64"):
        inner = lambda x: x
    elif to == "f64":
        inner = lambda x: _widened(x, kind).astype(F64)
    elif to == "f32" and kind == "f64":
        inner = lambda x: floats.to_float32(x, mode)
    elif to == "f32":
        inner = lambda x: _widened(x, kind)
    elif mode == "rn" and to == "f16" and not sat:
        return lambda x: floats.to_float16(_widened(x, kind))
    elif mode == "rn" and to == "bf16" and kind != "f64" and not sat:
        return lambda x: floats.to_bfloat16(_widened(x, kind))
    else:
        raise PTXError("a conversion between floats that is not known")

    def convert(x: np.ndarray) -> np.ndarray:
        out = inner(x)
        out = saturated(out) if sat else out
        return floats.flushed(out) if ftz and to == "f32" else out

    return convert


def _to_integer(to: str, kind: str, mode: str) -> Callable[[np.ndarray], np.ndarray]:
    """Rounded in the direction asked for, and kept within the type; NaN as the ISA says."""
    if mode not in ("rni", "rzi", "rmi", "rpi"):
        raise PTXError("in which direction is it rounded?")
    limits, dtype = np.iinfo(typed(to)), typed(to)
    odd = kind == "f64" or to in ("s64", "u64")
    nan = (1 << 8 * dtype.itemsize - 1) % (1 << 8 * dtype.itemsize) if odd else 0

    def convert(x: np.ndarray) -> np.ndarray:
        x = _ROUND[mode[:2]](_widened(x, kind).astype(F64))
        low, high = x <= float(limits.min), x >= float(limits.max)
        inside = np.where(low | high | np.isnan(x), 0, x).astype(dtype)
        out = np.where(low, dtype.type(limits.min), np.where(high, dtype.type(limits.max), inside))
        return np.where(np.isnan(x), np.array(nan, f"u{dtype.itemsize}").view(dtype), out)

    return convert


def _from_integer(to: str, mode: str) -> Callable[[np.ndarray], np.ndarray]:
    if mode != "rn":
        raise PTXError("integers become floats to nearest only")
    if to == "f16":
        return lambda x: floats.to_float16(_odd_double(x))
    if to == "bf16":
        raise PTXError("integers do not become bfloat16")
    return lambda x: x.astype(typed(to))


def _odd_double(x: np.ndarray) -> np.ndarray:
    """Integers beyond float16 are infinite there whatever a double rounds away."""
    return x.astype(F64)


@handles("cvta")
def _cvta(scope: Scope, ins: Instruction) -> Run:
    from .memory import WINDOWS

    given = words(ins, "to", "u64", *_SPACES)
    space = next(iter(given & _SPACES)).split("::")[0]
    start = np.uint64(WINDOWS.get(space, 0))
    read, write = scope.read(ins.operands[1], "u64"), scope.write(ins.operands[0], "u64")
    if "to" in given:
        return lambda f, lanes: write(f, read(f) - start, lanes)
    return lambda f, lanes: write(f, read(f) + start, lanes)


# ---- loads and stores


def _form(ins: Instruction) -> tuple[str, int, str]:
    """The space ('' for a generic address), how many elements, and of which type."""
    given = [one for one in ins.words[1:] if one not in _CACHE]
    spaces = [one for one in given if one in _SPACES or one == "param"]
    counts = [one for one in given if one in ("v2", "v4", "v8")]
    if len(given) != len(spaces) + len(counts) + 1 or len(spaces) > 1:
        raise PTXError("a load or store that is not known")
    return (spaces[0].split("::")[0] if spaces else "", int(counts[0][1]) if counts else 1, given[-1])


@handles("ld")
def _load(scope: Scope, ins: Instruction) -> Run:
    space, count, kind = _form(ins)
    place, named = scope.place(ins.operands[1])
    targets = ins.operands[0].items if isinstance(ins.operands[0], Vector) else ins.operands[:1]
    if len(targets) != count:
        raise PTXError(f"{count} elements into {len(targets)} registers")
    writes, size = [scope.write(one, kind) for one in targets], typed(kind).itemsize
    where = _where(named or space)

    def run(f: Any, lanes: Lanes) -> None:
        index = lanes.index
        everybody = len(index) == f.threads
        address = place(f)
        memory, address = where(f, address if everybody else address[index])
        for write, value in zip(writes, memory.load(address, index, size, count)):
            if not everybody:
                value, found = np.zeros(f.threads, value.dtype), value
                value[index] = found
            write(f, value, lanes)

    return run


@handles("st")
def _store(scope: Scope, ins: Instruction) -> Run:
    space, count, kind = _form(ins)
    place, named = scope.place(ins.operands[0])
    sources = ins.operands[1].items if isinstance(ins.operands[1], Vector) else ins.operands[1:2]
    if len(sources) != count:
        raise PTXError(f"{count} elements from {len(sources)} registers")
    size = typed(kind).itemsize
    reads, where = [scope.read(one, f"u{8 * size}") for one in sources], _where(named or space)
    reads = [scope.read(one, kind) if isinstance(one, Immediate) else read for one, read in zip(sources, reads)]

    def run(f: Any, lanes: Lanes) -> None:
        index = lanes.index
        memory, address = where(f, place(f)[index])
        values = [value[index] if (value := read(f)).ndim else np.full(len(index), value) for read in reads]
        memory.save(address, index, [np.ascontiguousarray(v).view(f"u{size}") for v in values], size)

    return run


def _where(space: str) -> Callable[[Any, np.ndarray], tuple[Any, np.ndarray]]:
    """Which memory an address means, and where in it."""
    if space in ("global", "const"):
        return lambda f, address: (f.spaces["global"], address.view(U64))
    if space:
        return lambda f, address: (f.spaces[space], address)
    return _generic


def _generic(f: Any, address: np.ndarray) -> tuple[Any, np.ndarray]:
    window = address >> np.int64(60)
    if not len(window) or (window == 0).all():
        return f.spaces["global"], address.view(U64)
    for number, name in ((1, "shared"), (2, "local"), (3, "param")):
        if (window == number).all():
            return f.spaces[name], address & np.int64((1 << 60) - 1)
    raise PTXError("generic addresses of several spaces in one instruction")


# ---- atomics: one thread after another, in the order of their numbers

_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x, "max": max, "min": min, "exch": lambda old, x: x,
    "and": lambda old, x: old & x, "or": lambda old, x: old | x, "xor": lambda old, x: old ^ x,
    "inc": lambda old, x: 0 if old >= x else old + 1, "dec": lambda old, x: x if old == 0 or old > x else old - 1,
    "cas": lambda old, x, y: y if old == x else old,
}  # fmt: skip


@handles("atom", "red")
def _atomic(scope: Scope, ins: Instruction) -> Run:
    given = [one for one in ins.words[1:] if one not in _CACHE and one not in ("acq_rel", "acquire", "release")]
    spaces = [one for one in given if one in _SPACES]
    operation, kind = given[-2], given[-1]
    if operation not in _ATOMIC or len(given) != len(spaces) + 2:
        raise PTXError("an atomic that is not known")
    gives = ins.words[0] == "atom"
    place, _ = scope.place(ins.operands[int(gives)])
    sources = [scope.read(one, kind) for one in ins.operands[1 + gives :]]
    write = scope.write(ins.operands[0], kind) if gives else None
    f_of, dtype, where = _ATOMIC[operation], typed(kind), _where(spaces[0].split("::")[0] if spaces else "")

    def run(f: Any, lanes: Lanes) -> None:
        index = lanes.index
        memory, address = where(f, place(f)[index])
        values = [np.broadcast_to(one(f), f.threads) for one in sources]
        out = np.zeros(f.threads, dtype)
        for i, thread in enumerate(index):
            one, who = address[i : i + 1], index[i : i + 1]
            at = int(memory.find(one, who, dtype.itemsize)[0])
            cell = memory.store.bytes[at : at + dtype.itemsize].view(dtype)
            out[thread] = cell[0]
            cell[0] = f_of(cell[0], *(value[thread] for value in values))
        if write:
            write(f, out, lanes)

    return run


def is_label(operand: Operand | None) -> bool:
    """Whether an operand names a place in the code."""
    return isinstance(operand, Symbol)


__all__ = ["Read", "Register", "is_label"]
