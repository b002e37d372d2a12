"""Softmax and its logarithm.

Each is one kernel that walks over rows and keeps nothing of full size but its result; so is each derivative.  Row
statistics are computed again in backward rather than stored.  The derivatives' own derivatives are composites.
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive, Sample, general
from tapegrad.device.dtypes import in_float
from tapegrad.device.types import Array, Namespace
from tapegrad.ops._batched import all_but
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.elementwise.exponential import exp
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.rows import _cuda_rows
from tapegrad.ops.rows._rows import by_blocks, deliver, matrices, matrix, row_sums, shifted_exp, target, wide
from tapegrad.ops.shape.shape import moveaxis
from tapegrad.tensor import Tensor, TensorLike


def _infer_last(*avals: ShapedArray) -> ShapedArray:
    """The cotangent may have more leading axes than the value it is multiplied by."""
    return avals[-1]


_VALUES = [Sample((3, 4)), Sample((2, 3, 5)), Sample((4,)), Sample((0, 3)), Sample((3, 0)), Sample((2, 1))]
_DERIVATIVES = [
    Sample((3, 4), (3, 4)), Sample((2, 3, 5), (2, 3, 5)), Sample((0, 3), (0, 3)), Sample((3, 0), (3, 0)),
    Sample((3, 4), (2, 3, 4)),
]  # fmt: skip


def _by_rows(block: Callable[..., None]) -> Callable[..., None]:
    """``impl`` that calls ``block(xp, rows of x, rows of the result, scratch)``."""

    def impl(xp: Namespace, x: Array, *, out: Array) -> None:
        x, result = matrix(xp, x), matrix(xp, out)
        by_blocks(xp, x, wide(out), lambda number, rows, spare: block(xp, x[rows], result[rows], spare))

    return impl


def _by_cotangents(block: Callable[..., None]) -> Callable[..., None]:
    """``impl`` that calls ``block(xp, rows of y, rows of g, rows of the result, scratch)`` for each cotangent ``g``."""

    def impl(xp: Namespace, y: Array, g: Array, *, out: Array) -> None:
        y, gs, results = matrix(xp, y), matrices(xp, g, y.ndim), matrices(xp, out, y.ndim)

        def body(number: int, rows: slice, spare: Array) -> None:
            for g, result in zip(gs, results):
                block(xp, y[rows], g[rows], result[rows], spare)

        by_blocks(xp, y, wide(out), body)

    return impl


def _softmax_rows(xp: Namespace, x: Array, result: Array, spare: Array) -> None:
    work = target(result, spare)
    shifted_exp(xp, x, work)
    xp.divide(work, row_sums(xp, work, work.dtype), out=work)
    deliver(xp, work, result)


softmax_p = general(
    "softmax",
    impl=_by_rows(_softmax_rows),
    cuda=_cuda_rows.softmax,
    infer=_infer_last,
    vjp=[lambda ct, out: barrier(softmax_vjp_p, out, ct)],
    jvp=[lambda t, out: barrier(softmax_vjp_p, out, t)],
    into=True,
    lift=same_params,
    samples=_VALUES,
    doc="``exp(x) / sum(exp(x))`` over the last axis.",
)


def _softmax_vjp_rows(xp: Namespace, y: Array, g: Array, result: Array, spare: Array) -> None:
    work = target(result, spare)
    xp.multiply(y, g, out=work, dtype=work.dtype)
    total = row_sums(xp, work, work.dtype)
    xp.subtract(g, total, out=work)
    xp.multiply(work, y, out=work)
    deliver(xp, work, result)


def _softmax_vjp_in_y(y: Tensor, g: Tensor, other: Tensor) -> Tensor:
    return other * (g - sum(y * g, axis=-1, keepdims=True))


softmax_vjp_p: Primitive = general(
    "softmax_vjp",
    impl=_by_cotangents(_softmax_vjp_rows),
    cuda=_cuda_rows.softmax_vjp,
    infer=_infer_last,
    vjp=[
        lambda ct, y, g: _softmax_vjp_in_y(y, g, ct) - g * sum(ct * y, axis=-1, keepdims=True),
        lambda ct, y: barrier(softmax_vjp_p, y, ct),
    ],
    jvp=[
        lambda t, y, g: _softmax_vjp_in_y(y, g, t) - y * sum(t * g, axis=-1, keepdims=True),
        lambda t, y: barrier(softmax_vjp_p, y, t),
    ],
    into=True,
    lift=same_params,
    batch=all_but("softmax_vjp"),
    samples=_DERIVATIVES,
    doc="``y * (g - sum(y * g))``: the derivative of softmax, which is symmetric, at the result ``y``.",
)


def _log_softmax_rows(xp: Namespace, x: Array, result: Array, work: Array) -> None:
    most = shifted_exp(xp, x, work)
    scale = xp.log(row_sums(xp, work, work.dtype))
    with xp.errstate(invalid="ignore"):
        xp.subtract(x, most, out=work, dtype=work.dtype)
    xp.subtract(work, scale, out=result, casting="same_kind")


log_softmax_p = general(
    "log_softmax",
    impl=_by_rows(_log_softmax_rows),
    cuda=_cuda_rows.log_softmax,
    infer=_infer_last,
    vjp=[lambda ct, out: barrier(log_softmax_vjp_p, out, ct)],
    jvp=[lambda t, out: t - sum(exp(out) * t, axis=-1, keepdims=True)],
    into=True,
    lift=same_params,
    samples=_VALUES,
    doc="``log(softmax(x))`` over the last axis, without overflow.",
)


def _log_softmax_vjp_rows(xp: Namespace, y: Array, g: Array, result: Array, spare: Array) -> None:
    work = target(result, spare)
    xp.exp(y, out=work, dtype=work.dtype)
    xp.multiply(work, row_sums(xp, g, work.dtype), out=work)
    xp.subtract(g, work, out=result, casting="same_kind")


log_softmax_vjp_p: Primitive = general(
    "log_softmax_vjp",
    impl=_by_cotangents(_log_softmax_vjp_rows),
    cuda=_cuda_rows.log_softmax_vjp,
    infer=_infer_last,
    vjp=[
        lambda ct, y, g: -ct * exp(y) * sum(g, axis=-1, keepdims=True),
        lambda ct, y: ct - sum(ct * exp(y), axis=-1, keepdims=True),
    ],
    jvp=[
        lambda t, y, g: -t * exp(y) * sum(g, axis=-1, keepdims=True),
        lambda t, y: barrier(log_softmax_vjp_p, y, t),
    ],
    into=True,
    lift=same_params,
    batch=all_but("log_softmax_vjp"),
    samples=_DERIVATIVES,
    doc="``g - exp(y) * sum(g)``: the transposed derivative of log_softmax at the result ``y``.",
)


def _along(prim: Primitive, x: TensorLike, axis: int) -> Tensor:
    (t,) = promote(prim.name, (x,), in_float)
    axis = normalize_axis(prim.name, axis, t.ndim)
    if axis == t.ndim - 1:
        return barrier(prim, t)
    return moveaxis(barrier(prim, moveaxis(t, axis, -1)), -1, axis)


def softmax(x: TensorLike, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``axis``, without overflow.  Raises AxisError."""
    return _along(softmax_p, x, axis)


def log_softmax(x: TensorLike, axis: int = -1) -> Tensor:
    """``log(softmax(x))`` along ``axis``, without overflow.  Raises AxisError."""
    return _along(log_softmax_p, x, axis)
