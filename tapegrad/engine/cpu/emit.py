"""A region's program: the steps that evaluate one tile, and the scratch they need.

A program is a pure function of the region's structure, so it is made once and kept.  Values are numbered: leaves first,
then outputs, then scratch.  A step applies one primitive to numbered values and writes another.  Interiors live in
scratch that is reused as soon as its last reader has run; most ufuncs may write over an operand that dies with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.core import primitive
from tapegrad.core.buffer import Buffer
from tapegrad.core.rule import Function
from tapegrad.device.dtypes import accumulator
from tapegrad.engine.region import Region

FULL, SCALAR, STRIDED = "full", "scalar", "strided"
"""How a leaf lies in memory: C-contiguous with the loop's shape; one element (repeated at will); anything else."""


@dataclass(frozen=True)
class Reduction:
    """After the steps of a tile: reduce value ``source`` into output number ``output``."""

    ufunc: str
    source: int
    output: int
    dtype: Any


@dataclass(frozen=True, eq=False)
class Program:
    """Steps ``(function of the namespace, operand numbers, result number)`` for one tile."""

    steps: tuple[tuple[Function, tuple[int, ...], int], ...]
    scratch: tuple[Any, ...]
    """The dtype of each scratch value."""
    reductions: tuple[Reduction, ...]
    names: tuple[str, ...]
    """Primitives evaluated, in order."""
    labels: tuple[str, ...]
    """For readers: the primitive (or the copy) of each step."""
    outputs: int


_programs: dict[Any, Program] = {}
_MOST = 4096


def program(region: Region, layouts: list[str], targets: list[Buffer], xp: Any) -> Program:
    """The program evaluating ``targets`` from leaves that lie in memory as ``layouts`` says."""
    number = {id(b): i for i, b in enumerate(region.leaves)}
    code = []
    for b in region.order:
        node = b.node
        code.append(
            (
                node.prim,
                node.aval.dtype.char,
                node.params.get("dtype"),
                tuple(map(number.__getitem__, map(id, b.keeps))),
            )
        )
        number[id(b)] = len(number)
    outputs = tuple(number[id(b)] for b in targets)
    leaves = tuple((layout, b.node.aval.dtype.char) for layout, b in zip(layouts, region.leaves, strict=True))
    key = (xp.__name__, tuple(code), leaves, outputs)
    found = _programs.get(key)
    if found is None:
        if len(_programs) >= _MOST:
            _programs.clear()
        found = _programs[key] = _Emitter(region, layouts, targets, xp).emit()
    return found


class _Emitter:
    """Walks a region once, assigning values to leaves, outputs and scratch."""

    def __init__(self, region: Region, layouts: list[str], targets: list[Buffer], xp: Any) -> None:
        self.region, self.xp = region, xp
        self.layouts = layouts
        self.where = {id(b): i for i, b in enumerate(region.leaves)}
        self.first_output = len(region.leaves)
        self.output = {id(b): self.first_output + i for i, b in enumerate(targets)}
        self.first_scratch = self.first_output + len(targets)
        self.scratch: list[Any] = []
        self.free: dict[Any, list[int]] = {}
        self.steps: list[tuple[Function, tuple[int, ...], int]] = []
        self.labels: list[str] = []
        self.packed: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def emit(self) -> Program:
        names = []
        reductions = []
        self._find_last_readers()
        for position, b in enumerate(self.region.order):
            prim = b.node.prim
            names.append(prim.name)
            if isinstance(prim, primitive.Reduction):
                dtype = accumulator(b.node.params.get("dtype") or b.node.aval.dtype)
                operand = self._read(b.keeps[0], (STRIDED, SCALAR))
                reductions.append(Reduction(prim.ufunc, operand, self.output[id(b)] - self.first_output, dtype))
                continue  # its operand stays where it is until the tile's end
            plain = prim if isinstance(prim, primitive.Elementwise) else None
            operands = [self._read(k, () if plain is None or plain.exact else (STRIDED,)) for k in b.keeps]
            dying = self._dying(b, position)
            result = self.output.get(id(b))
            if result is None:
                result = self._take(b.node.aval.dtype, dying if _may_overwrite(plain, b.node.aval.dtype) else [])
            self.where[id(b)] = result
            self.steps.append((_not_run if plain is None else self._function(plain), tuple(operands), result))
            self.labels.append(prim.name)
            for value, dtype in dying:
                if value != result:
                    self.free.setdefault(dtype, []).append(value)
        steps, labels, outputs = tuple(self.steps), tuple(self.labels), self.first_scratch - self.first_output
        return Program(steps, tuple(self.scratch), tuple(reductions), tuple(names), labels, outputs)

    def _find_last_readers(self) -> None:
        end = len(self.region.order)
        for position, b in enumerate(self.region.order):
            reduces = isinstance(b.node.prim, primitive.Reduction)
            for k in b.keeps:
                self.last[id(k)] = end if reduces else max(position, self.last.get(id(k), 0))

    def _dying(self, b: Buffer, position: int) -> list[tuple[int, Any]]:
        """Scratch values whose last reader this node is, with their dtypes."""
        found = {
            self.where[id(k)]: k.node.aval.dtype
            for k in b.keeps
            if self.last[id(k)] == position and self.where[id(k)] >= self.first_scratch
        }
        return list(found.items())

    def _take(self, dtype: Any, reusable: list[tuple[int, Any]]) -> int:
        """A scratch value of ``dtype``: a dying operand, a free one, or a new one."""
        for value, have in reusable:
            if have == dtype:
                return value
        free = self.free.get(dtype)
        if free:
            return free.pop()
        self.scratch.append(dtype)
        return self.first_scratch + len(self.scratch) - 1

    def _read(self, b: Buffer, loose: tuple[str, ...]) -> int:
        """The number of operand ``b``, copied to contiguous scratch if it is a leaf of a ``loose`` layout.

        SIMD loops of inexact functions may round differently for other strides, and so would a value that was stored.
        """
        value = self.where[id(b)]
        if value >= self.first_output or self.layouts[value] not in loose:
            return value
        if value not in self.packed:
            self.scratch.append(b.node.aval.dtype)
            self.packed[value] = self.first_scratch + len(self.scratch) - 1
            self.labels.append("contiguous")
            self.steps.append((lambda x, out, copy=self.xp.copyto: copy(out, x), (value,), self.packed[value]))
        return self.packed[value]

    def _function(self, prim: primitive.Elementwise) -> Function:
        """``f(*operands, out=)``."""
        xp = self.xp
        if prim.ufunc is not None:
            return getattr(xp, prim.ufunc)
        return lambda *arrays, out: prim.impl(xp, out, *arrays)


def _may_overwrite(prim: primitive.Elementwise | None, dtype: Any) -> bool:
    """Whether its result may take the place of an operand.

    NumPy multiplies complex numbers otherwise then, and single halves: a value that is stored would have other bits.
    """
    plain = dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize > 2)
    return plain and prim is not None and prim.ufunc is not None


def _not_run(out: Any) -> None:
    """A draw, in a program that is only shown: on a CPU the numbers are stored."""
