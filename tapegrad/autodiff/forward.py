"""Forward mode: a recorder that pushes a tangent through each node as it is made, and keeps nothing else."""

from __future__ import annotations

from tapegrad.autodiff import derivative
from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.primitive import Elementwise, Linearity
from tapegrad.core.protocols import Call
from tapegrad.core.rule import OUT, Rule
from tapegrad.core.state import during
from tapegrad.device.dtypes import is_inexact
from tapegrad.errors import NoGradientError
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.tensor import Tensor


class Tangents(Pusher):
    """Forward mode: the companion of a value is its tangent (of its shape and dtype; None means zero)."""

    def _push(
        self, node: Node, inputs: tuple[Buffer, ...], out: Buffer, companions: list[Tensor | None]
    ) -> Tensor | None:
        prim = node.prim
        if not prim.differentiable:
            if is_inexact(node.aval.dtype):
                raise NoGradientError(f"{prim.name}: has no forward-mode derivative")
            return None
        return during(self.outside, _push, node, inputs, out, companions, autocasts=())

    def joins(self, node: Node) -> bool:
        """Others push the tangents that they have through it, and wait for this process."""
        return node.prim.effect is not None and node.aval.smooth

    def _push_call(
        self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...], companions: list[Tensor | None]
    ) -> list[Tensor | None]:
        assert call.pushforward is not None
        return during(self.outside, call.pushforward, companions, autocasts=())


def _push(node: Node, inputs: tuple[Buffer, ...], out: Buffer, tangents: list[Tensor | None]) -> Tensor | None:
    """The tangent of one node's value."""
    prim = node.prim
    if prim.effect is not None:
        tangents = [zeros_of(b.node.aval) if t is None else t for t, b in zip(tangents, inputs, strict=True)]
    values: dict[int, Tensor] = {i: Tensor(b) for i, b in enumerate(inputs)}
    values[OUT] = Tensor(out)
    avals = [*[b.node.aval for b in inputs], node.aval]
    if prim.is_linear:
        return _push_linear(node, inputs, tangents)
    total: Tensor | None = None
    term: Tensor | None
    for i, t in enumerate(tangents):
        if t is None:
            continue
        if prim.linearity is Linearity.EACH:
            operands = [Tensor(b) for b in inputs]
            operands[i] = t
            term = barrier(prim, *operands, **node.params)
        else:
            rule = prim.jvp[i] if prim.jvp is not None else prim.rule(i) if isinstance(prim, Elementwise) else None
            if rule is None:
                raise NoGradientError(f"{prim.name}: has no forward-mode derivative in operand {i}")
            term = _along(rule, t, values, avals, node, i)
            if term is None:
                continue
        total = term if total is None else total + term
    if total is not None and total.shape != node.aval.shape:
        total = broadcast_to(total, node.aval.shape)
    return total


def _along(
    rule: Rule, t: Tensor, values: dict[int, Tensor], avals: list[ShapedArray], node: Node, i: int
) -> Tensor | None:
    if rule.constant is not None:
        if rule.constant == 0:
            return zeros_of(node.aval)
        return t if rule.constant == 1 else -t
    term = derivative.apply(node.prim, rule, i, t, values, avals, node.params)
    return None if term is None else cast(term, node.aval.dtype)


def _push_linear(node: Node, inputs: tuple[Buffer, ...], tangents: list[Tensor | None]) -> Tensor | None:
    """A linear primitive applied to the tangents themselves."""
    prim = node.prim
    if prim.linearity is Linearity.ALL:
        filled = [t if t is not None else zeros_of(b.node.aval) for t, b in zip(tangents, inputs, strict=True)]
        return barrier(prim, *filled, **node.params)
    if tangents[0] is None:
        return None
    return barrier(prim, tangents[0], *[Tensor(b) for b in inputs[1:]], **node.params)
