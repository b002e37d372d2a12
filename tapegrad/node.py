"""Nodes, and who is told about them.

The one idea: a **node** is a recipe: a primitive, its inputs, its parameters.  A **buffer** is a cache of what the
recipe yields.  Losing a buffer costs time, never truth.  Fusing, freeing, checkpointing, evicting and offloading are
all answers to one question: *which values get to keep a buffer?*

Who names a recipe's inputs?  Whoever may still need them, and nobody else:

* a pending (lazy, not yet evaluated) buffer names them as buffers, whose bytes it thereby keeps;
* a tape's record names them as nodes (a few bytes each) and keeps the buffers its rules have declared;
* a finished value that no tape has recorded has forgotten its inputs.  So a tensor carried from step to step never
  carries its history along.

Corner cases, one answer each.  An index grows with every node, so index order is a topological order, and sorting
replaces every search.  A view is a node whose buffer owns no bytes and keeps its base's buffer.  A constant, an input
and a variable's value are nodes without a primitive.  Nothing here is ever changed after it is made.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from tapegrad.aval import ShapedArray
    from tapegrad.buffer import Buffer
    from tapegrad.primitive import Primitive, Site

    Run = Callable[["Node", tuple[Buffer, ...]], Buffer]

next_index = itertools.count(1).__next__


class Node:
    """One application of a primitive: ``prim`` with ``params`` yielded a value of ``aval``.

    ``site``: of an elementwise primitive, what is known of it for operands of these avals.
    """

    __slots__ = ("aval", "index", "params", "prim", "site")

    def __init__(
        self, prim: Primitive | None, params: dict[str, Any], aval: ShapedArray, site: Site | None = None
    ) -> None:
        self.prim = prim
        self.params = params
        self.aval = aval
        self.site = site
        self.index = next_index()

    def __repr__(self) -> str:
        return f"%{self.index}:{self.aval!r} = {self.prim.name if self.prim else 'leaf'}"


NO_PARAMS: dict[str, Any] = {}


SHARED: dict[str, Any] = {"shared": True}
"""The parameters of a leaf in memory that others can write to."""


def leaf(aval: ShapedArray, shared: bool = False) -> Node:
    """A value without a recipe: an input, a constant, a variable's content; ``shared``: in memory of the user's."""
    return Node(None, SHARED if shared else NO_PARAMS, aval)


class Recorder(Protocol):
    """Whoever is told of every node made in its thread: a tape, a forward-mode walk, a checkpoint's look-out."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied to ``inputs``; its value is, or will be, in ``out``."""

    def read(self, variable: Any, value: Buffer) -> None:
        """``variable`` was read; ``value`` is its present value."""

    def follows(self, buffer: Buffer) -> bool:
        """Whether what happens to ``buffer``'s value matters to it."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """A function with a derivative of its own was called; what it did inside was recorded apart, or not at all."""


class Call(Protocol):
    """A function call that enters a tape as one record: a custom gradient, a checkpoint.

    This protocol is how a checkpoint is entered without the tape knowing what a checkpoint is.
    """

    name: str
    again: Callable[[list[Any]], list[Any]] | None
    """While the call is recorded: the same function called on other inputs, recorded; None: it cannot be."""

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """Cotangents of the inputs at the ``needed`` positions (None: not connected) from those of the outputs.

        None among ``cts`` stands for zeros; ``lead``: the length of one more leading axis of every cotangent.
        ``come``: what has come so far for other values, by node index; a call may take out what has come for its
        inputs and return sums with it.
        """


class Runner(Protocol):
    """Who gives nodes their values in a checkpointed run: one that notes values, or one that has noted them."""

    def run(self, node: Node, inputs: tuple[Buffer, ...], run: Run) -> Buffer:
        """The value of ``node``: of ``run``, the engine's way, or one that was there before."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""


class _Thread(threading.local):
    """What is going on in this thread."""

    recorders: tuple[Recorder, ...] = ()
    """Told of every node, outermost first."""
    hidden: tuple[Recorder, ...] = ()
    """Those that are not told of what happens at the moment, though it belongs to what they record."""
    walks: int = 0
    """Gradient walks under way."""
    deferring: Any = None
    """While a gradient walk runs: its list of reductions that wait to share a kernel."""
    guards: tuple[Any, ...] = ()
    """Those for whom values are one example of many (see ``transforms/batching.py``): asked before one is looked at."""
    runner: Runner | None = None
    """Asked, where something records, to apply nodes in the engine's stead."""


thread = _Thread()
