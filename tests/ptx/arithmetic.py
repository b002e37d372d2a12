"""Arithmetic: integers, floats, comparisons, logic (PTX ISA, sections 9.7.1 to 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats, integers
from .operands import Lanes, Read, Run, Scope, Write, handles, typed, words
from .parse import Immediate, Instruction, Pair, PTXError

F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64
_INTEGERS = {f"{k}{n}" for k in "us" for n in (16, 32, 64)}
_BITS = {"b16", "b32", "b64", "pred"}
_MODES = {"rn", "rz", "rm", "rp"}


def _count(ins: Instruction, number: int) -> None:
    if len(ins.operands) != number:
        raise PTXError(f"{len(ins.operands)} operands, not {number}")


def _apply(f: Callable[..., Any], reads: list[Read], write: Write) -> Run:
    if len(reads) == 1:
        (a,) = reads
        return lambda frame, lanes: write(frame, f(a(frame)), lanes)
    if len(reads) == 2:
        a, b = reads
        return lambda frame, lanes: write(frame, f(a(frame), b(frame)), lanes)
    a, b, c = reads
    return lambda frame, lanes: write(frame, f(a(frame), b(frame), c(frame)), lanes)


def _plain(scope: Scope, ins: Instruction, f: Callable[..., Any], kind: str, to: str | None = None) -> Run:
    """All operands of one type."""
    reads = [scope.read(one, kind) for one in ins.operands[1:]]
    return _apply(f, reads, scope.write(ins.operands[0], to or kind))


def _floating(scope: Scope, ins: Instruction, f: Callable[..., Any], kind: str, ftz: bool) -> Run:
    reads = [scope.read(one, kind, ftz) for one in ins.operands[1:]]
    outer = (lambda *args: floats.flushed(f(*args))) if ftz and kind == "f32" else f
    return _apply(outer, reads, scope.write(ins.operands[0], kind))


def _mode(given: set[str]) -> str:
    return next(iter(given & _MODES), "rn")


def _saturating(f: Callable[..., Any], given: set[str]) -> Callable[..., Any]:
    return (lambda *args: saturated(f(*args))) if "sat" in given else f


def saturated(x: np.ndarray) -> np.ndarray:
    """Clamped to [0, 1]; NaN becomes 0."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)).astype(x.dtype) + x.dtype.type(0)


@handles("add", "sub")
def _add(scope: Scope, ins: Instruction) -> Run:
    kind, minus = ins.words[-1], ins.words[0] == "sub"
    if kind in _INTEGERS:
        if "cc" in ins.words:
            return _carrying(scope, ins)
        words(ins, kind)
        _count(ins, 3)
        return _plain(scope, ins, np.subtract if minus else np.add, kind)
    given = words(ins, "ftz", "sat", "f32", "f64", *_MODES)
    _count(ins, 3)
    mode = _mode(given)
    if kind == "f64" and mode != "rn":
        raise PTXError("float64 is added to nearest only")
    if kind == "f64" or mode == "rn":
        return _floating(scope, ins, _saturating(np.subtract if minus else np.add, given), kind, "ftz" in given)
    f = lambda a, b: floats.sum32(a, -b if minus else b, mode)
    return _floating(scope, ins, _saturating(f, given), kind, "ftz" in given)


@handles("addc", "subc")
def _carrying(scope: Scope, ins: Instruction) -> Run:
    """With the carry of the instruction before, or leaving one for the next."""
    given, kind = words(ins, "cc", "u32", "s32", "u64", "s64"), ins.words[-1]
    _count(ins, 3)
    a, b = (scope.read(one, kind) for one in ins.operands[1:])
    write, bits, plain = scope.write(ins.operands[0], kind), 8 * typed(kind).itemsize, f"u{typed(kind).itemsize}"
    takes, minus = ins.words[0].endswith("c"), ins.words[0].startswith("sub")

    def run(f: Any, lanes: Lanes) -> None:
        x, y = (np.broadcast_to(one(f), f.threads).view(plain) for one in (a, b))
        carry = f.carry if takes else np.zeros(f.threads, bool)
        total = x - y - carry.astype(plain) if minus else x + y + carry.astype(plain)
        over = (x < y) | (carry & (x == y)) if minus else (total < x) | (carry & (total == x))
        write(f, total, lanes)
        if "cc" in given:
            f.carry = np.where(lanes.flags, over, f.carry)

    assert bits in (32, 64)
    return run


@handles("mul", "mad", "madc")
def _mul(scope: Scope, ins: Instruction) -> Run:
    kind, more = ins.words[-1], ins.words[0] != "mul"
    _count(ins, 4 if more else 3)
    if kind in _INTEGERS:
        return _integer_product(scope, ins, kind, more)
    if more:
        raise PTXError("mad of floats is not known")
    given = words(ins, "ftz", "sat", "f32", "f64", *_MODES)
    mode = _mode(given)
    if kind == "f64" and mode != "rn":
        raise PTXError("float64 is multiplied to nearest only")
    f = np.multiply if mode == "rn" else lambda a, b: floats.product32(a, b, mode)
    return _floating(scope, ins, _saturating(f, given), kind, "ftz" in given)


def _integer_product(scope: Scope, ins: Instruction, kind: str, more: bool) -> Run:
    part = ins.words[1]
    if part not in ("lo", "hi", "wide") or set(ins.words[2:-1]) - {"cc"}:
        raise PTXError("which part of the product?")
    dtype = typed(kind)
    to = kind if part != "wide" else kind[0] + str(16 * dtype.itemsize)
    wide = typed(to)
    f = {"lo": np.multiply, "hi": integers.high, "wide": lambda a, b: a.astype(wide) * b.astype(wide)}[part]
    if not more:
        return _plain(scope, ins, f, kind, to)
    a, b = (scope.read(one, kind) for one in ins.operands[1:3])
    c, write = scope.read(ins.operands[3], to), scope.write(ins.operands[0], to)
    if "cc" not in ins.words and ins.words[0] == "mad":
        return lambda frame, lanes: write(frame, f(a(frame), b(frame)) + c(frame), lanes)
    plain, takes, leaves = f"u{wide.itemsize}", ins.words[0] == "madc", "cc" in ins.words

    def run(frame: Any, lanes: Lanes) -> None:
        x = np.broadcast_to(f(a(frame), b(frame)), frame.threads).view(plain)
        y = np.broadcast_to(c(frame), frame.threads).view(plain)
        carry = frame.carry if takes else np.zeros(frame.threads, bool)
        total = x + y + carry.astype(plain)
        write(frame, total, lanes)
        if leaves:
            frame.carry = np.where(lanes.flags, (total < x) | (carry & (total == x)), frame.carry)

    return run


@handles("fma")
def _fma(scope: Scope, ins: Instruction) -> Run:
    given, kind = words(ins, "ftz", "sat", "f32", "f64", *_MODES), ins.words[-1]
    _count(ins, 4)
    mode = _mode(given)
    if kind == "f64":
        if mode != "rn" or "sat" in given:
            raise PTXError("float64 is fused to nearest only")
        return _floating(scope, ins, floats.fma64, kind, False)
    f = lambda a, b, c: floats.fma32(a, b, c, mode)
    return _floating(scope, ins, _saturating(f, given), kind, "ftz" in given)


@handles("div", "rem")
def _div(scope: Scope, ins: Instruction) -> Run:
    kind, rest = ins.words[-1], ins.words[0] == "rem"
    _count(ins, 3)
    if kind in _INTEGERS:
        words(ins, kind)
        return _plain(scope, ins, lambda a, b: integers.divide(*np.broadcast_arrays(a, b), rest), kind)
    given = words(ins, "ftz", "rn", "approx", "full", "f32", "f64")
    return _floating(scope, ins, np.divide, kind, "ftz" in given)


@handles("rcp", "sqrt")
def _rcp(scope: Scope, ins: Instruction) -> Run:
    given, kind = words(ins, "ftz", "rn", "approx", "f32", "f64"), ins.words[-1]
    _count(ins, 2)
    name = ins.words[0]
    if "approx" in given and kind == "f64":
        return _plain(scope, ins, lambda x: floats.coarse(name, x), kind)
    one = typed(kind).type(1)
    f = np.sqrt if name == "sqrt" else lambda x: one / x
    return _floating(scope, ins, f, kind, "ftz" in given)


@handles("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _approximate(scope: Scope, ins: Instruction) -> Run:
    given, kind = words(ins, "approx", "ftz", "f32", "f64"), ins.words[-1]
    _count(ins, 2)
    name = ins.words[0]
    if kind == "f64":
        if name != "rsqrt":
            raise PTXError(f"no {name} of float64")
        # Without .ftz it is emulated in software, to nearly full accuracy.
        f = (lambda x: floats.coarse(name, x)) if "ftz" in given else lambda x: 1 / np.sqrt(x)
        return _plain(scope, ins, f, kind)
    return _floating(scope, ins, floats.APPROXIMATE[name], kind, "ftz" in given)


@handles("abs", "neg")
def _sign(scope: Scope, ins: Instruction) -> Run:
    given, kind = words(ins, "ftz", "f32", "f64", "s16", "s32", "s64"), ins.words[-1]
    _count(ins, 2)
    f = np.abs if ins.words[0] == "abs" else np.negative
    return _floating(scope, ins, f, kind, "ftz" in given)


@handles("min", "max")
def _least(scope: Scope, ins: Instruction) -> Run:
    kind, least = ins.words[-1], ins.words[0] == "min"
    _count(ins, 3)
    if kind in _INTEGERS:
        words(ins, kind)
        return _plain(scope, ins, np.minimum if least else np.maximum, kind)
    given = words(ins, "ftz", "NaN", "f32", "f64")
    f = floats.smaller if least else floats.larger
    if "NaN" in given:
        plain = f
        f = lambda a, b: np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), plain(a, b))
    return _floating(scope, ins, f, kind, "ftz" in given)


@handles("copysign")
def _copysign(scope: Scope, ins: Instruction) -> Run:
    words(ins, "f32", "f64")
    return _plain(scope, ins, lambda a, b: np.copysign(b, a), ins.words[-1])  # the sign is the first operand's


@handles("testp")
def _testp(scope: Scope, ins: Instruction) -> Run:
    tests = {"finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan}
    return _plain(scope, ins, tests[ins.words[1]], ins.words[-1], "pred")


@handles("and", "or", "xor", "not", "cnot")
def _logic(scope: Scope, ins: Instruction) -> Run:
    words(ins, *_BITS)
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}.get(ins.words[0])
    if f is None:
        f = lambda a: (a == 0).astype(a.dtype)
    return _plain(scope, ins, f, ins.words[-1])


@handles("lop3")
def _lop3(scope: Scope, ins: Instruction) -> Run:
    words(ins, "b32")
    table = ins.operands[4]
    if not isinstance(table, Immediate):
        raise PTXError("no table of three bits")
    reads = [scope.read(one, "b32") for one in ins.operands[1:4]]
    return _apply(lambda a, b, c: integers.logic(a, b, c, table.value), reads, scope.write(ins.operands[0], "b32"))


@handles("shl", "shr")
def _shift(scope: Scope, ins: Instruction) -> Run:
    kind, left = ins.words[-1], ins.words[0] == "shl"
    words(ins, *_BITS, *_INTEGERS)
    a, n = scope.read(ins.operands[1], kind), scope.read(ins.operands[2], "u32")
    return _apply(lambda x, y: integers.shift(x, y, left), [a, n], scope.write(ins.operands[0], kind))


@handles("shf")
def _funnel(scope: Scope, ins: Instruction) -> Run:
    given = words(ins, "l", "r", "wrap", "clamp", "b32")
    f = lambda a, b, n: integers.funnel(a, b, n, "l" in given, "clamp" in given)
    return _plain(scope, ins, f, "b32")


@handles("prmt")
def _prmt(scope: Scope, ins: Instruction) -> Run:
    words(ins, "b32")
    return _plain(scope, ins, integers.permute, "b32")


@handles("bfe")
def _bfe(scope: Scope, ins: Instruction) -> Run:
    words(ins, "u32", "s32", "u64", "s64")
    reads = [scope.read(ins.operands[1], ins.words[-1]), *(scope.read(one, "u32") for one in ins.operands[2:])]
    return _apply(integers.extract, reads, scope.write(ins.operands[0], ins.words[-1]))


@handles("bfi")
def _bfi(scope: Scope, ins: Instruction) -> Run:
    words(ins, "b32", "b64")
    kind = ins.words[-1]
    a, b = (scope.read(one, kind) for one in ins.operands[1:3])
    place, length = (scope.read(one, "u32") for one in ins.operands[3:])
    write = scope.write(ins.operands[0], kind)
    return lambda f, lanes: write(
        f, integers.insert(a(f), np.broadcast_to(b(f), f.threads), place(f), length(f)), lanes
    )


@handles("clz", "popc", "brev")
def _count_bits(scope: Scope, ins: Instruction) -> Run:
    words(ins, "b32", "b64")
    f = {"clz": integers.leading_zeros, "popc": lambda a: np.bitwise_count(a).astype(U32),
         "brev": integers.reverse}[ins.words[0]]  # fmt: skip
    return _plain(scope, ins, f, ins.words[-1], ins.words[-1] if ins.words[0] == "brev" else "u32")


_ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str, floating: bool) -> Callable[..., Any]:
    if not floating:
        return _ORDERED[name]
    unordered = lambda a, b: np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else lambda a, b: ~unordered(a, b)
    if name == "ne":
        return lambda a, b: (a != b) & ~unordered(a, b)
    if name.endswith("u") and name != "u":
        plain = _ORDERED[name[:-1]]
        return lambda a, b: plain(a, b) | unordered(a, b)
    return _ORDERED[name]


@handles("setp", "set")
def _setp(scope: Scope, ins: Instruction) -> Run:
    kind = ins.words[-1]
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    middle = list(ins.words[2:-1])
    join = joins[middle.pop(0)] if middle and middle[0] in joins else None
    ftz = "ftz" in middle
    if set(middle) - {"ftz"} or ins.words[0] == "set":
        raise PTXError("a comparison that is not known")
    compare = _comparison(ins.words[1], kind in ("f32", "f64"))
    a, b = (scope.read(one, kind, ftz) for one in ins.operands[1:3])
    target = ins.operands[0]
    yes, no = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    put, other = scope.write(yes, "pred"), scope.write(no, "pred")
    third = scope.read(ins.operands[3], "pred") if join else None

    def run(f: Any, lanes: Lanes) -> None:
        found = compare(a(f), b(f))
        if join and third:
            put(f, join(found, third(f)), lanes)
            other(f, join(~found, third(f)), lanes)
        else:
            put(f, found, lanes)
            if no is not None:
                other(f, ~found, lanes)

    return run


@handles("selp")
def _selp(scope: Scope, ins: Instruction) -> Run:
    kind = ins.words[-1]
    words(ins, kind)
    a, b = (scope.read(one, kind) for one in ins.operands[1:3])
    p, write = scope.read(ins.operands[3], "pred"), scope.write(ins.operands[0], kind)
    return lambda f, lanes: write(f, np.where(p(f), a(f), b(f)), lanes)


@handles("slct")
def _slct(scope: Scope, ins: Instruction) -> Run:
    kind, by = ins.words[-2], ins.words[-1]
    a, b = (scope.read(one, kind) for one in ins.operands[1:3])
    c, write = scope.read(ins.operands[3], by, "ftz" in ins.words), scope.write(ins.operands[0], kind)
    return lambda f, lanes: write(f, np.where(c(f) >= 0, a(f), b(f)), lanes)
