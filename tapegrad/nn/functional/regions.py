"""Pooling of regions of interest, as Chainer has it: rectangles of images become outputs of one size.

Rectangles are rounded or sampled on the host, so they have no gradient: the images have.  Of equal elements the first
in C order is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks
from tapegrad.nn.functional.conv import Lengths, lengths
from tapegrad.ops.dispatch import of_floats
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "roi_average_align_2d", "roi_average_pooling_2d", "roi_max_align_2d", "roi_max_pooling_2d", "roi_pooling_2d",
]  # fmt: skip

Rows = list[list[float]]
Bins = list[list[list[tuple[int, int]]]]
"""For each region and side where each bin begins and ends."""


def _images(op: str, x: TensorLike, rois: TensorLike, indices: TensorLike) -> tuple[Tensor, Rows]:
    """The image of each region (regions, c, h, w), and the rectangles (y0, x0, y1, x1) on the host."""
    x, rois, at = ops.asarray(x), ops.asarray(rois), ops.asarray(indices)
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or at.shape != rois.shape[:1]:
        raise ShapeError(
            f"{op}: wanted x (n, c, h, w), rois (r, 4), indices (r,), got {x.shape}, {rois.shape}, {at.shape}"
        )
    checks.integers(op, "roi_indices", at)
    checks.within(op, "roi_indices", at, x.shape[0])
    rows = rois.tolist()
    return ops.take(x, at, axis=0), rows


def _bins(low: float, high: float, count: int, n: int) -> list[tuple[int, int]]:
    """Where each of ``count`` bins of a side from ``low`` to ``high`` begins and ends on ``n`` pixels."""
    step = max(high - low, 1) / count
    limit = lambda point: int(min(max(point + low, 0), n))
    return [(limit(math.floor(i * step)), limit(math.ceil((i + 1) * step))) for i in range(count)]


def _both_sides(rows: Rows, out: tuple[int, ...], size: tuple[int, ...], scale: float, wide: int = 0) -> Bins:
    """For each region the bins along the height, then those along the width, of rounded rectangles."""
    sides = []
    for y0, x0, y1, x1 in rows:
        ends = [round(v * scale) for v in (y0, x0, y1, x1)]
        sides.append([_bins(ends[a], ends[a + 2] + wide, out[a], size[a]) for a in (0, 1)])
    return sides


def _max_of_bins(images: Tensor, bins: Bins, out: tuple[int, ...]) -> Tensor:
    """The largest element of each bin; 0 for an empty one."""
    places, kept = [], []
    for a in (0, 1):
        most = max((stop - start for each in bins for start, stop in each[a]), default=1) or 1
        n = images.shape[2 + a]
        at = [[[min(start + j, n - 1) for j in range(most)] for start, _ in each[a]] for each in bins]
        inside = [[[start + j < stop for j in range(most)] for start, stop in each[a]] for each in bins]
        shape = (len(bins), out[a], most)
        places.append(ops.reshape(ops.asarray(at, dtype="int64", device=images.device), shape))
        kept.append(ops.reshape(ops.asarray(inside, dtype="bool", device=images.device), shape))
    spread = lambda p, a: p[:, :, None, :, None] if a == 0 else p[:, None, :, None, :]  # (r, oh, ow, kh, kw)
    flat = spread(places[0], 0) * images.shape[3] + spread(places[1], 1)
    mask = ops.broadcast_to(ops.logical_and(spread(kept[0], 0), spread(kept[1], 1)), flat.shape)
    return _largest(images, flat, mask, out)


def _largest(images: Tensor, flat: Tensor, mask: Tensor, out: tuple[int, ...]) -> Tensor:
    r, c = images.shape[:2]
    taps = math.prod(flat.shape[3:])
    planes = ops.reshape(images, (r, c, math.prod(images.shape[2:])))
    values = ops.take_along_axis(planes, ops.reshape(flat, (r, 1, math.prod(out) * taps)), axis=-1)
    values = ops.reshape(values, (r, c, *out, taps))
    return _first_largest(values, ops.reshape(mask, (r, 1, *out, taps)))


def _first_largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest along the last axis of those in the mask; 0 if there is none."""
    best = ops.argmax(ops.where(mask, values, -math.inf), axis=-1, keepdims=True)
    largest = ops.take_along_axis(values, best, axis=-1)[..., 0]
    return ops.where(ops.any(mask, axis=-1), largest, 0)


def roi_pooling_2d(x: TensorLike, rois: TensorLike, outh: int, outw: int, spatial_scale: float) -> Tensor:
    """The largest element of each of (outh, outw) bins of each region (Girshick, arXiv 1504.08083).

    x: (n, c, h, w); rois: (r, 5), image, x_min, y_min, x_max, y_max, the last two within the region; result: (r, c,
    outh, outw).  Raises ShapeError, IndexingError.
    """
    regions = ops.asarray(rois)
    if regions.ndim != 2 or regions.shape[1] != 5:
        raise ShapeError(f"roi_pooling_2d: wanted rois (r, 5), got {regions.shape}")
    corners = ops.take(regions, [2, 1, 4, 3], axis=1)
    images, rows = _images("roi_pooling_2d", x, corners, ops.astype(regions[:, 0], "int64"))
    bins = _both_sides(rows, (outh, outw), images.shape[2:], spatial_scale, wide=1)
    return _max_of_bins(images, bins, (outh, outw))


def roi_max_pooling_2d(
    x: TensorLike, rois: TensorLike, roi_indices: TensorLike, outsize: Lengths, spatial_scale: float
) -> Tensor:
    """The largest element of each bin of each region; 0 of an empty bin.

    x: (n, c, h, w); rois: (r, 4), y_min, x_min, y_max, x_max; roi_indices: (r,); result: (r, c, *outsize).
    Raises ShapeError, DTypeError, IndexingError.
    """
    images, rows = _images("roi_max_pooling_2d", x, rois, roi_indices)
    out = lengths("roi_max_pooling_2d", "outsize", outsize, 2)
    return _max_of_bins(images, _both_sides(rows, out, images.shape[2:], spatial_scale), out)


@of_floats("roi_indices")
def roi_average_pooling_2d(
    x: TensorLike, rois: TensorLike, roi_indices: TensorLike, outsize: Lengths, spatial_scale: float
) -> Tensor:
    """The mean of each bin of each region: as :func:`roi_max_pooling_2d`."""
    images, rows = _images("roi_average_pooling_2d", x, rois, roi_indices)
    out = lengths("roi_average_pooling_2d", "outsize", outsize, 2)
    bins = _both_sides(rows, out, images.shape[2:], spatial_scale)
    sides = []
    for a in (0, 1):
        n = images.shape[2 + a]
        sides.append([[_mean_of(start, stop, n) for start, stop in each[a]] for each in bins])
    return _mapped(images, sides, out)


def _mean_of(start: int, stop: int, n: int) -> list[float]:
    """The weights of ``n`` pixels in the mean of some."""
    return [1.0 / (stop - start) if start <= i < stop else 0.0 for i in range(n)]


def _mapped(images: Tensor, sides: Sequence[list[Rows]], out: Sequence[int]) -> Tensor:
    """Images multiplied by matrices from both sides: (r, c, h, w) -> (r, c, *out)."""
    mapped = []
    for a, matrices in enumerate(sides):
        m = ops.asarray(matrices, dtype=images.dtype, device=images.device)
        mapped.append(ops.reshape(m, (len(matrices), 1, out[a], images.shape[2 + a])))
    return ops.matmul(ops.matmul(mapped[0], images), mapped[1].mT)


def _samples(
    rows: Rows, a: int, count: int, n: int, scale: float, ratio: int | None
) -> tuple[list[Rows], list[list[bool]], int]:
    """Bilinear weights (regions, count * most, n) of the sampled places along a side, which of them are there, and
    ``most``, how many of a bin at most.
    """
    weights, kept, each = [], [], []
    for row in rows:
        low, high = row[a] * scale, row[a + 2] * scale
        step = max(high - low, 1.0) / count
        each.append((low, step, ratio or math.ceil(step)))
    most = max((k for _, _, k in each), default=1)
    for low, step, k in each:
        at = [low + i * step + (j + 0.5) * step / k if j < k else None for i in range(count) for j in range(most)]
        there = [p is not None and -1 <= p <= n for p in at]
        weights.append([_between(p, n) if ok else [0.0] * n for p, ok in zip(at, there)])
        kept.append(there)
    return weights, kept, most


def _between(point: float | None, n: int) -> list[float]:
    """The weights of the two pixels around a point."""
    assert point is not None  # only those that are there are asked for
    point = min(max(point, 0.0), n - 1.0)
    low = min(int(point), n - 1)
    row = [0.0] * n
    row[low] = 1.0 - (point - low)
    if low + 1 < n:
        row[low + 1] = point - low
    return row


def _align(
    op: str, x: TensorLike, rois: TensorLike, roi_indices: TensorLike, outsize: Lengths, scale: float, ratio: Any
) -> tuple[Any, ...]:
    images, rows = _images(op, x, rois, roi_indices)
    out = lengths(op, "outsize", outsize, 2)
    ratios = (ratio, ratio) if ratio is None or isinstance(ratio, (int, Integral)) else tuple(ratio)
    sides = [_samples(rows, a, out[a], images.shape[2 + a], scale, ratios[a]) for a in (0, 1)]
    return images, rows, out, ratios, sides


@of_floats("roi_indices")
def roi_average_align_2d(
    x: TensorLike, rois: TensorLike, roi_indices: TensorLike, outsize: Lengths, spatial_scale: float,
    sampling_ratio: int | Sequence[int | None] | None = None,
) -> Tensor:  # fmt: skip
    """The mean of places between the pixels of each bin (He et al., arXiv 1703.06870), so that nothing is rounded.

    x, rois, roi_indices and result: as of :func:`roi_max_pooling_2d`; ``sampling_ratio``: how many places of a bin
    along each side, by default as many as it has pixels.  Raises ShapeError, DTypeError, IndexingError.
    """
    images, rows, out, ratios, sides = _align(
        "roi_average_align_2d", x, rois, roi_indices, outsize, spatial_scale, sampling_ratio
    )  # fmt: skip
    means = []
    for a, (weights, _, most) in enumerate(sides):
        matrices = []
        for row, matrix in zip(rows, weights):
            k = ratios[a] or math.ceil(max((row[a + 2] - row[a]) * spatial_scale, 1.0) / out[a])
            parts = [matrix[i * most : (i + 1) * most] for i in range(out[a])]
            matrices.append([[sum(column) / k for column in zip(*part)] for part in parts])
        means.append(matrices)
    return _mapped(images, means, out)


@of_floats("roi_indices")
def roi_max_align_2d(
    x: TensorLike, rois: TensorLike, roi_indices: TensorLike, outsize: Lengths, spatial_scale: float,
    sampling_ratio: int | Sequence[int | None] | None = None,
) -> Tensor:  # fmt: skip
    """The largest of places between the pixels of each bin: as :func:`roi_average_align_2d`."""
    images, _, out, _, sides = _align(
        "roi_max_align_2d", x, rois, roi_indices, outsize, spatial_scale, sampling_ratio
    )  # fmt: skip
    counts = [out[a] * sides[a][2] for a in (0, 1)]
    read = _mapped(images, [side[0] for side in sides], counts)
    r, c = images.shape[:2]
    apart = ops.reshape(read, (r, c, out[0], sides[0][2], out[1], sides[1][2]))
    taps = sides[0][2] * sides[1][2]
    values = ops.reshape(ops.permute_dims(apart, (0, 1, 2, 4, 3, 5)), (r, c, *out, taps))
    kept = [
        ops.reshape(ops.asarray(side[1], dtype="bool", device=images.device), (r, out[a], side[2]))
        for a, side in enumerate(sides)
    ]
    mask = ops.logical_and(kept[0][:, :, None, :, None], kept[1][:, None, :, None, :])
    return _first_largest(values, ops.reshape(mask, (r, 1, *out, taps)))
