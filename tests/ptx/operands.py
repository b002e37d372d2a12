"""Operands as functions of a frame: how an instruction reads registers, and writes those of some lanes only.

Registers are arrays over all threads of the launch, of unsigned numbers, or of truth values for predicates.  They are
replaced, never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .floats import flushed
from .memory import WINDOWS
from .parse import Address, Function, Immediate, Instruction, Operand, PTXError, Register, Symbol, Vector

Read = Callable[[Any], np.ndarray]
Write = Callable[[Any, np.ndarray, Any], None]
Run = Callable[[Any, Any], None]

UNSIGNED = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
_FLUSHING = {"add", "sub", "mul", "fma", "div", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "min", "max", "neg", "abs"}


class Lanes:
    """The threads that take part; ``whole``: all that are alive, so that nobody minds what others' registers hold."""

    __slots__ = ("_index", "flags", "whole")

    def __init__(self, flags: np.ndarray, whole: bool) -> None:
        self.flags, self.whole = flags, whole
        self._index: np.ndarray | None = None

    @property
    def index(self) -> np.ndarray:
        """Their numbers."""
        if self._index is None:
            self._index = np.flatnonzero(self.flags)
        return self._index

    def under(self, predicate: np.ndarray) -> Lanes | None:
        """Those of them for which a predicate holds, None if for nobody."""
        flags = self.flags & predicate
        count = np.count_nonzero(flags)
        if not count:
            return None
        return Lanes(flags, self.whole and count == np.count_nonzero(self.flags))


def typed(name: str) -> np.dtype:
    """NumPy's dtype of a PTX type; float16 and narrower floats are bits."""
    if name in ("f32", "f64"):
        return np.dtype("f4" if name == "f32" else "f8")
    if name == "pred":
        return np.dtype(bool)
    if name in ("f16", "bf16"):
        return np.dtype("u2")
    if name in ("f16x2", "bf16x2", "tf32"):
        return np.dtype("u4")
    if name[0] in "bus" and name[1:] in ("8", "16", "32", "64"):
        return np.dtype(("i" if name[0] == "s" else "u") + str(int(name[1:]) // 8))
    raise PTXError(f"no type {name} is known")


class Scope:
    """What decoding an instruction has to know of its function: which variables there are, and where."""

    def __init__(self, function: Function, places: dict[str, tuple[str, int]]) -> None:
        self.function, self.places = function, places
        self.flushed = _always_flushed(function)

    def read(self, operand: Operand | None, kind: str, flush: bool = False) -> Read:
        """An operand as an array of a type; numbers of the text have no dimension."""
        dtype = typed(kind)
        if isinstance(operand, Register):
            number, bits = operand.number, 8 * dtype.itemsize
            if operand.bits == 1:
                if dtype.kind != "b":
                    raise PTXError(f"{operand.name} is a predicate, wanted is {kind}")
                return lambda f: f.registers[number]
            if flush and kind == "f32" and number not in self.flushed:
                return lambda f: flushed(f.registers[number].view(dtype))
            if operand.bits == bits:
                if dtype.kind == "u":
                    return lambda f: f.registers[number]
                return lambda f: f.registers[number].view(dtype)
            if dtype.kind == "f":
                raise PTXError(f"{operand.name} has {operand.bits} bits, wanted is {kind}")
            plain = UNSIGNED[bits]
            return lambda f: f.registers[number].astype(plain).view(dtype)
        if isinstance(operand, Immediate):
            value = _constant(operand, dtype)
            return lambda f: value
        if isinstance(operand, Symbol):
            if operand.name in self.places:
                value = np.asarray(self.address(operand.name), dtype)
                return lambda f: value
            name = operand.name
            return lambda f: f.special(name).astype(dtype)
        raise PTXError(f"no operand {operand}")

    def address(self, name: str) -> int:
        """What ``mov`` gives for a variable: its place in its own space."""
        return self.places[name][1]

    def write(self, operand: Operand | None, kind: str) -> Write:
        """Puts an array into a register, extended by sign or zeros where the register is wider than the type."""
        if operand is None:
            return lambda f, v, lanes: None
        if not isinstance(operand, Register):
            raise PTXError(f"{operand} is no register")
        number, bits, dtype = operand.number, operand.bits, typed(kind)
        if (bits == 1) != (dtype.kind == "b") or bits < 8 * dtype.itemsize and bits > 1:
            raise PTXError(f"{operand.name} has {bits} bits and cannot hold {kind}")
        plain = UNSIGNED[bits]
        wider = None if bits == 1 or bits == 8 * dtype.itemsize else np.dtype(f"{dtype.kind}{bits // 8}")

        def put(f: Any, v: np.ndarray, lanes: Lanes) -> None:
            if wider is not None:
                v = v.view(dtype).astype(wider)
            if not v.ndim:
                v = np.full(f.threads, v)
            v = v.view(plain)
            f.registers[number] = v if lanes.whole else np.where(lanes.flags, v, f.registers[number])

        return put

    def place(self, operand: Operand | None) -> tuple[Read, str | None]:
        """The address that ``[...]`` names, as an array of 64 bits, and the space of the variable in it, if any."""
        if not isinstance(operand, Address):
            raise PTXError(f"{operand} is no address")
        offset, base = np.int64(operand.offset), operand.base
        if isinstance(base, Register):
            number, narrow = base.number, base.bits == 32
            if narrow:
                return (lambda f: f.registers[number].astype(np.int64) + offset), None
            return (lambda f: f.registers[number].view(np.int64) + offset), None
        space, start = (None, 0) if base is None else self.places.get(base.name, (None, None))
        if start is None:
            raise PTXError(f"nothing is called {base}")
        value = np.int64(start + operand.offset)
        return (lambda f: np.full(f.threads, value)), space


def _constant(operand: Immediate, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.asarray(operand.value != 0)
    size = dtype.itemsize
    if dtype.kind == "f" and not operand.float_bits:
        return np.asarray(operand.value, dtype)
    value = operand.value
    if dtype.kind == "f" and operand.float_bits == 64 and size == 4:
        return np.asarray(np.array(value, np.uint64).view(np.float64), np.float32)
    return np.frombuffer((value % (1 << 8 * size)).to_bytes(size, "little"), dtype)[0]


def _always_flushed(function: Function) -> frozenset[int]:
    """Registers that only instructions write whose results are never subnormal."""
    good: set[int] = set()
    bad: set[int] = set()
    for ins in function.code:
        flushes = ins.words[0] in _FLUSHING and "ftz" in ins.words and ins.words[-1] == "f32"
        for one in registers_of(ins.operands[:1]):
            (good if flushes else bad).add(one.number)
    return frozenset(good - bad)


def registers_of(operands: Sequence[Any]) -> list[Register]:
    """All registers among operands, inside of vectors and pairs too."""
    out = []
    for one in operands:
        if isinstance(one, Register):
            out.append(one)
        elif isinstance(one, Vector):
            out += registers_of(one.items)
        elif hasattr(one, "first"):
            out += registers_of((one.first, one.second))
    return out


HANDLERS: dict[str, Callable[[Scope, Instruction], Run]] = {}


def handles(*names: str) -> Callable[[Any], Any]:
    """Registers the maker of the code for instructions whose first word this is."""

    def register(make: Any) -> Any:
        for name in names:
            HANDLERS[name] = make
        return make

    return register


def words(ins: Instruction, *allowed: str) -> set[str]:
    """The modifiers of an instruction, all of which must be among those allowed."""
    given = set(ins.words[1:])
    if odd := given - set(allowed):
        raise PTXError(f"modifiers that are not known: {sorted(odd)}")
    return given


GENERIC = dict(WINDOWS)
