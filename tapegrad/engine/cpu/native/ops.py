"""Exact ufuncs as LLVM's instructions on vectors.

Each is one that IEEE 754 rounds once or not at all, so that compiled code and NumPy's loops give the same bits whatever
the layout (but which NaN of two operands comes out, on which NumPy's own loops differ among themselves).  None may be
contracted or reassociated: none carries fast-math flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.device.types import DType

TYPES = {"f": "float", "d": "double", "?": "i1"}
"""LLVM's types of the dtypes that kernels compute with; a bool is a byte in memory."""

_PLAIN = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "divide": "fdiv"}
_INTRINSIC = {"absolute": "fabs", "fabs": "fabs", "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc"}
_COMPARE = {
    "equal": "oeq", "not_equal": "une", "less": "olt", "less_equal": "ole", "greater": "ogt", "greater_equal": "oge",
}  # fmt: skip
_BOOLEAN = {
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "not_equal": "xor",
}  # fmt: skip
_OTHER = {
    "negative", "square", "positive", "reciprocal", "maximum", "minimum", "isnan", "copyto", "sign", "copysign",
}  # fmt: skip
CASTS = (("f", "d"), ("d", "f"), ("?", "f"), ("?", "d"), ("f", "?"), ("d", "?"))
"""From which dtype to which other one compiled code converts."""
_CAST = {"fd": "fpext", "df": "fptrunc", "?f": "uitofp", "?d": "uitofp"}
_FLOATS = {*_PLAIN, *_INTRINSIC, *_COMPARE, *_OTHER}


def is_exact(name: str, dtypes: Sequence[DType]) -> bool:
    """Whether compiled code may stand for ufunc ``name`` on operands and a result of ``dtypes``."""
    if name == "where":
        return len(dtypes) == 4 and dtypes[0].char == "?" and {d.char for d in dtypes[1:]} in ({"f"}, {"d"}, {"?"})
    if name == "cast":
        return tuple(d.char for d in dtypes) in CASTS
    chars = {d.char for d in dtypes[:-1]}
    if len(chars) != 1:
        return False
    known = {"f": _FLOATS, "d": _FLOATS, "?": {*_BOOLEAN, "logical_not", "invert", "copyto"}}.get(chars.pop(), ())
    return name in known


def instructions(name: str, char: str, width: int, reads: Sequence[str], result: str, to: str) -> list[str]:
    """Return what sets ``result``, of dtype ``to``, to ufunc ``name`` of ``reads``.

    These are vectors of ``width`` of dtype ``char``.
    """
    kind = TYPES[char] if width == 1 else f"<{width} x {TYPES[char]}>"
    suffix = {"f": "f32", "d": "f64", "?": "i1"}[char]
    suffix = suffix if width == 1 else f"v{width}{suffix}"
    x, y = reads[0], reads[-1]
    if name == "where":
        return [f"{result} = select {'i1' if width == 1 else f'<{width} x i1>'} {x}, {kind} {reads[1]}, {kind} {y}"]
    if name == "cast" and to == "?":
        return [f"{result} = fcmp une {kind} {x}, {constant('0.0', width, TYPES[char])}"]
    if name == "cast":
        target = TYPES[to] if width == 1 else f"<{width} x {TYPES[to]}>"
        return [f"{result} = {_CAST[char + to]} {kind} {x} to {target}"]
    if name in ("positive", "copyto"):
        return [f"{result} = bitcast {kind} {x} to {kind}"]
    if char == "?":
        if name in ("logical_not", "invert"):
            return [f"{result} = xor {kind} {x}, {constant('1', width, 'i1')}"]
        return [f"{result} = {_BOOLEAN[name]} {kind} {x}, {y}"]
    if name in _PLAIN:
        return [f"{result} = {_PLAIN[name]} {kind} {x}, {y}"]
    if name in _INTRINSIC:
        return [f"{result} = call {kind} @llvm.{_INTRINSIC[name]}.{suffix}({kind} {x})"]
    if name in _COMPARE:
        return [f"{result} = fcmp {_COMPARE[name]} {kind} {x}, {y}"]
    if name in ("maximum", "minimum"):
        bits = "i1" if width == 1 else f"<{width} x i1>"
        return [
            f"{result}.o = fcmp {'ogt' if name == 'maximum' else 'olt'} {kind} {x}, {y}",
            f"{result}.s = select {bits} {result}.o, {kind} {x}, {kind} {y}",
            f"{result}.n = fcmp uno {kind} {x}, {x}",
            f"{result} = select {bits} {result}.n, {kind} {x}, {kind} {result}.s",
        ]
    if name == "copysign":
        return [f"{result} = call {kind} @llvm.copysign.{suffix}({kind} {x}, {kind} {y})"]
    if name == "sign":
        bits, numbers = "i1" if width == 1 else f"<{width} x i1>", ("0.0", "-1.0", "1.0")
        zero, minus, one = (constant(number, width, TYPES[char]) for number in numbers)
        return [
            f"{result}.z = fcmp oeq {kind} {x}, {zero}",
            f"{result}.0 = select {bits} {result}.z, {kind} {zero}, {kind} {x}",
            f"{result}.l = fcmp olt {kind} {x}, {zero}",
            f"{result}.1 = select {bits} {result}.l, {kind} {minus}, {kind} {result}.0",
            f"{result}.g = fcmp ogt {kind} {x}, {zero}",
            f"{result} = select {bits} {result}.g, {kind} {one}, {kind} {result}.1",
        ]
    if name == "isnan":
        return [f"{result} = fcmp uno {kind} {x}, {x}"]
    if name == "square":
        return [f"{result} = fmul {kind} {x}, {x}"]
    if name == "reciprocal":
        return [f"{result} = fdiv {kind} {constant('1.0', width, TYPES[char])}, {x}"]
    assert name == "negative"
    return [f"{result} = fneg {kind} {x}"]


def constant(value: str, width: int, kind: str) -> str:
    """Return a vector whose elements are all ``value``."""
    return value if width == 1 else "<" + ", ".join([f"{kind} {value}"] * width) + ">"
