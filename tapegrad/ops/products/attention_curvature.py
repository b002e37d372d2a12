"""Attention and its second derivatives, written in tensors: here scores of size queries x keys are stored.

With A the weights as far as they depend on scores (0 in the rows of queries that may look nowhere), P the weights, D
what dropout multiplies them with, S' the scores' tangent and m the row sums of A S', the derivative is
``(D A (S' - m)) v + (D P) v'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from tapegrad.core.primitive import REGISTRY
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics.attention_cut import Weighting
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.elementwise.arithmetic import maximum
from tapegrad.ops.elementwise.comparison import greater, greater_equal, less
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.products.products import matmul
from tapegrad.ops.reduce.reductions import any as any_
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.rows.softmax import softmax
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, reshape, sum_to
from tapegrad.tensor import Tensor

Q, K, V, MASK = range(4)
_LEAST = -1e30
"""Below any score: in place of -inf, from which no derivative comes back."""


class _Whole:
    """Attention with all scores there: (..., g, r, t, s), where each of g heads of keys serves r of queries."""

    def __init__(self, operands: Sequence[Tensor], how: Weighting, key: int, counter: int) -> None:
        self.operands, self.how, self.stream = operands, how, (key, counter)
        self.wide = accumulator(operands[Q].dtype)
        self.groups = operands[K].shape[-2]
        self.q, self.k, self.v = (self.heads(i, operands[i]) for i in (Q, K, V))

    def heads(self, i: int, x: Tensor) -> Tensor:
        """Operand number ``i``, its tangent, or (as Q) the result: with the heads in front, split in groups."""
        x = cast(x, self.wide)
        if i == MASK:
            heads = (1, 1) if x.shape[-3] == 1 else (self.groups, x.shape[-3] // self.groups)
            return reshape(x, (*x.shape[:-3], *heads, *x.shape[-2:]))
        x = moveaxis(x, -2, -3)
        own = (self.groups, x.shape[-3] // self.groups if self.groups else 1, *x.shape[-2:])
        return reshape(x, (*x.shape[:-3], *own))

    def back(self, i: int, x: Tensor) -> Tensor:
        """What has the axes of :meth:`heads`, or broadcasts to more, as operand ``i`` (or the result) lies."""
        like = self.operands[i]
        if i == MASK:
            x = reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))
            return cast(sum_to(x, like.shape), like.dtype)
        if i != Q:
            x = sum(x, axis=-3, keepdims=True)
        x = reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))
        return cast(moveaxis(x, -3, -2), like.dtype)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """P and A."""
        x = matmul(self.q * self.how.scale, self.k.mT)
        seen = self._seen(x)
        if self.how.masked == "add":
            added = self.heads(MASK, self.operands[MASK])
            x = x + maximum(added, _LEAST)
            alone = greater(added, _LEAST)
            seen = alone if seen is None else seen & alone
        if seen is None:
            p = softmax(x, axis=-1)
            return p, p
        p = softmax(where(seen, x, _LEAST), axis=-1)
        some = where(any_(broadcast_to(seen, x.shape), axis=-1, keepdims=True), p, 0)
        return (some if self.how.blind == "zero" else p), some

    def _seen(self, x: Tensor) -> Tensor | None:
        """Which keys a query may see, numbers to add aside; None: all."""
        t, s = x.shape[-2:]
        seen = None
        if self.how.causal:
            places = arange(max(t, s), device=x.device)
            seen = greater_equal(expand_dims(places[:t], axis=1), places[:s])
        if self.how.masked == "see":
            mask = self.operands[MASK]
            heads = (1, 1) if mask.shape[-3] == 1 else (self.groups, mask.shape[-3] // self.groups)
            mask = reshape(mask, (*mask.shape[:-3], *heads, *mask.shape[-2:]))
            seen = mask if seen is None else seen & mask
        return seen

    def dropped(self, x: Tensor) -> Tensor:
        """``D x``: the weights that dropout leaves, multiplied."""
        how = self.how
        if not how.p:
            return x
        key, counter = self.stream
        shape = (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
        drawn = barrier(REGISTRY["random_bits16"], key=key, counter=counter, shape=shape, device=x.device)
        if how.threshold >= 65536:
            return x * how.inflation
        return where(reshape(less(drawn, how.threshold), x.shape), x * how.inflation, 0)

    def scores(self, tangents: Mapping[int, Tensor]) -> Tensor:
        """The scores' tangent."""
        terms = []
        if Q in tangents:
            terms.append(matmul(self.heads(Q, tangents[Q]) * self.how.scale, self.k.mT))
        if K in tangents:
            terms.append(matmul(self.q * self.how.scale, self.heads(K, tangents[K]).mT))
        if MASK in tangents:
            terms.append(self.heads(MASK, tangents[MASK]))
        total = self.weights[1] * 0 if not terms else terms[0]
        for term in terms[1:]:
            total = total + term
        return broadcast_to(total, self.weights[1].shape)


def _row_sums(x: Tensor) -> Tensor:
    return sum(x, axis=-1, keepdims=True)


def value(operands: Sequence[Tensor], how: Weighting, key: int, counter: int) -> Tensor:
    """Attention itself."""
    whole = _Whole(operands, how, key, counter)
    return whole.back(Q, matmul(whole.dropped(whole.weights[0]), whole.v))


def gradient(
    operands: Sequence[Tensor], g: Tensor, tangents: Mapping[int, Tensor], wanted: Sequence[int], how: Weighting,
    key: int, counter: int,
) -> dict[int, Tensor]:  # fmt: skip
    """The gradient in the operands ``wanted`` of ``<g, J a>``, with J the derivative and a the ``tangents``."""
    if not wanted:
        return {}
    whole = _Whole(operands, how, key, counter)
    _, a = whole.weights
    ct = whole.heads(Q, g)
    s = whole.scores(tangents)
    centred = s - _row_sums(a * s)
    back = whole.dropped(matmul(ct, whole.v.mT))
    total = _row_sums(a * back)
    x = back * centred - total * s
    if V in tangents:
        x = x + whole.dropped(matmul(ct, whole.heads(V, tangents[V]).mT))
    in_scores = a * (x - _row_sums(a * x))
    in_tangent = a * (back - total)
    scale, found = how.scale, {}
    for i in wanted:
        if i == V:
            d = matmul(whole.dropped(a * centred).mT, ct)
        elif i == MASK:
            d = in_scores
        else:
            to, other, turned = (whole.k, K, lambda m: m) if i == Q else (whole.q, Q, lambda m: m.mT)
            d = matmul(turned(in_scores), to)
            if other in tangents:
                d = d + matmul(turned(in_tangent), whole.heads(other, tangents[other]))
            d = d * scale
        found[i] = whole.back(i, d)
    return found


def along(
    operands: Sequence[Tensor], a: Mapping[int, Tensor], b: Mapping[int, Tensor], how: Weighting, key: int, counter: int
) -> Tensor:
    """The second derivative along the tangents ``a`` and ``b`` of operands."""
    whole = _Whole(operands, how, key, counter)
    _, weights = whole.weights
    of_a, of_b = whole.scores(a), whole.scores(b)
    centred = of_a - _row_sums(weights * of_a)
    by_a, by_b = weights * centred, weights * (of_b - _row_sums(weights * of_b))
    both = by_b * centred - weights * _row_sums(by_b * of_a)
    for x, y in ((a, b), (b, a)):
        if Q in x and K in y:
            s = matmul(whole.heads(Q, x[Q]) * how.scale, whole.heads(K, y[K]).mT)
            both = both + weights * (s - _row_sums(weights * s))
    result = matmul(whole.dropped(both), whole.v)
    for moved, values in ((by_a, b), (by_b, a)):
        if V in values:
            result = result + matmul(whole.dropped(moved), whole.heads(V, values[V]))
    return whole.back(Q, result)
