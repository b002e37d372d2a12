"""Draws of categories, and of elements of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from tapegrad.core.aval import broadcast_shapes, normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import DomainError, ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import cast, promote, real_float
from tapegrad.ops.elementwise.arithmetic import abs, minimum
from tapegrad.ops.elementwise.exponential import log
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take
from tapegrad.ops.index.sort import argmax, argsort, searchsorted
from tapegrad.ops.reduce.cumulative import cumulative_sum
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.shape import moveaxis, reshape
from tapegrad.random.continuous import gumbel
from tapegrad.random.discrete import integers
from tapegrad.random.drawing import lengths_of, unit, within
from tapegrad.random.stream import Generator
from tapegrad.random.uniforms import permutation
from tapegrad.tensor import Tensor, TensorLike


def categorical(
    logits: TensorLike, axis: int = -1, shape: int | Sequence[int] | None = None, generator: Generator | None = None
) -> Tensor:
    """Positions along ``axis``, position ``k`` with a probability proportional to ``exp(logits[k])``: int64.

    By the Gumbel maximum trick.  shape: of the result; None: that of ``logits`` without ``axis``, and otherwise it must
    end with what that broadcasts to.  Raises AxisError, ShapeError for no categories.
    """
    (logits,) = promote("random.categorical", (logits,), real_float("random.categorical"))
    logits = moveaxis(logits, normalize_axis("random.categorical", axis, logits.ndim), -1)
    if not logits.shape[-1]:
        raise ShapeError(f"random.categorical: logits of shape {logits.shape} have no categories")
    lengths = logits.shape[:-1] if shape is None else lengths_of(shape)
    if broadcast_shapes("random.categorical", lengths, logits.shape[:-1]) != lengths:
        raise ShapeError(f"random.categorical: logits of batch shape {logits.shape[:-1]} do not broadcast to {lengths}")
    wide = dtypes.float64 if logits.dtype == dtypes.float64 else dtypes.float32
    noise = gumbel((*lengths, logits.shape[-1]), dtype=wide, generator=generator, device=logits.device)
    return argmax(cast(logits, wide) + noise, axis=-1)


def choice(
    a: Any,
    shape: int | Sequence[int] = (),
    replace: bool = True,
    p: TensorLike | None = None,
    axis: int = 0,
    generator: Generator | None = None,
) -> Tensor:
    """Elements of ``a`` along ``axis``, or of ``range(a)``; ``shape`` of them.  Gradients go to the elements chosen.

    replace: whether one may be chosen again; p: how likely each is (they sum to 1; without replacement by the Gumbel
    maximum trick: one after the other, as NumPy's).  Raises DomainError where there are too few, or for a negative
    ``p`` and one that does not sum to 1, ShapeError.
    """
    rows = asarray(a) if isinstance(a, (list, tuple)) or getattr(a, "shape", None) else None
    n = index(a) if rows is None else rows.shape[normalize_axis("random.choice", axis, rows.ndim)]
    lengths = lengths_of(shape)
    count = math.prod(lengths)
    if count and (n < 1 or (not replace and count > n)):
        raise DomainError(f"random.choice: {count} of {n} elements" + ("" if replace else ", without replacement"))
    chosen = reshape(_positions(n, count, replace, p, generator), lengths)
    return chosen if rows is None else take(rows, chosen.to_device(rows.device), axis=axis)


def _positions(n: int, count: int, replace: bool, p: TensorLike | None, generator: Generator | None) -> Tensor:
    """``count`` of ``range(n)``, in random order."""
    if p is None:
        if replace and n:
            return integers(count, 0, n, generator=generator)
        return permutation(n, generator=generator)[:count]
    (p,) = promote("random.choice", (p,), real_float("random.choice"))
    if p.shape != (n,):
        raise ShapeError(f"random.choice: p of shape {p.shape} for {n} elements")
    loose = math.sqrt(dtypes.finfo(p.dtype).eps)
    p = cast(p, dtypes.float64)
    within(
        "choice",
        {
            "p >= 0": lambda p: (p < 0) | (p != p),
            "sum(p) == 1": lambda p: abs(sum(p) - 1) > loose,
            **({} if replace else {f"p > 0 of {count} elements at least": lambda p: sum(p > 0) < count}),
        },
        {"p": p},
    )
    if replace:
        sums = cumulative_sum(p)
        positions = searchsorted(sums, unit((count,), "float64", generator, p.device) * sums[-1], side="right")
        return minimum(positions, n - 1)
    noise = gumbel((n,), dtype="float64", generator=generator, device=p.device)
    some = p > 0
    return argsort(where(some, log(where(some, p, 1.0)) + noise, -float("inf")), descending=True)[:count]
