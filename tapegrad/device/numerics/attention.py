"""Attention on the CPU, block by block: the scores of some queries with all keys they may see lie in a core's cache.

Nothing of size queries x keys is ever stored: the derivatives compute the scores of a block again (Dao et al., arXiv
2205.14135).  Other than there a block holds whole rows, so that no running maximum is needed.  The cut depends on
shapes alone, and sums over blocks have a fixed order, so no bit depends on the number of threads.

The statistics of a row, (..., h, t, 2), are its largest score and 1 over the sum of ``exp(score - largest)``: both,
since of large scores (of a query behind a mask of -1e9, say) the logarithm of their sum rounds to the largest alone.  A
query that may look nowhere has -inf, and what each of its weights is: 0, or of a mean 1 over the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from tapegrad.core.aval import Shape
from tapegrad.device import threads
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import bits, blas
from tapegrad.device.numerics.attention_cut import Cut, Part, Weighting, lengths, of_part
from tapegrad.device.types import Array


class Heads:
    """The operands as matrices of heads: q (n, g, r, t, k), k (n, g, s, k), v (n, g, s, w), mask (n, g, r, t, s)."""

    def __init__(self, q: Array, k: Array, v: Array, mask: Array, how: Weighting) -> None:
        self.how = how
        self.wide = accumulator(q.dtype)
        self.groups = k.shape[-2]
        self.q = self.by_queries(q)
        self.k, self.v = self.by_keys(k), self.by_keys(v)
        n, g, r, t, _ = self.q.shape
        self.shape = (n, g, r, t, self.k.shape[2])
        self._cut = Cut.of(self.shape, how)
        self.mask = None if how.masked == "none" else self.masks(mask, q.shape[:-3])
        self.hidden = ~self.mask if self.mask is not None and how.masked == "see" else None

    def by_queries(self, x: Array) -> Array:
        """(..., t, heads, k) as (n, groups, heads of a group, t, k): a view where the axes in front join."""
        *lead, t, h, k = x.shape
        return x.reshape(prod(lead), t, self.groups, h // self.groups, k).transpose(0, 2, 3, 1, 4)

    def by_keys(self, x: Array) -> Array:
        """(..., s, groups, k) as (n, groups, s, k), in the dtype to compute in."""
        *lead, s, g, k = x.shape
        return x.reshape(prod(lead), s, g, k).transpose(0, 2, 1, 3).astype(self.wide, copy=False)

    def statistics(self, stats: Array) -> Array:
        """(..., h, t, 2) as (n, groups, heads of a group, t, 2): a view."""
        *lead, h, t, _ = stats.shape
        return stats.reshape(prod(lead), self.groups, h // self.groups, t, 2)

    def masks(self, mask: Array, lead: Shape) -> Array:
        """(..., h or 1, t or 1, s or 1) in five axes, of which those of length 1 broadcast."""
        *own, h, t, s = shape = _spread(mask.shape, lead)
        heads = (1, 1) if h == 1 else (self.groups, h // self.groups)
        whole = mask if mask.shape == shape else np.broadcast_to(mask, shape)
        return whole.reshape(prod(own), *heads, t, s)

    def families(self) -> list[tuple[slice, slice]]:
        """Examples and groups of each family."""
        return self._cut.families(self.shape)

    def parts(self, family: tuple[slice, slice]) -> list[Part]:
        """The blocks of a family."""
        return self._cut.parts(self.shape, family)

    def blocks(self) -> list[Part]:
        """Those of all families."""
        return [part for family in self.families() for part in self.parts(family)]


class Scratch:
    """What one thread computes in; arrays of a block are views of it."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._memory: dict[str, Array] = {}
        self._family: dict[str, tuple[slice, slice]] = {}

    def array(self, name: str, shape: Shape) -> Array:
        """An uninitialised array; the one of that name from before is gone."""
        size = prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, self._heads.wide)
        return memory[:size].reshape(shape)

    def copied(self, name: str, x: Array, part: Part, factor: float | None = None) -> Array:
        """The rows of ``x`` (n, g, r, t, k) in a block, times ``factor``: (n, g, rows, k)."""
        block = x[part[:4]]
        a, b, c, d, k = block.shape
        copy = self.array(name, (a, b, c, d, k))
        if factor is None:
            np.copyto(copy, block, casting="same_kind")
        else:
            np.multiply(block, copy.dtype.type(factor), out=copy)
        return copy.reshape(a, b, c * d, k)

    def turned(self, name: str, x: Array, part: Part) -> Array:
        """The keys that a block sees of ``x`` (n, g, s, k), as columns (n, g, k, s) that lie in order.

        Products with them are faster.  They are copied once for all blocks of a family in a row.
        """
        block = x[part.n, part.g].swapaxes(-1, -2)
        copy = self.array(name, block.shape)
        if self._family.get(name) != part[:2]:
            np.copyto(copy, block)
            self._family[name] = part[:2]
        return copy[..., : part.seen]

    def multiply(self, x: Array, y: Array, out: Array) -> None:
        """``x @ y``, of which tensor cores would round the operands if TF32 is allowed."""
        if self._heads.how.tf32 and out.dtype == np.float32:
            x, y = blas.in_tf32(x), blas.in_tf32(y)
        np.matmul(x, y, out=out)

    def weights(
        self, q: Array, part: Part, stats: Array | None = None, known: bool = False
    ) -> tuple[Array, Array, Array | None]:
        """Of a block: ``exp(score - largest)`` (n, g, rows, s), 1 over the sum of each row, and the blind rows.

        ``q``: the queries of the block, scaled.  ``stats`` (n, g, r, t, 2): where statistics of rows lie that are
        ``known``, or are put.
        """
        heads = self._heads
        a, b, c, d = lengths(part)
        x = self.array("scores", (a, b, c * d, part.seen))
        self.multiply(q, self.turned("keys", heads.k, part), x)
        self._hide(x.reshape(a, b, c, d, part.seen), part)
        rows = x.reshape(-1, part.seen)
        if known:
            assert stats is not None
            own = stats[part[:4]].reshape(-1, 2)
            blind = self._exponentials(rows, own[:, :1])
            return x, own[:, 1].reshape(a, b, c * d, 1), blind
        # On short rows this takes less than half of a reduction's time.
        most = np.take(rows.reshape(-1), np.argmax(rows, axis=-1) + _starts(len(rows), part.seen))[:, None]
        blind = self._exponentials(rows, most)
        total = np.einsum("ij->i", rows) if part.seen <= 4096 else np.add.reduce(rows, axis=-1)
        inverse = 1 / total if blind is None else np.divide(1, total, out=np.zeros_like(total), where=total != 0)
        if stats is not None:
            own = stats[part[:4]]
            own[..., 0], own[..., 1] = most.reshape(a, b, c, d), inverse.reshape(a, b, c, d)
        return x, inverse.reshape(a, b, c * d, 1), blind

    def _exponentials(self, rows: Array, most: Array) -> Array | None:
        """Make scores ``exp(score - largest)``; ``most``: their largest.  Which rows are blind; None: no row is."""
        none = most[:, 0] == -np.inf
        blind = none if none.any() else None
        if blind is not None:
            most = np.where(blind[:, None], most.dtype.type(0), most)
            if self._heads.how.blind == "mean":
                rows[blind] = 0
        with np.errstate(invalid="ignore"):  # of infinite scores
            np.subtract(rows, most, out=rows)
        np.exp(rows, out=rows)
        return blind

    def _hide(self, x: Array, part: Part) -> None:
        """Make the scores of a block (n, g, r, t, s) -inf where a query must not look, or add the mask's numbers."""
        heads = self._heads
        if heads.hidden is not None:
            np.copyto(x, -np.inf, where=of_part(heads.hidden, part))
        elif heads.mask is not None:
            np.add(x, of_part(heads.mask, part), out=x, casting="same_kind")
        if heads.how.causal and part.seen > part.t.start + 1:
            here = x[..., part.t.start :]
            np.copyto(here, -np.inf, where=_later(*here.shape[-2:]))

    def kept(self, part: Part, key: int, counter: int) -> Array:
        """Which weights of a block are kept (n, g, rows, s): as in the mask that nn.functional.dropout would draw."""
        (_, g, r, t, s), (a, b, c, d) = self._heads.shape, lengths(part)
        drawn = np.empty((a, b, c, d, s), np.uint16)
        first = ((part.n.start * g + part.g.start) * r + part.r.start) * t + part.t.start
        if d == t:  # of several heads or examples a block has all that lies between them
            drawn[...] = self._bits(key, counter, first * s, drawn.shape)
        else:
            for i, j, k in np.ndindex(a, b, c):
                start = first + ((i * g + j) * r + k) * t
                drawn[i, j, k] = self._bits(key, counter, start * s, (d, s))
        return (drawn < self._heads.how.threshold).reshape(a, b, c * d, s)[..., : part.seen]

    @staticmethod
    def _bits(key: int, counter: int, start: int, shape: Shape) -> Array:
        return bits.bits16_between(key, counter, start, start + prod(shape)).reshape(shape)


@lru_cache(maxsize=64)
def _starts(rows: int, width: int) -> Array:
    """Where each row of a matrix begins."""
    return np.arange(0, rows * width, width)


@lru_cache(maxsize=16)
def _later(queries: int, keys: int) -> Array:
    """Which keys come after a query, where the first of both are at the same place."""
    return np.arange(keys) > np.arange(queries)[:, None]


def _each(heads: Heads, tasks: Sequence[Any], body: Callable[[Scratch, Any], None], together: bool = True) -> None:
    """``body(scratch, task)`` for each task, spread over threads; not ``together``: one after the other."""
    count = min(threads.get_num_threads(), len(tasks)) if together else min(1, len(tasks))

    def worker() -> Callable[[int], None]:
        scratch = Scratch(heads)
        return lambda number: body(scratch, tasks[number])

    if count:
        with blas.one_thread():
            threads.run([worker() for _ in range(count)], len(tasks))


def nothing(out: Array, k: Array, *more: Array) -> bool:
    """Whether there is nothing to sum: no result, no keys, or no cotangent.  ``out`` is 0 then."""
    if out.size and k.shape[-3] and all(x.size for x in more):
        return False
    if out.size:
        out.fill(0)
    return True


def forward(
    q: Array, k: Array, v: Array, mask: Array, out: Array, how: Weighting, key: int, counter: int,
    stats: Array | None = None,
) -> None:  # fmt: skip
    """``softmax(q k' scale) v`` of each head; (..., t, h, k), (..., s, g, k), (..., s, g, w) -> (..., t, h, w).

    ``stats``: where the statistics of rows are put.
    """
    if nothing(out, k):
        if stats is not None:
            statistics(q, k, mask, stats, how)
        return
    heads = Heads(q, k, v, mask, how)
    result, own = heads.by_queries(out), None if stats is None else heads.statistics(stats)

    def body(scratch: Scratch, part: Part) -> None:
        x, inverse, _ = scratch.weights(scratch.copied("q", heads.q, part, how.scale), part, own)
        if how.p:
            np.multiply(x, scratch.kept(part, key, counter), out=x)
            inverse *= inverse.dtype.type(how.inflation)
        _deliver(scratch, x, heads.v, inverse, part, result)

    _each(heads, heads.blocks(), body)


def statistics(q: Array, k: Array, mask: Array, stats: Array, how: Weighting) -> None:
    """Those of rows alone: the bits that :func:`forward` puts there."""
    if nothing(stats, k):
        return
    heads = Heads(q, k, k, mask, how)
    own = heads.statistics(stats)

    def body(scratch: Scratch, part: Part) -> None:
        scratch.weights(scratch.copied("q", heads.q, part, how.scale), part, own)

    _each(heads, heads.blocks(), body)


def _deliver(scratch: Scratch, x: Array, v: Array, factor: Array | float, part: Part, result: Array) -> None:
    """``x @ v * factor`` of a block into the result (n, g, r, t, w); ``factor``: a number, or one for each row."""
    a, b, c, d = lengths(part)
    y = scratch.array("result", (a, b, c * d, v.shape[-1]))
    scratch.multiply(x, v[part.n, part.g, : part.seen], y)
    by_rows = y.dtype.type(factor) if isinstance(factor, float) else factor.reshape(a, b, c, d, 1)
    np.multiply(y.reshape(a, b, c, d, -1), by_rows, out=result[part[:4]], casting="same_kind")


def tangent(
    q: Array, k: Array, v: Array, mask: Array, t: Array, out: Array, how: Weighting, key: int, counter: int, of: int
) -> None:
    """The derivative of :func:`forward` along ``t``, a tangent of operand number ``of``: 0 q, 1 k, 3 mask."""
    if nothing(out, k):
        return
    heads = Heads(q, k, v, mask, how)
    result = heads.by_queries(out)
    along = heads.by_queries(t) if of == 0 else heads.by_keys(t) if of == 1 else heads.masks(t, q.shape[:-3])

    def body(scratch: Scratch, part: Part) -> None:
        queries = scratch.copied("q", heads.q, part, how.scale)
        x, inverse, blind = scratch.weights(queries, part)
        np.multiply(x, inverse, out=x)
        y = scratch.array("tangents", x.shape)
        if of == 3:
            five = (*lengths(part), part.seen)
            np.copyto(y.reshape(five), of_part(along, part), casting="same_kind")
        elif of == 1:
            scratch.multiply(queries, along[part.n, part.g, : part.seen].swapaxes(-1, -2), y)
        else:
            tangents = scratch.copied("t", along, part, how.scale)
            scratch.multiply(tangents, heads.k[part.n, part.g, : part.seen].swapaxes(-1, -2), y)
        np.subtract(y, _row_dots(x, y)[..., None], out=y)
        np.multiply(x, y, out=x)
        if blind is not None:
            x.reshape(-1, part.seen)[blind] = 0
        if how.p:
            np.multiply(x, scratch.kept(part, key, counter), out=x)
        _deliver(scratch, x, heads.v, how.inflation if how.p else 1.0, part, result)

    _each(heads, heads.blocks(), body)


def slices(shapes: Sequence[Shape], wanted: Sequence[int]) -> dict[int, slice]:
    """Where the cotangents of the operands ``wanted`` lie, one after the other, in one array."""
    found, start = {}, 0
    for i in wanted:
        found[i] = slice(start, start + prod(shapes[i]))
        start = found[i].stop
    return found


def backward(
    q: Array, k: Array, v: Array, mask: Array, g: Array, out: Array, how: Weighting, key: int, counter: int,
    wanted: Sequence[int], known: tuple[Array, Array] | None = None,
) -> None:  # fmt: skip
    """The cotangents of the operands ``wanted`` (0 q, 1 k, 2 v, 3 mask) for the result's cotangent ``g``.

    They lie one after the other in ``out``.  ``known``: the result and the statistics of rows; None: they are computed.
    """
    if nothing(out, k, g):
        return
    if known is None:
        known = np.empty(g.shape, g.dtype), np.empty(statistics_shape(q.shape), accumulator(q.dtype))
        forward(q, k, v, mask, known[0], how, key, counter, known[1])
    out.fill(0)  # where sums are taken
    heads = Heads(q, k, v, mask, how)
    shapes = [a.shape for a in (q, k, v, mask)]
    found = {i: out[where].reshape(shapes[i]) for i, where in slices(shapes, wanted).items()}
    if heads.wide != out.dtype:
        sums = {i: np.zeros(a.shape, heads.wide) for i, a in found.items() if i}
    else:
        sums = {i: a for i, a in found.items() if i}
    spread = np.zeros(_spread(mask.shape, q.shape[:-3]), heads.wide) if 3 in sums else None
    to_k, to_v = (heads.by_keys(sums[i]) if i in sums else None for i in (1, 2))
    to_mask = None if spread is None else heads.masks(spread, q.shape[:-3])
    to_q = heads.by_queries(found[0]) if 0 in found else None
    result, stats = heads.by_queries(known[0]), heads.statistics(known[1])
    task = _Back(heads, heads.by_queries(g), result, stats, (key, counter), to_q, to_k, to_v, to_mask)
    # A mask that broadcasts gathers sums of several families, in order.
    _each(heads, heads.families(), task.family, together=task.mask is None)
    if spread is not None:
        axes = tuple(i for i, (n, m) in enumerate(zip(spread.shape, mask.shape)) if n != m)
        np.add.reduce(spread, axis=axes, keepdims=True, out=sums[3])
    for i, total in sums.items():
        if total is not found[i]:
            np.copyto(found[i], total, casting="same_kind")


def _spread(mask: Shape, lead: Shape) -> Shape:
    """The shape of a mask with all axes in front, unless all of them have length 1."""
    return mask if all(n == 1 for n in mask[:-3]) else (*lead, *mask[-3:])


@dataclass(frozen=True)
class _Back:
    """Cotangents of families of heads; ``q``, ``k``, ``v``, ``mask``: where they go, None: nobody asks."""

    heads: Heads
    g: Array
    result: Array
    stats: Array
    stream: tuple[int, int]
    q: Array | None
    k: Array | None
    v: Array | None
    mask: Array | None

    def family(self, scratch: Scratch, family: tuple[slice, slice]) -> None:
        """Those of one family, block by block: at first the last one, which sees all keys and so need not add."""
        for i, part in enumerate(reversed(self.heads.parts(family))):
            self._part(scratch, part, first=i == 0)

    def _part(self, scratch: Scratch, part: Part, first: bool) -> None:
        heads, how = self.heads, self.heads.how
        queries = scratch.copied("q", heads.q, part, how.scale)
        g = scratch.copied("g", self.g, part)
        x, inverse, blind = scratch.weights(queries, part, self.stats, known=True)
        np.multiply(g, inverse, out=g)  # in place of the weights, which are wider
        kept = scratch.kept(part, *self.stream) if how.p else None
        y = scratch.array("tangents", x.shape)
        if self.v is not None:
            self._add(scratch, self.v, _dropped(x, kept, how, y), g, part, first)
        if self.q is None and self.k is None and self.mask is None:
            return
        scratch.multiply(g, scratch.turned("values", heads.v, part), y)
        _dropped(y, kept, how, y)
        np.subtract(y, self._means(x, y, g, inverse, part), out=y)
        np.multiply(x, y, out=y)
        if blind is not None:
            y.reshape(-1, part.seen)[blind] = 0
        if self.q is not None:
            _deliver(scratch, y, heads.k, how.scale, part, self.q)
        if self.k is not None:
            self._add(scratch, self.k, y, queries, part, first)
        if self.mask is not None:
            self._gather(y.reshape(*lengths(part), part.seen), part)

    def _means(self, x: Array, y: Array, g: Array, inverse: Array, part: Part) -> Array:
        """The mean of the cotangents ``y`` of each row's weights (n, g, rows, 1).

        It is the inner product of ``g`` and the result, which are as wide as values, not as many as keys; but a result
        in a half type is rounded.
        """
        if self.result.dtype != g.dtype:
            return _row_dots(x, y)[..., None] * inverse
        rows = self.result[part[:4]]
        return np.einsum("abcdw,abcdw->abcd", g.reshape(rows.shape), rows).reshape(*g.shape[:-1], 1)

    @staticmethod
    def _add(scratch: Scratch, total: Array, x: Array, rows: Array, part: Part, first: bool) -> None:
        """Add ``x' rows`` to the sums of the keys that the block sees, which are 0 before the ``first`` block."""
        to = total[part.n, part.g, : part.seen]
        if first:
            scratch.multiply(x.swapaxes(-1, -2), rows, to)
        else:
            more = scratch.array("sum", to.shape)
            scratch.multiply(x.swapaxes(-1, -2), rows, more)
            np.add(to, more, out=to)

    def _gather(self, x: Array, part: Part) -> None:
        """Add the cotangents of scores (n, g, r, t, s) to those of the mask's numbers."""
        assert self.mask is not None
        to = of_part(self.mask, part)
        axes = tuple(i for i, n in enumerate(to.shape) if n == 1)
        np.add(to, np.add.reduce(x, axis=axes, keepdims=True) if axes else x, out=to)


def _row_dots(x: Array, y: Array) -> Array:
    """The inner products of the rows of two C-contiguous arrays."""
    flat = (-1, x.shape[-1]) if x.size else (prod(x.shape[:-1]), x.shape[-1])
    return np.einsum("ij,ij->i", x.reshape(flat), y.reshape(flat)).reshape(x.shape[:-1])


def _dropped(x: Array, kept: Array | None, how: Weighting, out: Array) -> Array:
    """``x`` with the weights that are not kept 0, and the others multiplied."""
    if kept is None:
        return x
    np.multiply(x, kept, out=out)
    return np.multiply(out, out.dtype.type(how.inflation), out=out)


def statistics_shape(q: Shape) -> Shape:
    """(..., h, t, 2), of the statistics of the rows of queries (..., t, h, k)."""
    *lead, t, h, _ = q
    return (*lead, h, t, 2)


def elements(shapes: Sequence[Shape], wanted: Sequence[int]) -> int:
    """How many numbers the cotangents of the operands ``wanted`` have together."""
    return sum(prod(shapes[i]) for i in wanted)


_ARRAYS = {
    "forward": (1, (1, 1), (1, 0)),
    "tangent": (2, (2, 1), (1, 0)),
    "backward": (2, (2, 1), (1, 1)),
}
"""What a thread computes in: of a block, arrays of scores, of rows as wide as keys and values; of a family, keys and
values as columns.  (Sums of keys or values, as wide as the wider, in the derivative alone.)"""


def scratch_bytes(q: Shape, k: Shape, v: Shape, itemsize: int, how: Weighting, work: str) -> int:
    """What the blocks of all threads take, at most, in the ``"forward"``, ``"tangent"`` or ``"backward"`` work."""
    (*lead, t, h, width), (s, g, features) = q, v[-3:]
    shape = (prod(lead), g, h // g if g else 0, t, s)
    if not prod(shape):
        return 0
    cut = Cut.of(shape, how)
    scores, (as_keys, as_values), (keys, values) = _ARRAYS[work]
    seen = min(s, t) if cut.causal else s
    block = cut.n * cut.g * cut.r * cut.t * (scores * seen + as_keys * width + as_values * features)
    columns = keys * width + values * features + (max(width, features) if work == "backward" else 0)
    families = -(-shape[0] // cut.n) * -(-g // cut.g)
    tasks = families if work == "backward" else families * -(-shape[2] // cut.r) * -(-t // cut.t)
    return min(threads.get_num_threads(), tasks) * itemsize * (block + cut.n * cut.g * s * columns)
