"""Runs of a checkpointed function: what a run uses, how a rerun is recorded, and what of both is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad import nest
from tapegrad.buffer import Buffer
from tapegrad.device import is_array
from tapegrad.node import Call, Node, next_index
from tapegrad.tensor import Tensor, convert
from tapegrad.transforms.recording import Trace
from tapegrad.variable import Variable


class Lookout:
    """A recorder of one run: which values from outside does the function use, and which of them are watched outside?

    ``contents``: of each variable, the contents made in the run and read after that, in the order of reading.
    """

    def __init__(self, outer: Sequence[Any]) -> None:
        self.outer = outer
        self.start = next_index()
        self.used: dict[int, Buffer] = {}
        self.captured: dict[int, Buffer] = {}
        self.contents: dict[int, list[Buffer]] = {}

    def watched(self, buffer: Buffer) -> bool:
        """Whether a recorder outside follows the value."""
        return any(r.follows(buffer) for r in self.outer)

    def follows(self, buffer: Buffer) -> bool:
        """Whether the value comes from outside and is watched there."""
        return buffer.node.index < self.start and self.watched(buffer)

    def use(self, buffer: Buffer) -> None:
        """The function reads or returns the value."""
        index = buffer.node.index
        if index < self.start and index not in self.used:
            self.used[index] = buffer
            if self.watched(buffer):
                self.captured[index] = buffer

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note what an operation reads."""
        for b in inputs:
            self.use(b)

    def read(self, variable: Variable, value: Buffer) -> None:
        """Tapes outside watch variables read inside."""
        for r in self.outer:
            r.read(variable, value)
        if value.node.index > self.start:
            known = self.contents.setdefault(variable.construction_number, [])
            if not any(value is b for b in known):
                known.append(value)

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        for b in inputs:
            self.use(b)


class RerunTrace(Trace):
    """The tape of a rerun.  What it reads of a variable assigned inside stands for what the first run read there.

    ``places``: positions among the sources by (variable's number, how many such contents were read before).
    """

    def __init__(self, nodes: Sequence[Node], places: dict[tuple[int, int], int], start: int) -> None:
        super().__init__(nodes)
        self._places, self._start = places, start
        self._read: dict[int, list[int]] = {}

    def source(self, position: int) -> int:
        """The index of a source's node in this run."""
        return self._indices[position]

    def read(self, variable: Variable, value: Buffer) -> None:
        """A content made inside is a source, too."""
        index = value.node.index
        known = self._read.setdefault(variable.construction_number, [])
        if index > self._start and index not in known:
            position = self._places.get((variable.construction_number, len(known)))
            known.append(index)
            if position is not None:
                self._indices[position] = index
                self._tracked.add(index)


def results_of(y: Any, watch: Lookout) -> list[Any]:
    """The leaves of a run's results, variables read, tensors noted as used."""
    found = [convert(leaf) if isinstance(leaf, (Tensor, Variable)) else leaf for leaf in nest.flatten(y)]
    for leaf in found:
        if isinstance(leaf, Tensor):
            watch.use(leaf._buffer)
    return found


def alone(result: Any, start: int) -> Any:
    """A slice of an intermediate result, made after ``start``, copied so that the rest of it can go.

    Slices with gaps stay as they are: a copy lies otherwise in memory, and what reads it might round otherwise.
    """
    if not isinstance(result, Tensor):
        return result
    buffer, root = result._buffer, result._buffer.root()
    array: Any = buffer.array
    whole = root.node.aval.nbytes <= buffer.node.aval.nbytes or root.node.index < start
    if whole or not array.flags.c_contiguous:
        return result
    return Tensor(Buffer(array.copy(), buffer.node))


def snapshots(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Containers and foreign arrays copied, because they may change before, or in, the rerun; all else is itself."""
    return nest.map_leaves(_snapshot, args), nest.map_leaves(_snapshot, kwargs)


def _snapshot(leaf: Any) -> Any:
    """A copy of a foreign array, which may change before the rerun; anything else is itself."""
    return leaf.copy() if is_array(leaf) else leaf
