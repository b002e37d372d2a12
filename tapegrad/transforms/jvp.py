"""Forward mode: a recorder that pushes a tangent through each node as it is made, and keeps nothing else.

A tangent lives as long as its value does.  Tangents are computed under the recorders outside this one only, so that
nested differentiations do not confuse each other.
"""

from __future__ import annotations

import weakref
from typing import Any

from tapegrad.buffer import Buffer
from tapegrad.device.dtypes import is_inexact
from tapegrad.errors import NoGradientError
from tapegrad.node import Node, thread
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.shape import broadcast_to
from tapegrad.rule import OUT, Rule
from tapegrad.tensor import Tensor
from tapegrad.transforms.zeros import zeros_of


class Pusher:
    """A forward-mode recorder; enter it, :meth:`seed` inputs, run, ask :meth:`tangent` of results."""

    def __init__(self) -> None:
        self._tangents: weakref.WeakKeyDictionary[Buffer, Tensor] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Pusher:
        self._before = thread.recorders
        thread.recorders = (*self._before, self)
        return self

    def __exit__(self, *exc: object) -> None:
        thread.recorders = self._before

    def seed(self, x: Tensor, tangent: Tensor) -> None:
        """Let ``x`` have ``tangent`` (of its shape and dtype)."""
        self._tangents[x._buffer] = tangent

    def tangent(self, x: Tensor) -> Tensor | None:
        """The tangent of ``x``; None means zero."""
        return self._tangents.get(x._buffer)

    def follows(self, buffer: Buffer) -> bool:
        """Whether ``buffer``'s value has a tangent."""
        return buffer in self._tangents

    def carry(self, old: Buffer, new: Buffer) -> None:
        """``new`` is the same value under another name."""
        if old in self._tangents:
            self._tangents[new] = self._tangents[old]

    def read(self, variable: Any, value: Buffer) -> None:
        """A variable's tangent is that of its value, if it was given one."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Push the tangents of ``inputs`` through ``node``."""
        tangents = [self._tangents.get(b) for b in inputs]
        if all(t is None for t in tangents):
            return
        if not node.prim.differentiable:  # type: ignore[union-attr]
            if is_inexact(node.aval.dtype):
                raise NoGradientError(f"{node.prim.name}: has no forward-mode derivative")  # type: ignore[union-attr]
            return
        before = thread.recorders
        thread.recorders = before[: before.index(self)]
        try:
            pushed = _push(node, inputs, out, tangents)
        finally:
            thread.recorders = before
        if pushed is not None:
            self._tangents[out] = pushed

    def record_call(self, call: Any, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """Push tangents through a call by its own rule."""
        tangents = [self._tangents.get(b) for b in inputs]
        if all(t is None for t in tangents):
            return
        before = thread.recorders
        thread.recorders = before[: before.index(self)]
        try:
            pushed = call.pushforward(tangents)
        finally:
            thread.recorders = before
        for out, t in zip(outputs, pushed, strict=True):
            if t is not None:
                self._tangents[out] = t


def _push(node: Node, inputs: tuple[Buffer, ...], out: Buffer, tangents: list[Tensor | None]) -> Tensor | None:
    """The tangent of one node's value."""
    prim = node.prim
    assert prim is not None
    values: dict[int, Tensor] = {i: Tensor(b) for i, b in enumerate(inputs)}
    values[OUT] = Tensor(out)
    avals = [*[b.node.aval for b in inputs], node.aval]
    if prim.family == "linear":
        return _push_linear(node, inputs, tangents)
    total: Tensor | None = None
    for i, t in enumerate(tangents):
        if t is None:
            continue
        if prim.family == "bilinear":
            operands = [Tensor(b) for b in inputs]
            operands[i] = t
            term = barrier(prim, *operands, **node.params)
        else:
            rule = prim.jvp[i] if prim.jvp is not None else prim.rule(i) if prim.family == "elementwise" else None
            if rule is None:
                raise NoGradientError(f"{prim.name}: has no forward-mode derivative in operand {i}")
            term = _along(rule, t, values, avals, node, i)
        total = term if total is None else total + term
    if total is not None and total.shape != node.aval.shape:
        total = broadcast_to(total, node.aval.shape)
    return total


def _along(rule: Rule, t: Tensor, values: dict[int, Tensor], avals: list, node: Node, i: int) -> Tensor:
    if rule.constant is not None:
        if rule.constant == 0:
            return zeros_of(node.aval)
        return t if rule.constant == 1 else -t
    found = rule(t, values, avals, node.params, i)
    if node.prim.family == "elementwise" and not rule.seeded:  # type: ignore[union-attr]
        found = t * found
    return cast(found, node.aval.dtype)


def _push_linear(node: Node, inputs: tuple[Buffer, ...], tangents: list[Tensor | None]) -> Tensor | None:
    """A linear primitive applied to the tangents themselves."""
    prim = node.prim
    assert prim is not None
    if prim.variadic:
        filled = [t if t is not None else zeros_of(b.node.aval) for t, b in zip(tangents, inputs, strict=True)]
        return barrier(prim, *filled, **node.params)
    if tangents[0] is None:
        return None
    return barrier(prim, tangents[0], *[Tensor(b) for b in inputs[1:]], **node.params)
