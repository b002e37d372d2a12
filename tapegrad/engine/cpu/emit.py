"""A region's program: the steps that evaluate one tile, and the scratch they need.

A program is a pure function of the region's structure, so it is made once and kept.  Values are numbered: leaves first,
then outputs, scratch and constants.  A step applies a primitive, or a ufunc of its formula, to numbered values and
writes another.  Interiors live in scratch that is reused as soon as its last reader has run; most ufuncs may write over
an operand that dies with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tapegrad.core import primitive
from tapegrad.core.buffer import Buffer
from tapegrad.core.rule import Function
from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native.steps import CONTIGUOUS
from tapegrad.engine.cpu.trace import Line, trace
from tapegrad.engine.region import Region
from tapegrad.engine.task import Silenced

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
    constants: tuple[Array, ...] = ()
    """Arrays without axes."""
    lasting: frozenset[int] = frozenset()
    """Which scratch values are reduced: they last until the tile's end."""


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
                tuple(map(number.__getitem__, map(id, b.inputs))),
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


class _Op(NamedTuple):
    """One step to be: a function of values by their keys, and how its operands have to lie (``loose``: not so)."""

    f: Callable[..., Any]
    reads: tuple[Hashable, ...]
    key: Hashable
    dtype: Any
    label: str
    loose: tuple[str, ...]
    overwrites: bool
    """Whether the result may take the place of an operand."""


class _Emitter:
    """Walks a region once, assigning values to leaves, outputs, scratch and constants."""

    def __init__(self, region: Region, layouts: list[str], targets: list[Buffer], xp: Any) -> None:
        self.region, self.xp = region, xp
        self.layouts = layouts
        self.where: dict[Hashable, int] = {id(b): i for i, b in enumerate(region.leaves)}
        self.dtypes: dict[Hashable, Any] = {id(b): b.node.aval.dtype for b in region.leaves}
        self.first_output = len(region.leaves)
        self.output: dict[Hashable, int] = {id(b): self.first_output + i for i, b in enumerate(targets)}
        self.first_scratch = self.first_output + len(targets)
        self.scratch: list[Any] = []
        self.constants: list[Any] = []
        self.free: dict[Any, list[int]] = {}
        self.steps: list[tuple[Function, tuple[int, ...], int]] = []
        self.labels: list[str] = []
        self.packed: dict[int, int] = {}

    def emit(self) -> Program:
        ops = [op for b in self.region.order for op in self._ops(b)]
        last = {key: position for position, op in enumerate(ops) for key in op.reads}
        reductions = [(b, prim) for b in self.region.order if isinstance(prim := b.node.prim, primitive.Reduction)]
        last.update((id(b.inputs[0]), len(ops)) for b, _ in reductions)  # stays where it is until the tile's end
        for position, op in enumerate(ops):
            operands = tuple(self._read(key, op.loose) for key in op.reads)
            dying = {
                self.where[key]: self.dtypes[key]
                for key in op.reads
                if last[key] == position and self.where[key] >= self.first_scratch
            }
            self.dtypes[op.key] = op.dtype
            result = self.output.get(op.key)
            if result is None:
                result = self._take(op.dtype, dying if op.overwrites else {})
            self.where[op.key] = result
            self.steps.append((op.f, operands, result))
            self.labels.append(op.label)
            for value, dtype in dying.items():
                if value != result:
                    self.free.setdefault(dtype, []).append(value)
        reduced = tuple(self._reduction(*pair) for pair in reductions)
        first_constant = self.first_scratch + len(self.scratch)
        number = lambda i: i if i >= 0 else first_constant + ~i
        steps = tuple((f, tuple(map(number, operands)), result) for f, operands, result in self.steps)
        names, outputs = tuple(b.node.prim.name for b in self.region.order), self.first_scratch - self.first_output
        labels, constants = tuple(self.labels), tuple(self.constants)
        lasting = frozenset(r.source - self.first_scratch for r in reduced if r.source >= self.first_scratch)
        return Program(steps, tuple(self.scratch), reduced, names, labels, outputs, constants, lasting)

    def _ops(self, b: Buffer) -> Iterator[_Op]:
        """What computes a value of the region: of a formula each step, else one op; of a reduction nothing."""
        prim, dtype, reads = b.node.prim, b.node.aval.dtype, tuple(map(id, b.inputs))
        if isinstance(prim, primitive.Reduction):
            return
        if not isinstance(prim, primitive.Elementwise):
            yield _Op(_not_run, reads, id(b), dtype, prim.name, (), False)
            return
        # SIMD loops of inexact functions may round differently for other strides, and so would a value that was stored.
        loose = () if prim.exact else (STRIDED,)
        lines = self._lines(prim, b)
        if not lines:
            yield _Op(self._function(prim), reads, id(b), dtype, prim.name, loose, _may_overwrite(prim.ufunc, dtype))
            return
        keys: list[Hashable] = list(reads)
        for i, line in enumerate(lines):
            key: Hashable = id(b) if i == len(lines) - 1 else (id(b), i)
            keys.append(key)
            if isinstance(line, Line):
                read = tuple(keys[k] for k in line.reads)
                overwrites = _may_overwrite(line.ufunc, line.dtype)
                yield _Op(Silenced(line.ufunc), read, key, line.dtype, line.ufunc.__name__, loose, overwrites)
            else:
                self.where[key] = ~len(self.constants)
                self.dtypes[key] = line.dtype
                self.constants.append(line)

    def _lines(self, prim: primitive.Elementwise, b: Buffer) -> tuple[Line | Array, ...]:
        """The steps of a primitive's formula; none if it has no formula, or is computed in another dtype."""
        dtypes = tuple(k.node.aval.dtype for k in b.inputs)
        if prim.formula is None or not (prim.exact or all(accumulator(dtype) == dtype for dtype in dtypes)):
            return ()
        return trace(prim.formula, dtypes)

    def _reduction(self, b: Buffer, prim: primitive.Reduction) -> Reduction:
        dtype = accumulator(b.node.params.get("dtype") or b.node.aval.dtype)
        operand = self._read(id(b.inputs[0]), (STRIDED, SCALAR))
        return Reduction(prim.ufunc, operand, self.output[id(b)] - self.first_output, dtype)

    def _take(self, dtype: Any, reusable: dict[int, Any]) -> int:
        """A scratch value of ``dtype``: a dying operand, a free one, or a new one."""
        for value, have in reusable.items():
            if have == dtype:
                return value
        free = self.free.get(dtype)
        if free:
            return free.pop()
        self.scratch.append(dtype)
        return self.first_scratch + len(self.scratch) - 1

    def _read(self, key: Hashable, loose: tuple[str, ...]) -> int:
        """The number of an operand, copied to contiguous scratch if it is a leaf of a ``loose`` layout."""
        value = self.where[key]
        if not 0 <= value < self.first_output or self.layouts[value] not in loose:
            return value
        if value not in self.packed:
            self.scratch.append(self.dtypes[key])
            self.packed[value] = self.first_scratch + len(self.scratch) - 1
            self.labels.append(CONTIGUOUS)
            self.steps.append((lambda x, out, copy=self.xp.copyto: copy(out, x), (value,), self.packed[value]))
        return self.packed[value]

    def _function(self, prim: primitive.Elementwise) -> Function:
        """``f(*operands, out=)``."""
        xp = self.xp
        if prim.ufunc is not None:
            return getattr(xp, prim.ufunc)
        return lambda *arrays, out: prim.impl(xp, out, *arrays)


def _may_overwrite(ufunc: object, dtype: Any) -> bool:
    """Whether the result of a ufunc (None: it is none) may take the place of an operand.

    NumPy multiplies complex numbers otherwise then, and single halves: a value that is stored would have other bits.
    """
    return ufunc is not None and (dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize > 2))


def _not_run(out: Any) -> None:
    """A draw, in a program that is only shown: on a CPU the numbers are stored."""
