"""Sequences of unequal lengths (Chainer's ``pad_sequence`` and ``transpose_sequence``)."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.errors import ShapeError
from tapegrad.ops.dispatch import promote
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.padding import pad
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["pad_sequence", "transpose_sequence"]


def pad_sequence(xs: Sequence[TensorLike], length: int | None = None, padding: float = 0) -> Tensor:
    """Arrays that differ in the first length only, stacked, with ``padding`` behind the shorter ones.

    length: that of the result's second axis (None: the longest).  Raises ShapeError.
    """
    parts = promote("pad_sequence", tuple(xs)) if len(xs) else ()
    if not parts or any(not t.ndim or t.shape[1:] != parts[0].shape[1:] for t in parts):
        raise ShapeError(
            f"pad_sequence: {[t.shape for t in parts]} must be arrays that differ in the first length only"
        )
    n = max(t.shape[0] for t in parts) if length is None else length
    if any(t.shape[0] > n for t in parts):
        raise ShapeError(f"pad_sequence: an array is longer than length={n}")
    rest = ((0, 0),) * (parts[0].ndim - 1)
    return stack([pad(t, ((0, n - t.shape[0]), *rest), constant_values=padding) for t in parts])


def transpose_sequence(xs: Sequence[TensorLike]) -> tuple[Tensor, ...]:
    """For each position the elements there of all arrays that are long enough; the longest arrays come first.

    Raises ShapeError for arrays that are not in order of falling length.
    """
    parts = promote("transpose_sequence", tuple(xs)) if len(xs) else ()
    lengths = [t.shape[0] if t.ndim else 0 for t in parts]
    if lengths != sorted(lengths, reverse=True):
        raise ShapeError(f"transpose_sequence: lengths {lengths} rise; sort the arrays, the longest first")
    count = lengths[0] if lengths else 0
    return tuple(stack([t[k] for t, n in zip(parts, lengths, strict=True) if n > k]) for k in range(count))
