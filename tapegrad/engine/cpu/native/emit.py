"""A structure of exact ufuncs as LLVM's IR: an inner loop that reads leaves, computes, and stores what is needed."""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.engine.cpu.native.ops import TYPES, instructions

SAME, SCALAR, STRIDED = "same", "scalar", "strided"
"""How an operand lies along the inner loop: without gaps, one element for all, anything else."""
_VECTOR = 32
"""Bytes of a vector."""
_SIZES = {"f": 4, "d": 8, "?": 1}


class Structure(NamedTuple):
    """A kernel but for its sizes and addresses.  Values are numbered: leaves, then the results of ``ops`` in order."""

    leaves: tuple[tuple[str, str], ...]
    """The dtype's character and the kind of each leaf."""
    ops: tuple[tuple[str, str, tuple[int, ...], str], ...]
    """Of each ufunc its name, its operands' dtype, their numbers, and its result's dtype."""
    stores: tuple[tuple[int, str], ...]
    """The numbers of the values that are stored, and the kinds of the operands that they go to."""


def function(name: str, structure: Structure) -> str:
    """Return a function with the signature of NumPy's inner loops; operands are the leaves, then the stores."""
    leaves, _, stores = structure
    kinds = [*(kind for _, kind in leaves), *(kind for _, kind in stores)]
    lines = [
        f"define i32 @{name}(ptr %context, ptr %data, ptr %dims, ptr %strides, ptr %auxdata) {{",
        "  %n = load i64, ptr %dims",
    ]
    for i, kind in enumerate(kinds):
        lines += [f"  %p{i}.p = getelementptr ptr, ptr %data, i64 {i}", f"  %p{i} = load ptr, ptr %p{i}.p"]
        if kind == STRIDED:
            lines += [f"  %s{i}.p = getelementptr i64, ptr %strides, i64 {i}", f"  %s{i} = load i64, ptr %s{i}.p"]
    width = 1 if STRIDED in kinds else _VECTOR // max(_SIZES[char] for char in _chars(structure))
    for i, (char, kind) in enumerate(leaves):
        if kind == SCALAR:
            lines += _load(f"%v{i}.1", f"%p{i}", char, 1)
            if width > 1:
                lines += _splat(f"%v{i}.{width}", f"%v{i}.1", char, width)
    if width > 1:
        lines += [f"  %whole = and i64 %n, {-width}", *_loop(structure, width, "0", "%whole", "rest")]
        lines += ["rest:", *_loop(structure, 1, "%whole", "%n", "done")]
    else:
        lines += _loop(structure, 1, "0", "%n", "done")
    return "\n".join([*lines, "done:", "  ret i32 0", "}"])


def _chars(structure: Structure) -> list[str]:
    return [*(char for char, _ in structure.leaves), *(char for op in structure.ops for char in (op[1], op[3]))]


def _loop(structure: Structure, width: int, first: str, last: str, then: str) -> list[str]:
    """The loop over vectors of ``width`` from ``first`` to ``last``, which goes on at ``then``."""
    leaves, ops, stores = structure
    head, body = f"head{width}", f"body{width}"
    index, value = f"%i{width}", lambda k: f"%v{k}.{width}"
    lines = [
        f"  br label %enter{width}", f"enter{width}:", f"  br label %{head}", f"{head}:",
        f"  {index} = phi i64 [ {first}, %enter{width} ], [ {index}.next, %{body} ]",
        f"  {index}.more = icmp slt i64 {index}, {last}",
        f"  br i1 {index}.more, label %{body}, label %{then}", f"{body}:",
    ]  # fmt: skip
    for i, (char, kind) in enumerate(leaves):
        if kind != SCALAR:
            lines += _address(f"%a{i}.{width}", i, char, kind, index)
            lines += _load(value(i), f"%a{i}.{width}", char, width)
    for k, (name, char, operands, to) in enumerate(ops, len(leaves)):
        lines += [f"  {line}" for line in instructions(name, char, width, list(map(value, operands)), value(k), to)]
    for i, (k, kind) in enumerate(stores, len(leaves)):
        char = leaves[k][0] if k < len(leaves) else ops[k - len(leaves)][3]
        lines += _address(f"%a{i}.{width}", i, char, kind, index)
        lines += _store(value(k), f"%a{i}.{width}", char, width)
    return [*lines, f"  {index}.next = add i64 {index}, {width}", f"  br label %{head}"]


def _address(name: str, i: int, char: str, kind: str, index: str) -> list[str]:
    if kind == SAME:
        return [f"  {name} = getelementptr {_memory(char, 1)}, ptr %p{i}, i64 {index}"]
    return [f"  {name}.o = mul i64 %s{i}, {index}", f"  {name} = getelementptr i8, ptr %p{i}, i64 {name}.o"]


def _memory(char: str, width: int) -> str:
    kind = "i8" if char == "?" else TYPES[char]
    return kind if width == 1 else f"<{width} x {kind}>"


def _register(char: str, width: int) -> str:
    return TYPES[char] if width == 1 else f"<{width} x {TYPES[char]}>"


def _load(result: str, address: str, char: str, width: int) -> list[str]:
    kind = _memory(char, width)
    if char != "?":
        return [f"  {result} = load {kind}, ptr {address}, align {_SIZES[char]}"]
    return [
        f"  {result}.b = load {kind}, ptr {address}, align 1",
        f"  {result} = trunc {kind} {result}.b to {_register(char, width)}",
    ]


def _store(value: str, address: str, char: str, width: int) -> list[str]:
    kind = _memory(char, width)
    if char != "?":
        return [f"  store {kind} {value}, ptr {address}, align {_SIZES[char]}"]
    return [
        f"  {address}.b = zext {_register(char, width)} {value} to {kind}",
        f"  store {kind} {address}.b, ptr {address}, align 1",
    ]  # fmt: skip


def _splat(result: str, value: str, char: str, width: int) -> list[str]:
    kind = _register(char, width)
    return [
        f"  {result}.i = insertelement {kind} poison, {TYPES[char]} {value}, i64 0",
        f"  {result} = shufflevector {kind} {result}.i, {kind} poison, <{width} x i32> zeroinitializer",
    ]
