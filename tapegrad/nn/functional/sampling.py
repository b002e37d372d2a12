"""Images read at given places: grid_sample, affine_grid and Chainer's deformable convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn.functional.conv import Lengths, lengths
from tapegrad.nn.functional.resampling import cubic_weights
from tapegrad.ops.dispatch import of_floats
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["affine_grid", "deformable_convolution_2d_sampler", "grid_sample"]


@of_floats()
def affine_grid(theta: TensorLike, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Places for :func:`grid_sample`: the pixels' own, from -1 to 1, mapped by ``theta`` (Jaderberg et al., 2015).

    theta: (n, 2, 3) with size (n, c, h, w), or (n, 3, 4) with (n, c, d, h, w); result: (n, h, w, 2) or (n, d, h, w, 3).
    Raises ShapeError.
    """
    matrices, sizes = ops.asarray(theta), tuple(size)[2:]
    dims = len(sizes)
    if dims not in (2, 3) or matrices.shape != (size[0], dims, dims + 1) or min(sizes) < 1:
        raise ShapeError(f"affine_grid: wanted theta (n, 2, 3) or (n, 3, 4) for {tuple(size)}, got {matrices.shape}")
    axes = [ops.asarray(_own(n, bool(align_corners)), dtype=matrices.dtype, device=matrices.device) for n in sizes]
    grids = ops.meshgrid(*axes, indexing="ij")[::-1]
    places = ops.stack([*grids, ops.ones_like(grids[0])], axis=-1)
    moved = ops.matmul(ops.reshape(places, (1, math.prod(sizes), dims + 1)), matrices.mT)
    return ops.reshape(moved, (size[0], *sizes, dims))


def _own(n: int, align: bool) -> list[float]:
    """The positions of ``n`` pixels on the scale from -1 to 1."""
    if n == 1:
        return [0.0]
    return [2 * i / (n - 1) - 1 if align else (2 * i + 1) / n - 1 for i in range(n)]


@of_floats()
def grid_sample(
    input: TensorLike, grid: TensorLike, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:  # fmt: skip
    """``input`` read at the places ``grid``, whose last axis counts from -1 to 1 along the axes of input, last first.

    input: (n, c, h, w), grid: (n, H, W, 2), result: (n, c, H, W); or (n, c, d, h, w), (n, D, H, W, 3).  mode:
    "bilinear", "nearest" (no gradient in grid: it is 0) or "bicubic" (two sizes).  padding_mode: "zeros", "border" or
    "reflection".  ``align_corners``: -1 and 1 are the outer pixels' centres, not their edges.  At a border, and where a
    point is at a pixel, the gradient in grid is that of one side.  Raises ShapeError, TapegradError.
    """
    x, places = ops.asarray(input), ops.asarray(grid)
    dims, op = x.ndim - 2, "grid_sample"
    if dims not in (2, 3) or places.ndim != x.ndim or (places.shape[0], places.shape[-1]) != (x.shape[0], dims):
        raise ShapeError(
            f"{op}: wanted (n, c, h, w) with (n, H, W, 2), or (n, c, d, h, w) with (n, D, H, W, 3); "
            f"got {x.shape}, {places.shape}"
        )
    if mode not in ("bilinear", "nearest", "bicubic") or (mode == "bicubic" and dims == 3):
        raise TapegradError(f"{op}: unknown mode {mode!r} for {x.shape}")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise TapegradError(f"{op}: unknown padding_mode {padding_mode!r}")
    if not math.prod(x.shape[2:]):
        raise ShapeError(f"{op}: the images of {x.shape} have no pixels")
    align = bool(align_corners)
    at = [_pixels(places[..., dims - 1 - a], n, align) for a, n in enumerate(x.shape[2:])]
    inside = lambda point, n: _inside(point, n, padding_mode, align)
    if mode != "bicubic":
        at = [inside(point, n) for point, n in zip(at, x.shape[2:])]
    read = _reader(x)
    if mode == "nearest":
        return ops.moveaxis(read([ops.round(point) for point in at], None), -1, 1)
    taps = [_cubic_taps(point) if mode == "bicubic" else _linear_taps(point) for point in at]
    total = None
    for several in itertools.product(*taps):
        corners = [point for point, _ in several]
        if mode == "bicubic":
            corners = [inside(point, n) for point, n in zip(corners, x.shape[2:])]
        part = read(corners, math.prod([weight for _, weight in several]))
        total = part if total is None else total + part
    assert total is not None  # there are taps
    return ops.moveaxis(total, -1, 1)


def _pixels(point: Tensor, n: int, align: bool) -> Tensor:
    """A point on the scale from -1 to 1, in pixels."""
    return (point + 1) * (0.5 * (n - 1)) if align else ((point + 1) * n - 1) * 0.5


def _inside(point: Tensor, n: int, padding_mode: str, align: bool) -> Tensor:
    """A point outside the image brought back into it; the gradient at the border itself is 0."""
    if padding_mode == "zeros":
        return point
    if padding_mode == "reflection":
        point = _reflected(point, 0.0 if align else -0.5, float(n - 1 if align else n))
    return ops.where(point > 0, ops.where(point < n - 1, point, n - 1), 0)


def _reflected(point: Tensor, low: float, span: float) -> Tensor:
    """Mirrored at ``low`` and at ``low + span`` until it is between them."""
    if not span:
        return ops.where(False, point, 0)
    far = ops.abs(point - low)
    turns = ops.floor(far / span)
    rest = far - turns * span
    return low + ops.where(turns % 2 == 0, rest, span - rest)


def _linear_taps(point: Tensor) -> list[tuple[Tensor, Tensor]]:
    low = ops.floor(point)
    share = point - low
    return [(low, 1 - share), (low + 1, share)]


def _cubic_taps(point: Tensor) -> list[tuple[Tensor, Tensor]]:
    low = ops.floor(point)
    return [(low + k, w) for k, w in zip(range(-1, 3), cubic_weights(point - low))]


def _reader(x: Tensor) -> Callable[[Sequence[Tensor], Any], Tensor]:
    """A function that reads pixels at whole places (n, *places), 0 outside, times a weight, as (n, *places, c).

    The channels come last, so that one index serves them all.
    """
    n, c, *size = x.shape
    pixels = ops.reshape(ops.moveaxis(x, 1, -1), (n * math.prod(size), c))

    def read(at: Sequence[Tensor], weight: TensorLike) -> Tensor:
        flat = ops.reshape(ops.arange(n, device=x.device), (n, *(1,) * (at[0].ndim - 1)))
        kept: Any = True
        for point, length in zip(at, size):
            within = ops.logical_and(point >= 0, point <= length - 1)
            kept = ops.logical_and(kept, within)
            flat = flat * length + ops.astype(ops.where(within, point, 0), "int64")
        values = ops.where(ops.expand_dims(kept, axis=-1), ops.take(pixels, flat, axis=0), 0)
        return values if weight is None else values * ops.expand_dims(weight, axis=-1)

    return read


@of_floats()
def deformable_convolution_2d_sampler(
    x: TensorLike, offset: TensorLike, W: TensorLike, b: TensorLike | None = None, stride: Lengths = 1, pad: Lengths = 0
) -> Tensor:
    """A convolution each of whose taps reads at an offset of its own (Dai et al., arXiv 1703.06211; Chainer).

    x: (n, c, h, w); offset: (n, 2 * kh * kw, H, W), along the width first, then along the height; W: (o, c, kh, kw);
    b: (o,); result: (n, o, H, W).  Outside the padded image there is 0.  Raises ShapeError.
    """
    op = "deformable_convolution_2d_sampler"
    image, offsets, w = ops.asarray(x), ops.asarray(offset), ops.asarray(W)
    strides, around = lengths(op, "stride", stride, 2), lengths(op, "pad", pad, 2, 0)
    o, c, *kernel = w.shape
    taps = math.prod(kernel)
    positions = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(image.shape[2:], around, kernel, strides))
    if image.ndim != 4 or w.ndim != 4 or image.shape[1] != c or offsets.shape != (len(image), 2 * taps, *positions):
        raise ShapeError(
            f"{op}: wanted x (n, {c}, h, w) and offset (n, {2 * taps}, {positions[0]}, {positions[-1]}), "
            f"got {image.shape}, {offsets.shape}"
        )
    at = []
    for a, s, p, part in zip((0, 1), strides, around, (offsets[:, taps:], offsets[:, :taps])):
        tap = [i // kernel[1] if a == 0 else i % kernel[1] for i in range(taps)]
        number = ops.reshape(ops.asarray(tap, dtype=part.dtype, device=part.device), (taps, 1, 1))
        first = ops.arange(positions[a], dtype=part.dtype, device=part.device) * s - p
        at.append(part + number + (ops.expand_dims(first, axis=1) if a == 0 else first))
    read, total = _reader(image), None
    for (y, wy), (z, wz) in itertools.product(*map(_linear_taps, at)):
        part = read([y, z], wy * wz)
        total = part if total is None else total + part
    assert total is not None
    y = ops.einsum("nkhwc,ock->nohw", total, ops.reshape(w, (o, c, taps)))
    return y if b is None else y + ops.reshape(b, (o, 1, 1))
