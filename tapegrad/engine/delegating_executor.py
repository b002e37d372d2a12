"""Executors over the one in force: what they do not do themselves, that one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Executor
from tapegrad.core.state import during, thread
from tapegrad.engine.realize import announce

T = TypeVar("T")


def lowest() -> Executor:
    """The lowest executor of this thread: the one in force without those over it."""
    executor = thread.executor
    while isinstance(executor, DelegatingExecutor):
        executor = executor.below
    return executor


class DelegatingExecutor:
    """An executor over the one in force: what it does not do itself, that one does."""

    below: Executor
    """The executor in force without this one; set by :meth:`during`."""

    def during(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns, whose nodes this executor applies."""
        self.below = thread.executor
        return during(f, *args, executor=cast(Executor, self))

    def __getattr__(self, name: str) -> Any:
        if "below" not in vars(self):
            raise AttributeError(name)
        return getattr(self.below, name)

    def value(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """The value of a node that somebody records."""
        return self.below.run(node, inputs)

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application, recorded."""
        out = self.value(node, inputs) if thread.recorders else self.below.run(node, inputs)
        announce(node, inputs, out)
        return out

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""
