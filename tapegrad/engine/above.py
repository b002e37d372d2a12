"""Executors over the one in force: what they do not do themselves, that one does."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from tapegrad.core import state
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Executor as Protocol
from tapegrad.core.protocols import Steps
from tapegrad.core.state import thread
from tapegrad.device import Device
from tapegrad.device.types import Array
from tapegrad.engine.evaluate import announce

T = TypeVar("T")


def lowest() -> Protocol:
    """The lowest executor of this thread: the one in force without those over it."""
    executor = state.thread.executor
    while isinstance(executor, Above):
        executor = executor.below
    return executor


class Above:
    """An executor over the one in force: what it does not do itself, that one does."""

    _outer: Protocol | None = None

    def during(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns, whose nodes this executor applies."""
        self._outer = state.own_executor()
        return state.executed(f, *args, by=self)

    @property
    def below(self) -> Protocol:
        """The executor in force without this one."""
        return self._outer or state.below()

    def value(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """The value of a node that somebody records."""
        return self.below.run(node, inputs)

    def elementwise(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application, recorded."""
        out = self.value(node, inputs) if thread.recorders else self.below.run(node, inputs)
        announce(node, inputs, out)
        return out

    apply = elementwise

    def run(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """The value of a node; nobody is told."""
        return self.below.run(node, inputs, into)

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers in one kernel."""
        self.below.kernel(targets)

    def do(self, work: Any) -> list[Any]:
        """The arrays that ``work`` writes."""
        return self.below.do(work)

    def values(self, work: Any) -> list[Buffer]:
        """Values without a recipe, which ``work`` yields."""
        return self.below.values(work)

    @property
    def changes(self) -> bool:
        """Whether arrays may be changed in place."""
        return self.below.changes

    def change(self, work: Any) -> None:
        """Do ``work``, which writes into arrays that there are."""
        self.below.change(work)

    def device(self, device: Device) -> Device:
        """What stands for ``device``."""
        return self.below.device(device)

    def pull(self, steps: Steps, ct: Any, residuals: Sequence[Buffer]) -> Sequence[Any] | None:
        """Cotangents of what a node read."""
        return self.below.pull(steps, ct, residuals)

    def in_earnest(self, f: Callable[[], T], otherwise: T) -> T:
        """What ``f()`` returns, or ``otherwise`` in a dry run."""
        return self.below.in_earnest(f, otherwise)

    def happened(self, f: Callable[[], object]) -> None:
        """Call ``f``, or nothing in a dry run."""
        self.below.happened(f)

    def decided(self, f: Callable[[], T], otherwise: T) -> T:
        """A decision that depends on values."""
        return self.below.decided(f, otherwise)

    def index(self, t: Any) -> Any:
        """An integer tensor as an index."""
        return self.below.index(t)

    def number(self, f: Callable[[], Any]) -> Any:
        """A number that ``f()`` returns."""
        return self.below.number(f)

    def on_values(self, f: Callable[..., object], *arrays: Array) -> bool:
        """Call ``f`` on arrays that have values."""
        return self.below.on_values(f, *arrays)

    def differentiable(self, node: Node) -> None:
        """A walk begins at ``node``.  Raises DryRunError where a dry run may not ask for that."""
        self.below.differentiable(node)

    @property
    def constants(self) -> MutableMapping[Any, Buffer]:
        """Shared constants made so far."""
        return self.below.constants

    @property
    def operands(self) -> Any:
        """Copies of the arrays that users have passed as operands."""
        return self.below.operands

    def phantom(self, array: Array, node: Node) -> Array:
        """``array``, the value of ``node``, which a dry run did not compute."""
        return self.below.phantom(array, node)

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""
