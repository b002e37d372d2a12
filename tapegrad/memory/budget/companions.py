"""Companions of dropped values: the tangent, or the batch, that a value had comes back with it.

What a value's companion is depends on where it was made: an operation pushes one, a rule of the user's gives another, a
value that was detached has none.  So it is not worked out again but remembered: who keeps a value for a tape remembers
the recipe of each companion that it has.  A companion may have companions in turn, of the recorders outside its own.

A recorder of companions that is gone is forgotten, and what it has given; recipes know nothing of companions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from tapegrad.autodiff.companions import Pusher
from tapegrad.core.buffer import Buffer
from tapegrad.core.state import thread
from tapegrad.memory.budget.recipes import Graph, Kept, Recipe
from tapegrad.tensor import Tensor


class Companion:
    """How to get a companion: ``source`` is its recipe, or its buffer if it has none; and its own companions."""

    __slots__ = ("companions", "source")

    def __init__(self, source: Recipe | Buffer, companions: Companions) -> None:
        self.source = source
        self.companions = companions


Companions = weakref.WeakKeyDictionary[Pusher, Companion]


def pushers() -> list[Pusher]:
    """Who gives companions in this thread, outermost first."""
    return [r for r in thread.recorders if isinstance(r, Pusher)]


def companions_of(graph: Graph, buffer: Buffer, givers: list[Pusher]) -> Companions:
    """The companions that a value has now."""
    companions: Companions = weakref.WeakKeyDictionary()
    for i, p in enumerate(givers):
        companion = p.pushed(Tensor(buffer))
        if companion is not None:
            its = companion._buffer
            companions[p] = Companion(graph.recipes.get(its.node.index) or its, companions_of(graph, its, givers[:i]))
    return companions


def remember(graph: Graph, kept: Kept, buffer: Buffer, givers: list[Pusher]) -> None:
    """What tapes keep of ``buffer`` brings back its present companions, too."""
    companions = companions_of(graph, buffer, givers)
    if kept.companions is None:
        kept.companions = companions
    else:
        kept.companions.update(companions)


def wanted(buffer: Buffer | None, companions: Companions | None, givers: list[Pusher]) -> Iterator[Companion]:
    """The companions that ``buffer`` lacks (all, if it is not there), and theirs."""
    for p in givers:
        companion = None if companions is None else companions.get(p)
        if companion is not None and (buffer is None or not p.follows(buffer)):
            yield companion
            yield from wanted(None, companion.companions, givers)


def give(buffer: Buffer, companions: Companions | None, givers: list[Pusher], made: dict[int, Buffer]) -> None:
    """Give ``buffer`` the companions that it lacks; ``made``: their buffers, by node index, or they have one."""
    for p in givers:
        companion = None if companions is None else companions.get(p)
        if companion is not None and not p.follows(buffer):
            source = companion.source
            its = made[source.node.index] if type(source) is Recipe else source
            give(its, companion.companions, givers, made)
            p.accompany(buffer, Tensor(its))
