"""Pooling over windows of the trailing axes.

A maximum keeps which tap of its window it came from, one byte for each element of the result, and neither its operand
nor its result: what it does is then linear, and so is its derivative.  Of equal elements the first in C order counts,
as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes
from tapegrad.core.primitive import Bad, Primitive, Sample, general, linear
from tapegrad.device import CPU, dtypes, threads
from tapegrad.device.numerics.windows import Window, taps
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.create.creation import arange, zeros
from tapegrad.ops.dispatch import barrier, cast, promote, whole_in_float64
from tapegrad.ops.products.convolution import fitted
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor, TensorLike

BLOCK = 65536  # elements of the larger operand in a task: see `engine.cpu.tiles`; a GPU takes all at once
_BYTE = 256  # taps that one byte tells apart


def leading(op: str, x: ShapedArray, wanted: Shape) -> Shape:
    """The axes before the spatial ones, which must be ``wanted``."""
    cut = x.ndim - len(wanted)
    if cut < 0 or x.shape[cut:] != wanted:
        raise ShapeError(f"{op}: {x.shape} must end in {wanted}; reshape it, or say another window")
    return x.shape[:cut]


@lru_cache(maxsize=1024)
def _positions(op: str, window: Window) -> Shape:
    """As ``fitted``, if also every window meets the image."""
    positions = fitted(op, window)
    for n, k, s, (low, _), d, count in zip(*window, positions):
        if not all(any(0 <= t * s - low + i * d < n for i in range(k)) for t in range(count)):
            raise ShapeError(f"{op}: padding {window.padding} makes windows of size {window.kernel} that hold nothing; "
                             "pad by at most half a window")  # fmt: skip
    return positions


def by_planes(xp: Namespace, window: Window, body: Callable[..., None], *arrays: Array) -> None:
    """Call ``body`` with blocks of the arrays, whose leading axes (those the first one has before its planes) are made
    one."""
    cut = arrays[0].ndim - len(window.size)
    count = prod(arrays[0].shape[:cut])
    flat = [xp.reshape(a, (count, *a.shape[cut:])) for a in arrays]
    step = max(1, BLOCK // max(1, prod(window.size)) if xp is CPU.xp else count)

    def run(number: int) -> None:
        body(*(a[number * step : (number + 1) * step] for a in flat))

    tasks = -(-count // step)
    threads.run([run] * max(1, min(threads.get_num_threads(), tasks)), tasks)


def every_tap(window: Window) -> tuple[tuple[int, tuple[Any, ...], tuple[Any, ...]], ...]:
    """For each tap its number, where it is among results, and what it meets, leading axes included."""
    return tuple((n, (..., *at), (..., *meets)) for n, at, meets in taps(window, 0, window.positions[0]))


def add_taps(xp: Namespace, window: Window, term: Callable[..., Array], out: Array, *arrays: Array) -> None:
    """Add to all that each tap meets in ``out``, from 0 on, ``term(number of the tap, its index, *arrays)``."""

    def body(out: Array, *arrays: Array) -> None:
        total = xp.zeros(out.shape, dtypes.accumulator(out.dtype))
        for number, at, meets in every_tap(window):
            total[meets] += term(number, at, *arrays)
        out[...] = total

    by_planes(xp, window, body, out, *arrays)


def _infer_which(x: ShapedArray, *, window: Window) -> ShapedArray:
    if x.dtype.kind not in "fV":
        raise DTypeError(f"pool_which: wanted real floats, got {x.dtype}; cast with astype")
    dtype = dtypes.uint8 if prod(window.kernel) <= _BYTE else dtypes.int32
    return x.with_shape((*leading("pool_which", x, window.size), *_positions("pool_which", window))).with_dtype(dtype)


def _run_which(xp: Namespace, x: Array, *, out: Array, window: Window) -> None:
    def body(x: Array, out: Array) -> None:
        best = xp.full(out.shape, -float("inf"), x.dtype)
        for number, at, meets in reversed(every_tap(window)):  # so that the first of equal ones is written last
            candidates, before = x[meets], best[at]
            wins = (candidates >= before) | (candidates != candidates)
            best[at] = xp.where(wins, candidates, before)
            out[at] = xp.where(wins, out.dtype.type(number), out[at])

    by_planes(xp, window, body, x, out)


PAIRS = Window((4, 5), (2, 2), (2, 1), ((0, 0), (0, 0)), (1, 1))
EDGED = Window((5, 4), (3, 2), (2, 2), ((1, 1), (0, 1)), (1, 2))
LINE = Window((7,), (2,), (3,), ((0, 0),), (1,))
_NARROW = Window((1,), (2,), (1,), ((1, 1),), (2,))  # with a hole just where the image is
_WIDE = Window((2, 2), (3, 2), (1, 1), ((0, 0), (0, 0)), (1, 1))

pool_which_p = general(
    "pool_which",
    impl=_run_which,
    infer=_infer_which,
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 3, 4, 5), window=PAIRS), Sample((2, 5, 4), window=EDGED), Sample((7,), window=LINE),
        Sample((0, 4, 5), window=PAIRS), Sample([[1.0, 3, 3, 2, 2, 2, 1]], window=LINE),
        Bad((2, 5, 5), window=PAIRS, error=ShapeError), Bad((5,), window=PAIRS, error=ShapeError),
        Bad((1,), window=_NARROW, error=ShapeError), Bad((2, 2), window=_WIDE, error=ShapeError),
    ],
    doc="The number of the tap at which each window has its first largest element; a NaN counts as largest.",
)  # fmt: skip


def _both(xp: Namespace, x: Array, which: Array, window: Window) -> tuple[Array, Array]:
    """The two with the same leading axes: a Jacobian's rows give one of them more."""
    cut, places = len(window.size), which.ndim - len(window.size)
    if x.shape[: x.ndim - cut] == which.shape[:places]:
        return x, which
    lead = broadcast_shapes("pool", x.shape[: x.ndim - cut], which.shape[:places])
    return xp.broadcast_to(x, (*lead, *x.shape[-cut:])), xp.broadcast_to(which, (*lead, *which.shape[-cut:]))


def _run_take(xp: Namespace, x: Array, which: Array, *, out: Array, window: Window) -> None:
    x, which = _both(xp, x, which, window)

    def body(x: Array, which: Array, out: Array) -> None:
        out.fill(0)
        for number, at, meets in every_tap(window):
            out[at] = xp.where(which[at] == number, x[meets], out[at])

    by_planes(xp, window, body, x, which, out)


def _run_put(xp: Namespace, g: Array, which: Array, *, out: Array, window: Window) -> None:
    term = lambda number, at, g, which: xp.where(which[at] == number, g[at], g.dtype.type(0))
    add_taps(xp, window, term, out, *_both(xp, g, which, window))


def _infer_take(x: ShapedArray, which: ShapedArray, *, window: Window) -> ShapedArray:
    positions = _positions("pool_take", window)
    lead = broadcast_shapes("pool_take", leading("pool_take", x, window.size), leading("pool_take", which, positions))
    return x.with_shape((*lead, *positions))


def _infer_put(g: ShapedArray, which: ShapedArray, *, window: Window) -> ShapedArray:
    positions = _positions("pool_put", window)
    lead = broadcast_shapes("pool_put", leading("pool_put", g, positions), leading("pool_put", which, positions))
    return g.with_shape((*lead, *window.size))


_WHICH = [[[0, 1, 2, 3], [3, 2, 1, 0]]] * 2

pool_take_p: Primitive = linear(
    "pool_take",
    impl=_run_take,
    infer=_infer_take,
    transpose=lambda ct, x, which, *, window: barrier(pool_put_p, ct, which, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 4, 5), _WHICH, window=PAIRS),
        Sample((3, 2, 4, 5), _WHICH, window=PAIRS),
        Sample((1, 7), [[1, 0]], window=LINE),
        Bad((2, 4, 4), _WHICH, window=PAIRS, error=ShapeError),
    ],
    doc="The element of each window at a given tap.",
)

pool_put_p: Primitive = linear(
    "pool_put",
    impl=_run_put,
    infer=_infer_put,
    transpose=lambda ct, g, which, *, window: barrier(pool_take_p, ct, which, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 2, 4), _WHICH, window=PAIRS),
        Sample((3, 1, 2, 4), _WHICH, window=PAIRS),
        Sample((1, 2), [[1, 0]], window=LINE),
        Bad((2, 4, 4), _WHICH, window=PAIRS, error=ShapeError),
    ],
    doc="Elements added to where ``pool_take`` takes them from.",
)


def _run_sum(xp: Namespace, x: Array, *, out: Array, window: Window) -> None:
    def body(x: Array, out: Array) -> None:
        total = xp.zeros(out.shape, dtypes.accumulator(out.dtype))
        for _, at, meets in every_tap(window):
            total[at] += x[meets]
        out[...] = total

    by_planes(xp, window, body, x, out)


def _run_spread(xp: Namespace, g: Array, *, out: Array, window: Window) -> None:
    add_taps(xp, window, lambda number, at, g: g[at], out, g)


pool_sum_p: Primitive = linear(
    "pool_sum",
    impl=_run_sum,
    infer=lambda x, *, window: x.with_shape((*leading("pool_sum", x, window.size), *fitted("pool_sum", window))),
    transpose=lambda ct, x, *, window: barrier(pool_spread_p, ct, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 3, 4, 5), window=PAIRS), Sample((2, 5, 4), window=EDGED), Sample((7,), window=LINE),
        Sample((0, 4, 5), window=PAIRS), Bad((4, 4), window=PAIRS, error=ShapeError),
    ],
    doc="The sum of each window.",
)  # fmt: skip

pool_spread_p: Primitive = linear(
    "pool_spread",
    impl=_run_spread,
    infer=lambda g, *, window: g.with_shape(
        (*leading("pool_spread", g, fitted("pool_spread", window)), *window.size)
    ),
    transpose=lambda ct, g, *, window: barrier(pool_sum_p, ct, window=window),
    into=True,
    lift=same_params,
    samples=[
        Sample((2, 3, 2, 4), window=PAIRS), Sample((2, 3, 2), window=EDGED), Sample((2,), window=LINE),
        Sample((0, 2, 4), window=PAIRS), Bad((4, 4), window=PAIRS, error=ShapeError),
    ],
    doc="Each element added to all of its window.",
)  # fmt: skip


def max_pool(x: TensorLike, /, *, window: Window) -> Tensor:
    """The largest element of each window of the trailing axes.  Raises ShapeError, DTypeError for complex numbers."""
    (x,) = promote("max_pool", (x,), whole_in_float64)
    return barrier(pool_take_p, x, barrier(pool_which_p, x, window=window), window=window)


def max_pool_places(x: TensorLike, /, *, window: Window) -> tuple[Tensor, Tensor]:
    """:func:`max_pool`, and where in the flattened trailing axes each element comes from (int64)."""
    (x,) = promote("max_pool", (x,), whole_in_float64)
    which = barrier(pool_which_p, x, window=window)
    tap, position = cast(which, dtypes.int64), zeros((), dtype=dtypes.int64, device=x.device)
    positions, dims = window.positions, len(window.size)
    for a, (n, k, s, (low, _), d) in enumerate(zip(*window)):
        along = arange(positions[a], device=x.device) * s - low
        along = reshape(along, (-1, *(1,) * (dims - 1 - a)))
        position = position * n + along + tap // prod(window.kernel[a + 1 :]) % k * d
    return barrier(pool_take_p, x, which, window=window), position


def sum_pool(x: TensorLike, /, *, window: Window) -> Tensor:
    """The sum of each window of the trailing axes, in which padding counts as zeros.  Raises ShapeError."""
    (x,) = promote("sum_pool", (x,), whole_in_float64)
    return barrier(pool_sum_p, x, window=window)


def spread_pool(x: TensorLike, /, *, window: Window) -> Tensor:
    """The transpose of :func:`sum_pool`: each element added to all of its window.  Raises ShapeError."""
    (x,) = promote("spread_pool", (x,), whole_in_float64)
    return barrier(pool_spread_p, x, window=window)
