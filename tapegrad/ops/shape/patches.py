"""The windows of the trailing axes as columns, and their transpose: what unfold and fold of neural networks are."""

from __future__ import annotations

from math import prod

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, linear
from tapegrad.device.numerics.windows import Window
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.products.convolution import fitted
from tapegrad.ops.rows.pooling import EDGED, LINE, PAIRS, add_taps, by_planes, every_tap, leading
from tapegrad.tensor import Tensor, TensorLike


def _run_unfold(xp: Namespace, x: Array, *, out: Array, window: Window) -> None:
    def body(x: Array, out: Array) -> None:
        out.fill(0)
        for number, at, meets in every_tap(window):
            out[:, number][at] = x[meets]

    by_planes(xp, window, body, x, out)


def _run_fold(xp: Namespace, x: Array, *, out: Array, window: Window) -> None:
    add_taps(xp, window, lambda number, at, x: x[:, number][at], out, x)


def _infer_unfold(x: ShapedArray, *, window: Window) -> ShapedArray:
    positions = fitted("unfold", window)
    return x.with_shape((*leading("unfold", x, window.size), prod(window.kernel), *positions))


def _infer_fold(x: ShapedArray, *, window: Window) -> ShapedArray:
    columns = (prod(window.kernel), *fitted("fold", window))
    return x.with_shape((*leading("fold", x, columns), *window.size))


unfold_p: Primitive = linear(
    "unfold",
    impl=_run_unfold,
    infer=_infer_unfold,
    transpose=lambda ct, x, *, window: barrier(fold_p, ct, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 3, 4, 5), window=PAIRS), Sample((2, 5, 4), window=EDGED), Sample((7,), window=LINE),
        Sample((0, 4, 5), window=PAIRS), Bad((4, 4), window=PAIRS, error=ShapeError),
    ],
    doc="The elements of each window, with zeros for padding, along one more axis.",
)  # fmt: skip

fold_p: Primitive = linear(
    "fold",
    impl=_run_fold,
    infer=_infer_fold,
    transpose=lambda ct, x, *, window: barrier(unfold_p, ct, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 3, 4, 2, 4), window=PAIRS), Sample((2, 6, 3, 2), window=EDGED), Sample((2, 2), window=LINE),
        Sample((0, 4, 2, 4), window=PAIRS), Bad((4, 4, 4), window=PAIRS, error=ShapeError),
    ],
    doc="Elements added to where ``unfold`` takes them from.",
)  # fmt: skip


def unfold_windows(x: TensorLike, /, *, window: Window) -> Tensor:
    """``(..., *size)`` -> ``(..., taps, *positions)``: what each window of the trailing axes holds.

    Raises ShapeError.
    """
    (x,) = promote("unfold", (x,))
    return barrier(unfold_p, x, window=window)


def fold_windows(x: TensorLike, /, *, window: Window) -> Tensor:
    """``(..., taps, *positions)`` -> ``(..., *size)``: the transpose of :func:`unfold_windows`.  Raises ShapeError."""
    (x,) = promote("fold", (x,))
    return barrier(fold_p, x, window=window)
