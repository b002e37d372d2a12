"""PTX text as kernels and functions: instructions with their lines, registers by number, labels, variables, parameters.

Grammar: "Parallel Thread Execution ISA", NVIDIA, chapters 4 to 6; only what NVRTC writes.  What is not known raises
PTXError with the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


class PTXError(Exception):
    """The text says something that the interpreter does not know, or the machine code does something forbidden."""


@dataclass(frozen=True)
class Register:
    """A register by its number in the frame; ``bits`` is 1 for a predicate."""

    number: int
    bits: int
    name: str


@dataclass(frozen=True)
class Immediate:
    """A number in the text: an integer, or the bits of a float of 32 or 64 bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable's address, or a special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; base is a register, a symbol or None."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``; None stands for ``_``."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Pair:
    """``a|b``: a result and a predicate, or two predicates."""

    first: Operand | None
    second: Operand | None


Operand = Register | Immediate | Symbol | Address | Vector | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name cut at the dots, its operands, the predicate it stands under, its line."""

    words: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str

    @property
    def name(self) -> str:
        return ".".join(self.words)


@dataclass
class Variable:
    """Memory that the text declares: where, how many bytes, how aligned, and what lies in it at first."""

    name: str
    space: str
    size: int
    align: int
    value: bytes | None = None


@dataclass
class Function:
    """A kernel or a function: ``labels`` and ``tables`` name instructions by number."""

    name: str
    kernel: bool
    params: list[Variable]
    returns: list[Variable]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    most_threads: int = 1024
    unread: tuple[str, int] | None = None

    def read(self) -> Function:
        """The same with its body, which is read when it is first wanted."""
        if self.unread:
            (text, line), self.unread = self.unread, None
            _Body(self).read(text, line)
        return self


@dataclass
class Module:
    """All of one text."""

    functions: dict[str, Function]
    variables: dict[str, Variable]
    lines: list[str]


SIZES = {"pred": 1, **{f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64, 128)}, "f16x2": 32,
         "bf16": 16, "bf16x2": 32, "tf32": 32}  # fmt: skip
_DIRECTIVES = re.compile(r"^[ \t]*\.(version|target|address_size)\b[^\n]*$", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([$\w%.]+)\s*:(?!:)")
_VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?(?:\.attribute\([^)]*\)\s*)?"
    r"\.(?P<type>\w+)\s+(?P<name>[$\w%]+)(?P<dims>(?:\s*\[\s*\d*\s*\])*)\s*(?:=\s*(?P<value>.*))?$",
    re.DOTALL,
)
_HEAD = re.compile(
    r"\.(?P<kind>entry|func)\s*(?:\((?P<returns>[^)]*)\))?\s*(?P<name>[$\w]+)\s*(?:\((?P<params>[^)]*)\))?(?P<rest>.*)",
    re.DOTALL,
)
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+(.*)", re.DOTALL)
_IMMEDIATE = re.compile(r"(-?)(?:0[fF](?P<f>[0-9a-fA-F]{8})|0[dD](?P<d>[0-9a-fA-F]{16})|"
                        r"(?P<x>0[xX][0-9a-fA-F]+)U?|(?P<i>\d+)U?)$")  # fmt: skip


def parse(text: str) -> Module:
    """Read a whole text.  Raises PTXError."""
    lines = text.splitlines()
    bare = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    bare = _DIRECTIVES.sub("", bare)
    module = Module({}, {}, lines)
    at = 0
    while bare[at:].strip():
        at = _outer(module, bare, at)
    return module


def _outer(module: Module, text: str, at: int) -> int:
    """One declaration outside of functions; the place behind it."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    semicolon, brace = text.find(";", start), text.find("{", start)
    head = text[start : brace if brace >= 0 else semicolon]
    if re.search(r"\.(entry|func)\b", head) and (semicolon < 0 or 0 <= brace < semicolon):
        return _function(module, text, start, brace)
    if semicolon < 0:
        raise PTXError(f"line {_line(text, start)}: no end: {text[start : start + 80]!r}")
    statement = re.sub(r"\.(visible|extern|weak|common)\b\s*", "", text[start:semicolon]).strip()
    if not re.match(r"\.func\b", statement):  # a prototype says nothing that the definition does not
        variable = _variable(statement, _line(text, start))
        module.variables[variable.name] = variable
    return semicolon + 1


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _variable(statement: str, line: int) -> Variable:
    found = _VARIABLE.match(statement)
    if not found or found["type"] not in SIZES:
        raise PTXError(f"line {line}: what is declared here? {statement!r}")
    size = SIZES[found["type"]] // 8
    total = size
    for dim in re.findall(r"\[\s*(\d*)\s*\]", found["dims"]):
        total *= int(dim or 0)
    return Variable(found["name"], found["space"], total, int(found["align"] or size),
                    _initial(found["value"], size, total, line))  # fmt: skip


def _initial(value: str | None, size: int, total: int, line: int) -> bytes | None:
    if value is None:
        return None
    out = b""
    for item in value.strip().strip("{}").split(","):
        number = _immediate(item.strip())
        if number is None:
            raise PTXError(f"line {line}: an initial value that is no number: {item!r}")
        out += (number.value % (1 << 8 * size)).to_bytes(size, "little")
    return out.ljust(total, b"\0")


def _function(module: Module, text: str, start: int, brace: int) -> int:
    head = _HEAD.search(text, start, brace)
    assert head
    params, returns = (
        [_variable(one.strip(), _line(text, start)) for one in (found or "").split(",") if one.strip()]
        for found in (head["params"], head["returns"])
    )
    function = Function(head["name"], head["kind"] == "entry", params, returns)
    if bound := re.search(r"\.(?:maxntid|reqntid)\s+([\d\s,]+)", head["rest"]):
        function.most_threads = int(np.prod([int(n) for n in bound[1].split(",")]))
    end = _behind(text, brace)
    function.unread = (text[brace:end], _line(text, brace))
    module.functions[function.name] = function
    return end


def _behind(text: str, brace: int) -> int:
    """The place behind the brace that closes this one."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, brace):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.end()
    raise PTXError(f"line {_line(text, brace)}: a body without end")


class _Body:
    """The statements between a function's braces; names of registers are looked up from the innermost scope."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.scopes: list[dict[str, Register]] = []
        self.counts: list[dict[str, tuple[int, int]]] = []

    def read(self, text: str, line: int) -> None:
        counted = 0
        for start, statement in _statements(text):
            line, counted = line + text.count("\n", counted, start), start
            if statement == "{":
                self.scopes.append({})
                self.counts.append({})
            elif statement == "}":
                self.scopes.pop()
                self.counts.pop()
            elif statement.endswith(":"):
                name = statement[:-1].strip()
                if name in self.function.labels:
                    raise PTXError(f"line {line}: a second label {name}")
                self.function.labels[name] = len(self.function.code)
            elif statement.startswith("."):
                self._declare(statement, line)
            else:
                self._instruction(statement, line)

    def _declare(self, statement: str, line: int) -> None:
        if statement.startswith(".reg"):
            kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]
            for name in names.split(","):
                found = re.match(r"\s*([%\w$]+)(?:<(\d+)>)?\s*$", name)
                if not found or kind not in SIZES:
                    raise PTXError(f"line {line}: which registers? {statement!r}")
                if found[2]:
                    self.counts[-1][found[1]] = (int(found[2]), SIZES[kind])
                else:
                    self._register(found[1], SIZES[kind])
        elif statement.startswith(".branchtargets"):
            label = next(reversed(self.function.labels))  # it stands right behind its label
            self.function.tables[label] = [one.strip() for one in statement.split(None, 1)[1].split(",")]
        elif not re.match(r"\.(pragma|loc|file)\b", statement):
            variable = _variable(statement, line)
            before = self.function.variables.get(variable.name)  # calls of several functions share names
            if before is None or before.size < variable.size:
                self.function.variables[variable.name] = variable

    def _register(self, name: str, bits: int) -> Register:
        register = Register(len(self.function.registers), bits, name)
        self.function.registers.append(register)
        self.scopes[-1][name] = register
        return register

    def _lookup(self, name: str) -> Register | None:
        for scope, counts in zip(reversed(self.scopes), reversed(self.counts)):
            if name in scope:
                return scope[name]
            found = re.match(r"(.*?)(\d+)$", name)
            if found and found[1] in counts and int(found[2]) < counts[found[1]][0]:
                register = Register(len(self.function.registers), counts[found[1]][1], name)
                self.function.registers.append(register)
                scope[name] = register
                return register
        return None

    def _instruction(self, statement: str, line: int) -> None:
        text, guard = " ".join(statement.split()), None
        if found := _GUARD.match(statement):
            register = self._lookup(found[2])
            if register is None:
                raise PTXError(f"line {line}: no register {found[2]}: {text}")
            guard, statement = (register, not found[1]), found[3]
        pieces = re.match(r"([\w.:]+)\s*(.*)$", statement.strip(), re.DOTALL)
        if not pieces:
            raise PTXError(f"line {line}: no instruction: {text}")
        name, rest = pieces[1], pieces[2]
        try:
            operands = tuple(self._operand(one) for one in _split(rest))
        except ValueError as error:
            raise PTXError(f"line {line}: {error}: {text}") from None
        self.function.code.append(Instruction(tuple(name.split(".")), operands, guard, line, text))

    def _operand(self, text: str) -> Operand | None:
        text = text.strip()
        if text == "_":
            return None
        if text[0] in "{(":
            return Vector(tuple(self._operand(one) for one in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1])
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        if (number := _immediate(text)) is not None:
            return number
        return self._lookup(text) or Symbol(text)

    def _address(self, text: str) -> Address:
        found = re.match(r"\s*([$\w%.]+?)\s*(?:([+-])\s*(-?\d+))?\s*$", text)
        if not found:
            raise ValueError(f"which address is [{text}]")
        offset = int(found[3] or 0) * (-1 if found[2] == "-" else 1)
        if (number := _immediate(found[1])) is not None:
            return Address(None, number.value + offset)
        return Address(self._lookup(found[1]) or Symbol(found[1]), offset)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement with where it begins; a brace that opens or closes a scope is one, a label too."""
    at, size = 0, len(text)
    while at < size:
        if text[at].isspace() or text[at] == ";":
            at += 1
            continue
        if text[at] in "{}":
            yield at, text[at]
            at += 1
            continue
        if label := _LABEL.match(text, at):
            yield at, label[1] + ":"
            at = label.end()
            continue
        end = text.index(";", at)
        yield at, text[at:end].strip()
        at = end + 1


def _split(text: str) -> list[str]:
    """What commas separate, outside of brackets."""
    if "{" not in text and "(" not in text:
        return [one for one in text.split(",") if one.strip()]
    out, depth, kept = [], 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            out.append(kept)
            kept = ""
        else:
            kept += c
    return [one for one in [*out, kept] if one.strip()]


def _immediate(text: str) -> Immediate | None:
    found = _IMMEDIATE.match(text)
    if not found:
        return None
    if found["f"] or found["d"]:
        bits = 32 if found["f"] else 64
        value = int(found["f"] or found["d"], 16)
        return Immediate(value ^ (1 << bits - 1) if found[1] else value, bits)
    value = int(found["x"], 16) if found["x"] else int(found["i"])
    return Immediate(-value if found[1] else value)
