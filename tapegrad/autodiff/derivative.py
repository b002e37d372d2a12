"""One derivative rule applied: what every direction of differentiation has in common."""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Elementwise, Primitive
from tapegrad.core.rule import Params, Rule
from tapegrad.device.dtypes import float32
from tapegrad.ops.dispatch import cast
from tapegrad.tensor import Tensor


def apply(
    prim: Primitive,
    rule: Rule,
    i: int,
    seed: Tensor,
    values: dict[int, Tensor],
    avals: list[ShapedArray],
    params: Params,
) -> Tensor:
    """What ``rule`` for operand ``i`` yields of a (co)tangent: a partial derivative times it, or what it says itself.

    Of half types in float32, rounded once: rounded after each operation, a rule would lose what cancels in it.
    """
    narrow = None
    if isinstance(prim, Elementwise) and prim.widens and seed._buffer.node.aval.narrow:
        narrow, seed = seed.dtype, _wide(seed)
        values = {slot: _wide(values[slot]) for slot in rule.slots}
        avals = [a.with_dtype(float32) if a.narrow else a for a in avals]
    g: Tensor = rule(seed, values, avals, params, i)
    if isinstance(prim, Elementwise) and not rule.seeded:
        g = seed * g
    return g if narrow is None else cast(g, narrow)


def _wide(x: Tensor) -> Tensor:
    return cast(x, float32) if x._buffer.node.aval.narrow else x
