"""Regions, and THE cost rule: which values get a buffer, and when.

A region is the run of pending elementwise nodes of one shape that one kernel evaluates.  The rule, with its reasons:

1. *Small arrays run at once*: below ``SMALL`` float64 elements (twice as many of 4 bytes or fewer), that is 1 MiB.
   Such values stay in a core's cache, so storing them costs less time than planning a kernel and computing an interior
   once more in the gradient.  Measured with ``bench/sizes.py`` and ``bench/overhead.py --threshold``.  On a GPU nothing
   runs at once: a launch costs as much as planning.
2. *A value read by broadcasting is stored*: it is smaller than what reads it, and recomputing it would repeat the work
   for every row.
3. *A region stays below* ``MAX_NODES`` *nodes and* ``MAX_LEAVES`` *arrays*; a longer chain is cut and keeps one array a
   cut.  On a GPU that bounds registers and compile time; in backward, how often an interior is recomputed.
4. *Pending inputs that nobody else holds may not hold more than* ``MAX_EXCLUSIVE`` *times the bytes of the value they
   stand for*: a running sum of big arrays is cut every few terms instead of keeping them all.
5. *A reduction runs when it is recorded*, with the region it reduces as its prologue.  Where something waits on
   purpose (a gradient walk, the composites of ``ops.reduce.reductions``), reductions of one region share a kernel, and
   on a GPU what is computed from their results alone is the kernel's epilogue.
6. *On a CPU a costly function is worth its bytes*: if its kernel runs and something held elsewhere (a rule's residual)
   is made from its value, that value is stored, too.  Costly is what a declaration calls so: ten times as slow, in
   float32 and in float64, as writing the value and reading it back.  Measured by ``bench/cost.py``, ns an element of
   float32 / float64: write and read 0.4 / 0.8; exp 0.5 / 0.9, erf 1.6 / 4.1, but erfc 4.0 / 9.8, hypot 3.8 / 18,
   remainder 8.8 / 8.9, logaddexp 20 / 21.  (Erf called costly made a step of four transformer blocks 2 to 4% shorter
   and its peak 18% higher: not worth it.)  On a GPU all of these hide behind the traffic, and nothing is stored.
7. *Everything else is not stored*: an interior is recomputed, in registers or in a tile's scratch, by each kernel that
   needs it; for the sake of a derivative rule nothing else inside a region is ever stored.  Counted by
   ``bench/fusion.py`` for a transformer block, forward and gradient: 1.11 times the bytes of the lower bound, where
   PyTorch's eager kernels move 1.14 times, and a chain of operations saves one array where PyTorch saves one for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any
from weakref import ref

from tapegrad.core import buffer as buffers
from tapegrad.core import references
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.primitive import REGISTRY, Elementwise, Reduction
from tapegrad.device.types import Array

SMALL = 131072
MAX_NODES = 96
MAX_LEAVES = 16
MAX_EXCLUSIVE = 3
MAX_TOGETHER = 128
"""Nodes and arrays of targets that share a kernel: their addresses and strides must fit in 4 KiB of arguments."""

_SLIVER = 16
_LEAST_ROOT = 4096
"""Bytes.  A copy takes 512 at least, so copies of the rows of a smaller array would soon take more than it does."""


def set_small(elements: int) -> None:
    """Run arrays of fewer float64 ``elements`` at once (``SMALL``); for measurements and tests."""
    global SMALL
    SMALL = elements
    for prim in REGISTRY.values():
        if isinstance(prim, Elementwise):
            prim.memo.clear()


def is_sliver(view: Array, aval: ShapedArray, root: Buffer) -> bool:
    """Whether a view like ``aval`` is so small a piece of ``root`` that a copy is worth its bytes; it lies as that."""
    nbytes = root.node.aval.nbytes
    return _SLIVER * aval.nbytes <= nbytes >= _LEAST_ROOT and bool(view.flags.c_contiguous)


def runs_at_once(aval: ShapedArray) -> bool:
    """Rule 1.  Narrow dtypes count as 4 bytes, so that a mask is as lazy as what it is made of."""
    if aval.device.lazy:
        return False
    return aval.size * max(4, aval.dtype.itemsize) < 8 * SMALL


Span = tuple[Any, ...]
"""Of a pending buffer: bounds on the nodes and arrays that it needs, and if it is known the reach that it ended."""
Loop = tuple[tuple[int, ...], tuple[int, ...]]
LoopOf = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclass
class Region:
    """Pending buffers in the order of their nodes, the other buffers they read, and how often they read them.

    ``arrays``: those of the leaves, which are not evicted while the region has them (None: a leaf is ``evicted``).
    """

    order: list[Buffer]
    leaves: list[Buffer]
    reads: dict[int, int]
    arrays: list[Array]
    evicted: list[Buffer]

    @cached_property
    def late(self) -> set[int]:
        """Ids of its reductions and of what depends on them."""
        found: set[int] = set()
        for b in self.order:
            if isinstance(b.node.prim, Reduction):
                found.add(id(b))
            else:
                for k in b.inputs:
                    if id(k) in found:
                        found.add(id(b))
                        break
        return found

    def loop_of(self, target: Buffer) -> LoopOf:
        """The shape that evaluating ``target`` loops over, and the axes it reduces (None: it needs no reduction)."""
        if target.loop is None or id(target) not in self.late:  # its reductions may have been evaluated meanwhile
            return target.node.aval.shape, None
        return target.loop

    def exclusive_bytes(self) -> int:
        """Bytes of the leaves that only this region's pending buffers refer to."""
        counts = references.elsewhere(self.leaves)
        return sum([b.node.aval.nbytes for b, n in zip(self.leaves, counts) if n <= self.reads[id(b)]])


def viewed(view: Buffer) -> Buffer:
    """The value that a pending view shows whole."""
    while view.array is None and not view.state and view.node.prim.view:
        view = view.inputs[0]
    return view


_by_index, _ndim = attrgetter("node.index"), attrgetter("node.aval.ndim")


def collect(targets: Iterable[Buffer]) -> Region:
    """The pending buffers needed for ``targets``, the targets included; an evicted one that they read is a leaf."""
    order: list[Buffer] = []
    leaves: list[Buffer] = []
    arrays: list[Any] = []
    evicted: list[Buffer] = []
    reads: dict[int, int] = {}
    seen: set[int] = set()
    stack = list(targets)
    while stack:
        buffer = stack.pop()
        if buffer.array is not None or id(buffer) in seen:
            continue
        seen.add(id(buffer))
        order.append(buffer)
        for b in buffer.inputs:
            array = b.array
            if array is None and not b.state:
                stack.append(b)
            elif id(b) in reads:
                reads[id(b)] += 1
            else:
                reads[id(b)] = 1
                leaves.append(b)
                arrays.append(array)
                if array is None:
                    evicted.append(b)
    order.sort(key=_by_index)
    return Region(order, leaves, reads, arrays, evicted)


def admit(inputs: tuple[Buffer, ...], aval: ShapedArray) -> tuple[list[Buffer], Span, Loop | None]:
    """The cost rule for deferring a node of ``aval``: inputs to evaluate first, and its buffer's span and loop."""
    nodes, leaves, pending, grew = 1, 0, [], 0
    must = []
    loop, newest = None, 0
    reach: Reach | None = None
    for b in inputs:
        if b.loop is not None and aval.device.lazy:
            loop = _epilogue(inputs, aval)
            break
    for b in inputs:
        if b.array is not None:
            if b.node.aval.ndim:
                leaves += 1
                grew += 1
        elif b.node.aval.shape != aval.shape or b.loop != loop or b.state:
            must.append(b)
        else:
            pending.append(b)
            below = b.span or (0, 0)  # a pending buffer has one
            nodes += below[0]
            leaves += below[1]
            if len(below) > 2 and b.node.index > newest:
                reach, newest = below[2], b.node.index
    if reach is not None and (reach.at != buffers.fills or not reach.take_in(pending)):
        reach = None
    if pending and (nodes > MAX_NODES or (leaves > MAX_EXCLUSIVE and (grew or len(pending) > 1))):
        reach = reach or Reach(collect(pending))
        nodes, leaves = 1 + reach.nodes, reach.arrays + grew
        if nodes > MAX_NODES or leaves > MAX_LEAVES or reach.exclusive_bytes() > MAX_EXCLUSIVE * max(aval.nbytes, 1):
            return must + pending, (1, grew + len(pending)), None
    if reach is None or must:
        return must, (nodes, leaves), loop
    reach.grow(inputs)
    return must, (nodes, leaves, reach, reach.nodes), loop


class Reach:
    """What a walk from the last of a chain of pending values would reach; it grows with the chain.

    So for a value that is made of the last one only what it needs besides is walked through.  It keeps nothing alive.
    """

    __slots__ = ("_leaves", "_reads", "_within", "arrays", "at", "nodes")

    def __init__(self, region: Region) -> None:
        self.at = buffers.fills  # it holds only as long as none of them is evaluated
        self.nodes = len(region.order)
        self.arrays = sum(map(bool, map(_ndim, region.leaves)))
        self._within = set(map(id, region.order))  # others know of it themselves
        self._leaves = list(map(ref, region.leaves))
        self._reads = region.reads

    def take_in(self, pending: list[Buffer]) -> bool:
        """Add what ``pending`` need besides; False if the last of the chain is not among them."""
        for b in pending:
            if b.span is not None and len(b.span) > 2 and b.span[2] is self and b.span[3] == self.nodes:
                break
        else:
            return False
        stack = list(pending)
        while stack:
            b = stack.pop()
            if b.array is None and id(b) not in self._within and not (b.span and len(b.span) > 2 and b.span[2] is self):
                self._within.add(id(b))
                self.grow(b.inputs)
                stack += b.inputs
        return True

    def grow(self, inputs: tuple[Buffer, ...]) -> None:
        """One more value is made of ``inputs``."""
        self.nodes += 1
        for b in inputs:
            if b.array is None:
                continue
            if id(b) in self._reads:
                self._reads[id(b)] += 1
            else:
                self._reads[id(b)] = 1
                self._leaves.append(ref(b))
                self.arrays += b.node.aval.ndim > 0

    def exclusive_bytes(self) -> int:
        """As :meth:`Region.exclusive_bytes`."""
        leaves: Any = [weak() for weak in self._leaves]  # all alive: the chain is made from them
        return Region([], leaves, self._reads, [], []).exclusive_bytes()


def _epilogue(inputs: tuple[Buffer, ...], aval: ShapedArray) -> Loop | None:
    """The loop of the pending reductions from whose results the same kernel may compute this node, too.

    Only reductions that somebody has told to wait are pending.  All else that is read must be numbers, or lie as the
    results do.
    """
    loop = None
    for b in inputs:
        if b.array is not None:
            if b.node.aval.ndim and (b.node.aval.shape != aval.shape or not b.array.flags.c_contiguous):
                return None
        elif b.loop is None or b.node.aval.shape != aval.shape or (loop is not None and b.loop != loop):
            return None
        else:
            loop = b.loop
    return loop


@dataclass
class Stages:
    """A region's nodes by when they run: for each element; reductions; from their results.

    ``late``: ids of the reductions and of what depends on them.  A node that does not, but that only they read (its own
    reductions have been evaluated meanwhile), runs with them; one that both read runs twice.
    """

    loop: list[Buffer]
    totals: list[Buffer]
    epilogue: list[Buffer]
    late: set[int]

    def divide(self, targets: list[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
        """The targets of full size, and those that come of reductions."""
        return [b for b in targets if id(b) not in self.late], [b for b in targets if id(b) in self.late]


def with_results(region: Region, targets: list[Buffer]) -> list[Buffer]:
    """``targets``, and each result of a reduction that somebody outside refers to: else it would be reduced again."""
    late = region.late
    if not late:
        return targets
    more = late & _held(region) - set(map(id, targets))
    return [*targets, *[b for b in region.order if id(b) in more]] if more else targets


def _held(region: Region) -> set[int]:
    """Ids of the pending buffers that somebody outside the region refers to."""
    counts = references.elsewhere(region.order)  # before a local name refers to any of them
    readers: dict[int, int] = {}
    for b in region.order:
        for k in b.inputs:
            readers[id(k)] = readers.get(id(k), 0) + 1
    return {id(b) for b, count in zip(region.order, counts) if count > readers.get(id(b), 0)}


def with_costly(region: Region, targets: list[Buffer]) -> list[Buffer]:
    """Rule 6: ``targets``, and the costly values from which something that is held elsewhere is made."""
    if not any(_is_costly(b) for b in region.order):
        return targets
    done, wanted = set(map(id, targets)), _held(region)
    more = []
    for b in reversed(region.order):
        if id(b) in done or id(b) not in wanted:
            continue
        if _is_costly(b):
            more.append(b)
        else:
            wanted.update(id(k) for k in b.inputs)
    return [*targets, *more]


def _is_costly(b: Buffer) -> bool:
    return isinstance(b.node.prim, Elementwise) and b.node.prim.costly


def stages(region: Region, targets: list[Buffer]) -> Stages:
    """The nodes of ``region`` by stage, each in order."""
    late = region.late
    if not late:
        return Stages(region.order, [], [], late)
    totals = [b for b in region.order if isinstance(b.node.prim, Reduction)]
    after = [b for b in region.order if id(b) in late and not isinstance(b.node.prim, Reduction)]
    early = _read_by([k for b in totals for k in b.inputs] + [b for b in targets if id(b) not in late], late)
    beside = _read_by([k for b in after for k in b.inputs], late)
    beside.update(id(b) for b in after)
    return Stages(
        [b for b in region.order if id(b) in early], totals, [b for b in region.order if id(b) in beside], late
    )


def _read_by(buffers: list[Buffer], late: set[int]) -> set[int]:
    """Ids of the pending ones among ``buffers`` and of all that they are made from, but for what is ``late``."""
    found: set[int] = set()
    stack = list(buffers)
    while stack:
        b = stack.pop()
        if b.array is None and id(b) not in found and id(b) not in late:
            found.add(id(b))
            stack += b.inputs
    return found


def kernels(targets: list[Buffer]) -> list[list[Buffer]]:
    """Which targets share a kernel: those of one loop shape that share a pending node or a leaf.

    A kernel's reductions all run over the same axes, so that its loop order is one.
    """
    groups: list[tuple[LoopOf, set[int], list[Buffer]]] = []
    for target in sorted(targets, key=_by_index):
        region = collect([target])
        shape, axes = (target.node.aval.shape, None) if target.loop is None else region.loop_of(target)
        touched = set(map(id, region.order))
        for b in region.leaves:
            if b.node.aval.ndim:
                touched.add(id(b))
        joined: list[Buffer] = []
        rest = []
        for group in groups:
            key, ids, members = group
            fits = key[0] == shape and (axes is None or key[1] is None or key[1] == axes)
            if fits and not ids.isdisjoint(touched) and len(ids | touched) <= MAX_TOGETHER:
                touched |= ids
                axes = axes if axes is not None else key[1]
                joined += members
            else:
                rest.append(group)
        groups = [*rest, ((shape, axes), touched, [*joined, target])]
    return list(map(itemgetter(2), groups))
