"""Recorders that compute, for each value as it is made, a companion: its tangent, or its values for a whole batch.

A companion lives as long as its value does.  Companions are computed under the recorders outside this one only, so
nested transformations do not confuse each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.buffer import Buffer
from tapegrad.node import Node, thread
from tapegrad.tensor import Tensor


class _Listener:
    """A recorder that follows nothing: with it, who keeps a budget learns how companions are made."""

    strict = False

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Nothing to note."""

    def read(self, variable: Any, value: Buffer) -> None:
        """Nothing to note."""

    def follows(self, buffer: Buffer) -> bool:
        """It follows nothing."""
        return False

    def record_call(self, call: Any, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """Nothing to note."""


LISTENER = _Listener()


class Pusher:
    """A recorder that keeps a companion of each value; enter it, :meth:`seed` inputs, run, ask :meth:`pushed`."""

    strict = True

    def __init__(self) -> None:
        self._pushed: weakref.WeakKeyDictionary[Buffer, Tensor] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Pusher:
        self._before = thread.recorders
        thread.recorders = (*self._before, self)
        return self

    def __exit__(self, *exc: object) -> None:
        thread.recorders = self._before

    @contextmanager
    def outside(self) -> Iterator[tuple[Any, ...]]:
        """A block that only the recorders outside this one are told of; gives them."""
        before = thread.recorders
        recorders = before[: before.index(self)] if self in before else self._before
        outer = tuple([r for r in recorders if r is not LISTENER])
        thread.recorders = outer if outer or _buffer.keeper is None else (LISTENER,)
        try:
            yield outer
        finally:
            thread.recorders = before

    def seed(self, x: Tensor, companion: Tensor) -> None:
        """Let ``x`` have ``companion``."""
        self._give(x._buffer, companion)

    def _give(self, buffer: Buffer, companion: Tensor) -> None:
        self.accompany(buffer, companion)
        if (keeper := _buffer.keeper) is not None:
            keeper.accompanied(buffer)

    def accompany(self, buffer: Buffer, companion: Tensor) -> None:
        """Let ``buffer`` have ``companion``; whoever makes values again knows."""
        self._pushed[buffer] = companion

    def pushed(self, x: Tensor) -> Tensor | None:
        """The companion of ``x``; None: it depends on nothing seeded."""
        return self._pushed.get(x._buffer)

    def follows(self, buffer: Buffer) -> bool:
        """Whether ``buffer``'s value has a companion."""
        return buffer in self._pushed

    def carry(self, old: Buffer, new: Buffer) -> None:
        """``new`` is the same value under another name."""
        if old in self._pushed:
            self._give(new, self._pushed[old])

    def read(self, variable: Any, value: Buffer) -> None:
        """A variable's companion is that of its value, if it was given one."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Push the companions of ``inputs`` through ``node``."""
        companions = [self._pushed.get(b) for b in inputs]
        if all(c is None for c in companions):
            return
        found = self._push(node, inputs, out, companions)
        if found is not None:
            self._give(out, found)

    def record_call(self, call: Any, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """Push companions through a call by its own rule."""
        companions = [self._pushed.get(b) for b in inputs]
        if all(c is None for c in companions):
            return
        for out, found in zip(outputs, self._push_call(call, inputs, outputs, companions), strict=True):
            if found is not None:
                self._give(out, found)

    def _push(
        self, node: Node, inputs: tuple[Buffer, ...], out: Buffer, companions: list[Tensor | None]
    ) -> Tensor | None:
        raise TypeError(f"{type(self).__name__} pushes nothing through a node")

    def _push_call(
        self, call: Any, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...], companions: list[Tensor | None]
    ) -> list[Tensor | None]:
        raise TypeError(f"{type(self).__name__} pushes nothing through a call")
