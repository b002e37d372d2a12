"""Recorders that compute, for each value as it is made, a companion: its tangent, or its values for a whole batch.

A companion lives as long as its value does.  Companions are computed under the recorders outside this one only, so
nested transformations do not confuse each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Recipes, Recorder
from tapegrad.core.state import during, thread
from tapegrad.tensor import Tensor, unwrapped

if TYPE_CHECKING:
    from tapegrad.variable import Variable

T = TypeVar("T")


class Listener:
    """A recorder that follows no value.  While it is there, a budget learns how companions are made."""

    strict = False

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Nothing to note."""

    def read(self, variable: Variable, value: Buffer) -> None:
        """Nothing to note."""

    def follows(self, buffer: Buffer) -> bool:
        """False: it follows no value."""
        return False

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """Nothing to note."""


LISTENER = Listener()


class Pusher:
    """A recorder that keeps a companion of each value: :meth:`seed` inputs, run :meth:`during`, ask :meth:`pushed`."""

    strict = True

    def __init__(self) -> None:
        self._pushed: weakref.WeakKeyDictionary[Buffer, Tensor] = weakref.WeakKeyDictionary()
        self._graph: Recipes | None = None

    def during(self, f: Callable[..., T], *args: object, **changes: Any) -> T:
        """Return what ``f(*args)`` returns, and push companions through it; ``changes``: of the thread's state."""
        self._before = thread.recorders
        outer, self._graph = self._graph, tracking.current.graph()  # so that companions may be evicted, too
        try:
            return during(unwrapped, f, *args, recorders=(*self._before, self), **changes)
        finally:
            self._graph = outer

    def outer(self) -> tuple[Recorder, ...]:
        """The recorders outside this one."""
        now = thread.recorders
        others = now[: now.index(self)] if self in now else self._before
        return tuple([r for r in others if r is not LISTENER]) if LISTENER in others else others

    def outside(self, f: Callable[..., T], *args: object) -> T:
        """What ``f(*args)`` returns, of which only the recorders outside this one are told."""
        return during(f, *args, recorders=self._told_outside())

    def _told_outside(self) -> tuple[Recorder, ...]:
        return self.outer() or (() if self._graph is None else (LISTENER,))

    def seed(self, x: Tensor, companion: Tensor) -> None:
        """Let ``x`` have ``companion``."""
        self._pushed[x._buffer] = companion

    def pushed(self, x: Tensor) -> Tensor | None:
        """The companion of ``x``; None: it depends on nothing seeded."""
        return self._pushed.get(x._buffer)

    def follows(self, buffer: Buffer) -> bool:
        """Whether ``buffer``'s value has a companion."""
        return buffer in self._pushed

    def carry(self, old: Buffer, new: Buffer) -> None:
        """``new`` has the same value as ``old``, and its companion."""
        if old in self._pushed:
            self._pushed[new] = self._pushed[old]

    def read(self, variable: Variable, value: Buffer) -> None:
        """A variable was read: its companion is that of its value, if there is one."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Push the companions of ``inputs`` through ``node``."""
        companions = [self._pushed.get(b) for b in inputs]
        if all(c is None for c in companions) and not self.joins(node):
            return
        companion = self._push(node, inputs, out, companions)
        if companion is not None:
            self._pushed[out] = companion

    def joins(self, node: Node) -> bool:
        """Whether a node is followed though no input has a companion: other processes may have one."""
        return False

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """Push companions through a call by its own rule."""
        companions = [self._pushed.get(b) for b in inputs]
        if all(c is None for c in companions):
            return
        for out, companion in zip(outputs, self._push_call(call, inputs, outputs, companions), strict=True):
            if companion is not None:
                self._pushed[out] = companion

    def _push(
        self, node: Node, inputs: tuple[Buffer, ...], out: Buffer, companions: list[Tensor | None]
    ) -> Tensor | None:
        raise TypeError(f"{type(self).__name__} pushes nothing through a node")

    def _push_call(
        self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...], companions: list[Tensor | None]
    ) -> list[Tensor | None]:
        raise TypeError(f"{type(self).__name__} pushes nothing through a call")
