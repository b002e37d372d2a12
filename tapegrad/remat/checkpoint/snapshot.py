"""Snapshots: what a rerun that starts in the middle of a loop needs, kept in memory or on disk.

That is the loop's state, the contents of the cells (variables, generators) that the loop has changed by then, and the
state of the host's generators if the loop draws from them.  Values that come back from disk keep their nodes: they are
the same values to every tape.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell
from tapegrad.core.node import Node, leaf
from tapegrad.engine.realize import array_of
from tapegrad.remat.budget.manager import MANAGER
from tapegrad.remat.checkpoint.rerun_tape import snapshot
from tapegrad.remat.offload.tiers import Disk
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.device.types import Array
    from tapegrad.remat.checkpoint.loop_forward import Walk

_TOO_SMALL = 512  # bytes: not worth a file


@dataclass
class Position:
    """A place in a loop, to run on from."""

    state: Any = None
    cells: dict[Cell, Any] = field(default_factory=dict)
    """Contents of the cells that differ from those at the beginning of the loop."""
    random: tuple[Any, ...] | None = None
    """State of the host's generators, if it matters."""

    def copied(self) -> Position:
        """The same place; containers and foreign arrays are new, because steps may change them."""
        return Position(snapshot(self.state), dict(self.cells), self.random)


class Snapshot:
    """A position kept; on ``disk`` if there is one.

    One in memory, but not the first, is a last resort of a budget: when it has been dropped, the steps from the one
    before it in the ``walk`` are run again.  Not so where other processes take part in the steps, which do not run them
    again: ``effects`` are their operations, as far as they are known.
    """

    def __init__(
        self, step: int, position: Position, disk: Disk | None, walk: Walk, effects: Sequence[Node] = ()
    ) -> None:
        position = position.copied()
        self._step, self._walk, self._effects = step, weakref.ref(walk), effects
        self._resort = step > 0 and disk is None
        if self._resort:
            MANAGER.last_resorts.add(self)
        self._slots: dict[int, _OnDisk] = {}
        if disk is not None:
            position.state = nest.map_leaves(lambda x: self._put(x, disk), position.state)
            position.cells = {cell: self._put(content, disk) for cell, content in position.cells.items()}
        self._position: Position | None = position

    @property
    def is_droppable(self) -> bool:
        """Whether a budget may drop it."""
        return self._resort and not self._effects

    def drop(self) -> None:
        """Let go of the position."""
        self._resort, self._position = False, None

    @property
    def dropped(self) -> bool:
        """Whether the position is gone."""
        return self._position is None

    def buffers(self) -> list[Buffer]:
        """The values of the state that are kept in memory."""
        here = self._position
        return [] if here is None else [x._buffer for x in nest.flatten(here.state) if isinstance(x, Tensor)]

    def contents(self) -> list[Buffer]:
        """The contents of variables that are kept in memory."""
        here = self._position
        return [] if here is None else [x for x in here.cells.values() if isinstance(x, Buffer)]

    def moved(self) -> list[_OnDisk]:
        """What is kept on disk."""
        return list(self._slots.values())

    def price(self) -> float:
        """Steps to be run again, for each byte."""
        walk = self._walk()
        others = [] if walk is None else list(walk.kept.items())
        before = max((i for i, x in others if i < self._step and not x.dropped), default=0)
        return (self._step - before) / max(1, sum(b.node.aval.nbytes for b in (*self.buffers(), *self.contents())))

    def _put(self, x: Any, disk: Disk) -> Any:
        """What stands for a value while its bytes are on disk."""
        buffer = x._buffer if isinstance(x, Tensor) else x
        if not isinstance(buffer, Buffer) or buffer.node.aval.nbytes < _TOO_SMALL:
            return x
        index = buffer.node.index
        if index not in self._slots:
            order = _dense_order(array_of(buffer))
            if order is None:
                return x
            self._slots[index] = _OnDisk(buffer, order, disk)
        return _Place(index, isinstance(x, Tensor))

    def position(self) -> Position | None:
        """The place, read from disk if it is there; None: dropped."""
        here = self._position
        if here is None:
            return None
        buffers: dict[int, Buffer] = {}

        def get(x: Any) -> Any:
            if not isinstance(x, _Place):
                return x
            if x.index not in buffers:
                buffers[x.index] = self._slots[x.index].get()
            return Tensor(buffers[x.index]) if x.is_tensor else buffers[x.index]

        kept = here.copied()
        cells = {cell: get(content) for cell, content in kept.cells.items()}
        return Position(nest.map_leaves(get, kept.state), cells, kept.random)


@dataclass(frozen=True)
class _Place:
    """Stands for a value on disk."""

    index: int
    is_tensor: bool


class _OnDisk:
    """One value's bytes; its place on disk is free again when this is gone."""

    def __init__(self, buffer: Buffer, order: tuple[int, ...], disk: Disk) -> None:
        self.node: Node = buffer.node
        self._back = tuple(order.index(i) for i in range(len(order)))
        array: Any = array_of(buffer).transpose(order)
        aval = self.node.aval.with_shape(array.shape)
        self._slot = disk.put(Buffer(array, leaf(aval), base=buffer.root()))

    def get(self) -> Buffer:
        """The value in memory, laid out as it was: what reads it must round as before."""
        return Buffer(self._slot.get().transpose(self._back), self.node)


def _dense_order(array: Array) -> tuple[int, ...] | None:
    """The order of axes in which the array is contiguous; None if it has gaps."""
    order = tuple(sorted(range(array.ndim), key=lambda i: -abs(array.strides[i])))
    return order if array.transpose(order).flags.c_contiguous else None
