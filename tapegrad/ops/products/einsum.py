"""Einstein summation, by products of pairs along a greedy path.

A pair is a batched matrix product of permuted views, or a broadcast multiplication if it sums over nothing; only the
diagonal of repeated indices needs primitives of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.core.primitive import Primitive, Sample, linear
from tapegrad.core.state import during
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.products.products import matmul
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.shape import permute_dims, reshape
from tapegrad.tensor import Tensor, TensorLike

Labels = tuple[int, ...]
Names = list[Hashable]
"""A label for each axis: a letter, or a number that the user gave."""


def _spec(labels: Labels) -> str:
    text = "".join(chr(ord("a") + i) for i in labels)
    return f"{text}->{''.join(dict.fromkeys(text))}"


def _infer_diagonal(x: ShapedArray, *, labels: Labels) -> ShapedArray:
    return x.with_shape(tuple(x.shape[labels.index(i)] for i in dict.fromkeys(labels)))


diagonal_p = linear(
    "einsum_diagonal",
    impl=lambda xp, x, *, labels: xp.einsum(_spec(labels), x),
    infer=_infer_diagonal,
    transpose=lambda ct, x, *, labels: barrier(onto_diagonal_p, ct, labels=labels),
    view=True,
    lift=lambda params, n: {"labels": (0, *(i + 1 for i in params["labels"]))},
    samples=[
        Sample((3, 3), labels=(0, 0)), Sample((2, 3, 2, 3), labels=(0, 1, 0, 1)),
        Sample((4, 2, 2, 2), labels=(0, 1, 1, 1)),
    ],
    doc="Elements whose indices of one label are equal; the labels keep the order of their first axes.",
)  # fmt: skip


def _infer_onto(x: ShapedArray, *, labels: Labels) -> ShapedArray:
    length = dict(zip(dict.fromkeys(labels), x.shape, strict=True))
    return x.with_shape(tuple(length[i] for i in labels))


def _run_onto(xp: Namespace, x: Array, *, out: Array, labels: Labels) -> None:
    out[...] = 0
    places = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    lines = [
        xp.arange(n).reshape([n if i == places[a] else 1 for i in range(x.ndim)]) for n, a in zip(out.shape, labels)
    ]
    out[tuple(lines)] = x  # not through einsum's view of the diagonal, which libraries may copy


onto_diagonal_p: Primitive = linear(
    "einsum_onto_diagonal",
    impl=_run_onto,
    infer=_infer_onto,
    transpose=lambda ct, x, *, labels: barrier(diagonal_p, ct, labels=labels),
    into=True,
    lift=lambda params, n: {"labels": (0, *(i + 1 for i in params["labels"]))},
    samples=[Sample((3,), labels=(0, 0)), Sample((2, 3), labels=(0, 1, 0, 1)), Sample((4, 2), labels=(0, 1, 1, 1))],
    doc="The transpose of einsum_diagonal: zeros but for the diagonal.",
)


@dataclass
class _Term:
    """An operand and a label for each of its axes, none twice."""

    x: Tensor
    labels: Names

    def lengths(self) -> dict[Hashable, int]:
        return dict(zip(self.labels, self.x.shape, strict=True))

    def ordered(self, labels: Sequence[Hashable]) -> Tensor:
        return permute_dims(self.x, [self.labels.index(i) for i in labels])


def einsum(subscripts: object, *operands: TensorLike, optimize: object = True) -> Tensor:
    """The sum of products that ``subscripts`` describes, as ``"bij,bjk->bik"``; an ellipsis stands for leading axes.

    Without ``->`` the result has the labels that occur once, in alphabetical order, after the ellipsis' axes.
    A label repeated in one operand takes its diagonal.  NumPy's other form, ``einsum(x, [0, 1], y, [1, 2], [0, 2])``,
    is understood, too.  optimize: accepted; products are always taken in pairs, in an order chosen here.  Raises
    ShapeError.
    """
    if not isinstance(subscripts, str):
        subscripts, operands = _spelled((subscripts, *operands))
    xs = promote("einsum", operands) if operands else ()
    return during(_in_pairs, subscripts, xs, autocasts=())


def _in_pairs(subscripts: str, xs: tuple[Tensor, ...]) -> Tensor:
    """The sum of products of operands of one dtype, in that dtype."""
    labels, result = _parse(subscripts, [x.ndim for x in xs])
    lengths = _lengths(subscripts, labels, [x.shape for x in xs])
    terms = [_prepared(x, named, lengths) for x, named in zip(xs, labels)]
    while len(terms) > 1:
        i, j = _next_pair(terms, result)
        rest = [t for k, t in enumerate(terms) if k not in (i, j)]
        needed = set(result).union(*(t.labels for t in rest))
        terms = [*rest, _product(terms[i], terms[j], needed)]
    return _summed(terms[0], set(result)).ordered(result)


def _spelled(parts: tuple[object, ...]) -> tuple[str, tuple[Any, ...]]:
    """Operands that alternate with lists of numbers as the text of the labels, and the operands."""

    def text(labels: Any) -> str:
        known = isinstance(labels, (list, tuple)) and all(
            k is ... or (isinstance(k, int) and 0 <= k < 52) for k in labels
        )
        if not known:
            raise ShapeError(
                f"einsum: wanted letters, or after each operand a list of numbers below 52, got {labels!r}"
            )
        return "".join("..." if k is ... else chr(ord("A") + k if k < 26 else ord("a") + k - 26) for k in labels)

    pairs = parts[: len(parts) // 2 * 2]
    inputs = ",".join(map(text, pairs[1::2]))
    return inputs + (f"->{text(parts[-1])}" if len(parts) % 2 else ""), pairs[0::2]


def _parse(subscripts: str, ndims: list[int]) -> tuple[list[Names], Names]:
    """The labels of each operand and of the result; an ellipsis becomes the numbers -n to -1."""
    text = subscripts.replace(" ", "") if isinstance(subscripts, str) else ""
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    named = text.replace("...", "").replace("->", "").replace(",", "")
    if not all(c.isascii() and c.isalpha() for c in named) or not isinstance(subscripts, str):
        raise ShapeError(f"einsum: subscripts must be letters, commas, '->' and '...', got {subscripts!r}")
    if len(inputs) != len(ndims):
        raise ShapeError(f"einsum: {subscripts!r} names {len(inputs)} operands, got {len(ndims)}")
    extra = [n - len(t.replace("...", "")) for t, n in zip(inputs, ndims)]
    for t, n, e in zip(inputs, ndims, extra):
        if e < 0 or (e and "..." not in t) or t.count("...") > 1:
            raise ShapeError(f"einsum: {t!r} of {subscripts!r} does not describe an operand of {n} dimensions")
    widest = max([e for t, e in zip(inputs, extra) if "..." in t], default=0)
    labels = [_expand(t, e) for t, e in zip(inputs, extra)]
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        return labels, [*range(-widest, 0), *once]
    result = _expand(right, widest)
    unknown = [c for c in result if not any(c in t for t in labels)]
    if unknown or len(set(result)) < len(result) or (widest and "..." not in right):
        raise ShapeError(
            f"einsum: the result {right!r} of {subscripts!r} must name labels of the operands, each once, and '...' if "
            "they have it"
        )
    return labels, result


def _expand(text: str, dims: int) -> Names:
    before, dots, after = text.partition("...")
    return [*before, *(range(-dims, 0) if dots else ()), *after]


def _lengths(subscripts: str, labels: list[Names], shapes: list[Shape]) -> dict[Hashable, int]:
    """The length of each label; 1 gives way to another length."""
    lengths: dict[Hashable, int] = {}
    for named, shape in zip(labels, shapes):
        for i, n in zip(named, shape, strict=True):
            if lengths.setdefault(i, n) == 1:
                lengths[i] = n
            elif n not in (1, lengths[i]):
                what = "an axis of '...'" if isinstance(i, int) else f"label {i!r}"
                listed = ", ".join(map(str, shapes))
                raise ShapeError(f"einsum: {what} of {subscripts!r} is {lengths[i]} and {n} long in shapes {listed}")
    return lengths


def _prepared(x: Tensor, labels: Names, lengths: dict[Hashable, int]) -> _Term:
    """Without axes that broadcast, and with the diagonals of repeated labels taken."""
    kept = [k for k, i in enumerate(labels) if x.shape[k] == lengths[i]]
    if len(kept) < x.ndim:
        x, labels = reshape(x, tuple(x.shape[k] for k in kept)), [labels[k] for k in kept]
    distinct = list(dict.fromkeys(labels))
    if len(distinct) < len(labels):
        x = barrier(diagonal_p, x, labels=tuple(distinct.index(i) for i in labels))
    return _Term(x, distinct)


def _next_pair(terms: list[_Term], result: Names) -> tuple[int, int]:
    """The pair with the fewest elements in its product, less those of its operands; among equals, the least work."""
    best: tuple[Any, tuple[int, int]] | None = None
    for i in range(len(terms)):
        for j in range(i + 1, len(terms)):
            lengths = terms[i].lengths() | terms[j].lengths()
            needed = set(result).union(*(t.labels for k, t in enumerate(terms) if k not in (i, j)))
            after = prod(n for label, n in lengths.items() if label in needed)
            cost = (after - terms[i].x.size - terms[j].x.size, prod(lengths.values()))
            if best is None or cost < best[0]:
                best = (cost, (i, j))
    assert best is not None
    return best[1]


def _summed(term: _Term, needed: set[Hashable]) -> _Term:
    """Summed over the labels that no other term and not the result has."""
    gone = tuple(k for k, i in enumerate(term.labels) if i not in needed)
    if not gone:
        return term
    return _Term(sum(term.x, axis=gone, dtype=term.x.dtype), [i for i in term.labels if i in needed])


def _product(a: _Term, b: _Term, needed: set[Hashable]) -> _Term:
    """The product of two terms, summed over labels that no other term and not the result has."""
    a, b = _summed(a, needed | set(b.labels)), _summed(b, needed | set(a.labels))
    shared = [i for i in a.labels if i in b.labels]
    inner = [i for i in shared if i not in needed]
    batch = [i for i in shared if i in needed]
    rows = [i for i in a.labels if i not in shared]
    columns = [i for i in b.labels if i not in shared]
    labels = [*batch, *rows, *columns]
    n = a.lengths() | b.lengths()
    if not inner:
        shape = [n[i] for i in (*batch, *rows)] + [1] * len(columns)
        return _Term(reshape(a.ordered([*batch, *rows]), shape) * _spread(b, batch, len(rows), columns), labels)
    count = prod(n[i] for i in inner)
    outer = tuple(n[i] for i in batch)
    x = reshape(a.ordered([*batch, *rows, *inner]), (*outer, prod(n[i] for i in rows), count))
    y = reshape(b.ordered([*batch, *inner, *columns]), (*outer, count, prod(n[i] for i in columns)))
    return _Term(reshape(matmul(x, y), tuple(n[i] for i in labels)), labels)


def _spread(b: _Term, batch: Names, rows: int, columns: Names) -> Tensor:
    n = b.lengths()
    return reshape(b.ordered([*batch, *columns]), (*(n[i] for i in batch), *(1,) * rows, *(n[i] for i in columns)))
