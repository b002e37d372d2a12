"""Counting elements by bins.  Weights are summed, so they have gradients; what is counted has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any, TypeAlias

from tapegrad.core.state import unrecorded
from tapegrad.device import CPU, dtypes
from tapegrad.device.types import Array
from tapegrad.errors import DomainError, DTypeError, IndexingError, ShapeError
from tapegrad.ops.create.creation import asarray, ones
from tapegrad.ops.dispatch import barrier, cast, own, precise, promote, tensor
from tapegrad.ops.elementwise.arithmetic import divide
from tapegrad.ops.elementwise.comparison import equal, logical_and
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import scatter_add_p
from tapegrad.ops.index.sort import searchsorted
from tapegrad.ops.reduce import reductions
from tapegrad.ops.reduce.cumulative import diff
from tapegrad.ops.shape.join import flip, stack, unstack
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["bincount", "digitize", "histogram", "histogram2d", "histogram_bin_edges", "histogramdd"]

Range: TypeAlias = tuple[float, float]
"""Where the first bin begins, and where the last one ends."""


def bincount(x: TensorLike, weights: TensorLike | None = None, minlength: int = 0) -> Tensor:
    """How often each integer from 0 on occurs in the vector ``x``, or the sum of its ``weights``, in float64.

    The weights have gradients.  The length is ``max(x) + 1``, at least ``minlength``; so the largest value is read.
    Raises ShapeError, DTypeError, IndexingError for negative ones.
    """
    places = tensor("bincount", x)
    if places.ndim != 1 or minlength < 0:
        raise ShapeError(f"bincount: needs a vector and minlength >= 0, got shape {places.shape}, {minlength}")
    if not dtypes.is_integer(places.dtype) and (places.size or places.dtype.kind == "b"):
        raise DTypeError(f"bincount: needs integers, got {places.dtype}")
    n = minlength
    if places.size:
        least, most = (int(unrecorded(extreme, places).item()) for extreme in (reductions.min, reductions.max))
        if least < 0:
            raise IndexingError(f"bincount: {least} is negative; count integers from 0 on")
        n = most + 1 if most >= n else n
    places = cast(places, dtypes.int64)
    return barrier(scatter_add_p, _weights_of("bincount", weights, places), places, axis=0, n=n)


def _weights_of(op: str, weights: TensorLike | None, beside: Tensor) -> Tensor:
    """The weights as a vector of floats, or ones to count with."""
    if weights is None:
        return ones((beside.size,), dtype=dtypes.int64, device=beside.device)
    w = tensor(op, weights, beside)
    if w.shape != beside.shape:
        raise ShapeError(f"{op}: weights of shape {w.shape} for data of shape {beside.shape}")
    (w,) = promote(op, (reshape(w, (w.size,)),), lambda d: d if d.kind == "c" else dtypes.float64)
    return w


def digitize(x: TensorLike, bins: TensorLike, right: bool = False) -> Tensor:
    """Which bin each element is in: ``bins[i-1] <= x < bins[i]``, with ``right`` ``bins[i-1] < x <= bins[i]``.

    For falling ``bins`` the other way round (NumPy's ``digitize``).  No derivative.  Raises ShapeError unless ``bins``
    is a vector.
    """
    edges = precise("digitize", bins)
    if edges.ndim != 1:
        raise ShapeError(f"digitize: bins of shape {edges.shape}; need a vector")
    falling = edges.size > 1 and unrecorded(lambda: bool(edges[0] > edges[-1]))
    unrecorded(lambda: _check_rising("digitize", -edges if falling else edges))
    side = "left" if right else "right"
    return edges.size - searchsorted(flip(edges), x, side=side) if falling else searchsorted(edges, x, side=side)


def _check_rising(op: str, edges: Tensor) -> None:
    """Raises DomainError unless no edge is below the one before."""
    if edges.size > 1 and not bool(reductions.all(edges[1:] >= edges[:-1])):
        raise DomainError(f"{op}: bins must rise (or, for digitize, fall) monotonically; sort them")


def histogram_bin_edges(
    a: TensorLike, bins: Any = 10, range: Range | None = None, weights: TensorLike | None = None
) -> Tensor:
    """The edges of the bins that :func:`histogram` counts in (NumPy's ``histogram_bin_edges``).

    bins: their number, their edges, or the name of a rule to choose them by (for which ``a`` comes to the host).
    """
    x = tensor("histogram", a)
    if not isinstance(bins, (int, Integral, str)) and getattr(bins, "ndim", True):
        edges = precise("histogram", bins, x)
        if edges.ndim != 1:
            raise ShapeError(f"histogram: edges of shape {edges.shape}; need a vector")
        unrecorded(_check_rising, "histogram", edges)
        return own(edges, bins)
    count = bins if isinstance(bins, str) else index(bins)
    data = CPU.xp.asarray(x._read() if isinstance(bins, str) else unrecorded(_ends, x, range))
    try:
        edges = CPU.xp.histogram_bin_edges(data, count, range)
    except (TypeError, ValueError) as e:
        raise ShapeError(f"histogram: {e}") from None
    return asarray(edges, device=x.device)


def _ends(x: Tensor, range: Range | None) -> Array:
    """Numbers with the same smallest and largest element as ``x``."""
    if range is not None or not x.size:
        return CPU.xp.zeros(0, x.dtype)
    return stack([reductions.min(x), reductions.max(x)])._read()


def _bins_of(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each element of a vector, and whether it is in any; the last bin has its upper edge, too."""
    n = edges.size - 1
    last = edges[-1]
    bins = where(equal(x, last), n, searchsorted(edges, x, side="right")) - 1
    return where(equal(x, last), n - 1, bins), logical_and(x >= edges[0], x <= last)


def histogram(
    a: TensorLike,
    bins: object = 10,
    range: Range | None = None,
    density: bool | None = None,
    weights: TensorLike | None = None,
) -> tuple[Tensor, Tensor]:
    """How many elements lie in each bin, or the sum of their ``weights``, and the edges (NumPy's ``histogram``).

    bins, range: see :func:`histogram_bin_edges`; density: divided by the widths and the total.  Differentiable in the
    weights; the edges and ``a`` have no gradient.  Weights are added in the order of ``a``, where NumPy adds them
    blockwise or sorted, so that sums may differ in their last bits.  Raises ShapeError.
    """
    x = tensor("histogram", a)
    w = _weights_of("histogram", weights, x)
    edges = histogram_bin_edges(x, bins, range)
    counts, _ = _counted([reshape(x, (x.size,))], [edges], w)
    if density:
        counts = divide(divide(counts, diff(edges)), reductions.sum(counts))
    return counts, edges


def _counted(columns: Sequence[Tensor], edges: Sequence[Tensor], w: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    shape = tuple(max(0, e.size - 1) for e in edges)
    n = math.prod(shape)

    def bins() -> Tensor:
        flat: Any = 0
        inside: Any = None
        for x, e, count in zip(columns, edges, shape, strict=True):
            at, good = _bins_of(*promote("histogram", (x, e)))
            flat = flat * count + at
            inside = good if inside is None else logical_and(inside, good)
        return where(inside, flat, n)

    flat = unrecorded(bins)
    return reshape(barrier(scatter_add_p, w, flat, axis=0, n=n + 1)[:n], shape), shape


def histogramdd(
    sample: TensorLike | Sequence[TensorLike], bins: Any = 10,
    range: Sequence[Range | None] | None = None, density: bool | None = None, weights: TensorLike | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Counts in boxes of several dimensions, or sums of ``weights``, and the edges along each (``histogramdd``).

    sample: ``(n, d)``, or a sequence of ``d`` vectors; bins: as for :func:`histogram`, for all dimensions or a sequence
    of one for each.  Differentiable in the weights.  Raises ShapeError.
    """
    if isinstance(sample, (list, tuple)):
        columns = [tensor("histogramdd", x) for x in sample]
    else:
        x = tensor("histogramdd", sample)
        x = reshape(x, (x.size, 1)) if x.ndim < 2 else x
        columns = list(unstack(x, axis=1))
    count = len(columns)
    several = isinstance(bins, (list, tuple)) or getattr(bins, "ndim", False)
    each = list(bins) if several else [bins] * count
    if len(each) != count or (range is not None and len(range) != count):
        raise ShapeError(f"histogramdd: {len(each)} bins and range {range} for {count} dimensions")
    edges = [
        histogram_bin_edges(x, b, None if range is None else range[k])
        for k, (x, b) in enumerate(zip(columns, each, strict=True))
    ]
    w = cast(_weights_of("histogramdd", weights, columns[0]), dtypes.float64)
    counts, shape = _counted(columns, edges, w)
    if density:
        total = reductions.sum(counts)
        for k, e in enumerate(edges):
            counts = divide(counts, reshape(diff(e), tuple(n if i == k else 1 for i, n in enumerate(shape))))
        counts = divide(counts, total)
    return counts, tuple(edges)


def histogram2d(
    x: TensorLike, y: TensorLike, bins: Any = 10,
    range: Sequence[Range | None] | None = None, density: bool | None = None, weights: TensorLike | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`histogramdd` of two vectors: counts, and the edges along ``x`` and ``y``.

    bins: for both, or a pair; one array of edges serves both.  Differentiable in the weights.  Raises ShapeError.
    """
    one = not isinstance(bins, (int, Integral, str)) and len(bins) not in (1, 2)
    counts, (across, up) = histogramdd([x, y], [bins, bins] if one else bins, range, density, weights)
    return counts, across, up
