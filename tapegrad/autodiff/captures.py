"""Watched tensors that a function with a rule of its own uses although they are no arguments: worth a warning."""

from __future__ import annotations

import warnings

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call
from tapegrad.core.state import thread
from tapegrad.errors import CapturedTensorWarning
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


class Captures:
    """A recorder that finds watched tensors which the function uses although they are no arguments."""

    replaces_derivative = True
    """That the function's rule stands for its derivative, so its body may read values (see ``refuse_detaching``)."""

    def __init__(self, arguments: list[object]) -> None:
        self._outer = thread.recorders
        self._known = {x._buffer.node.index for x in arguments if isinstance(x, Tensor)}
        self._found: set[int] = set()

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note inputs from outside of the function; values that it makes itself are no captures."""
        for b in inputs:
            if b.node.index not in self._known and any(r.follows(b) for r in self._outer):
                self._found.add(b.node.index)
        self._known.add(node.index)

    def read(self, variable: Variable, value: Buffer) -> None:
        """Variables are no captures."""
        self._known.add(value.node.index)

    def follows(self, buffer: Buffer) -> bool:
        """False: it follows no value."""
        return False

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        for b in outputs:
            self.record(b.node, inputs, b)

    def warn(self, name: str) -> None:
        """Warn of the tensors that are used though they are no arguments."""
        if self._found:
            warnings.warn(
                f"custom_gradient: {name} uses {len(self._found)} watched tensor(s) that are not among its arguments; "
                "they get no gradient; pass them as arguments, or through stop_gradient to silence this",
                CapturedTensorWarning,
                stacklevel=3,
            )
