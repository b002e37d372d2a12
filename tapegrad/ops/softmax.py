"""Softmax, its logarithm, and cross entropy.

Each is one kernel that walks over rows and keeps nothing of full size but its result; so is each derivative.  Row
statistics are computed again in backward rather than stored.  The derivatives' own derivatives are composites.
"""

from __future__ import annotations

from typing import Any

from tapegrad.aval import ShapedArray, normalize_axis
from tapegrad.device.dtypes import accumulator, in_float
from tapegrad.errors import DTypeError, IndexingError, ShapeError
from tapegrad.ops._rows import by_blocks, matrices, matrix
from tapegrad.ops.creation import arange
from tapegrad.ops.dispatch import barrier, promote, tensor
from tapegrad.ops.exponential import exp
from tapegrad.ops.reductions import sum
from tapegrad.ops.selection import where
from tapegrad.ops.shape import expand_dims, moveaxis
from tapegrad.primitive import Bad, Primitive, Sample, general
from tapegrad.tensor import Tensor


def _same_params(params: dict, n: int) -> dict:
    """For ``lift``: everything is counted from the last axis, and values are broadcast against more cotangents."""
    return params


def _infer_last(*avals: ShapedArray) -> ShapedArray:
    """The cotangent may have more leading axes than the value it is multiplied by."""
    return avals[-1]


def _target(out: Any, spare: Any) -> Any:
    """Where a block is computed: its place in the result, or scratch of a wider dtype."""
    return out if out.dtype == spare.dtype else spare


def _deliver(xp: Any, work: Any, out: Any) -> None:
    if work is not out:
        xp.copyto(out, work, casting="unsafe")


def _shifted_exp(xp: Any, x: Any, work: Any) -> Any:
    """``exp(x - max)`` of each row into ``work``; returns the maxima.  A row of infinities gives NaN."""
    most = xp.maximum.reduce(x, axis=-1, keepdims=True)
    with xp.errstate(invalid="ignore"):
        xp.subtract(x, most, out=work, dtype=work.dtype)
    xp.exp(work, out=work)
    return most


def _run_softmax(xp: Any, x: Any, *, out: Any) -> None:
    x, result = matrix(xp, x), matrix(xp, out)

    def body(number: int, rows: slice, spare: Any) -> None:
        work = _target(result[rows], spare)
        _shifted_exp(xp, x[rows], work)
        xp.divide(work, xp.add.reduce(work, axis=-1, keepdims=True), out=work)
        _deliver(xp, work, result[rows])

    by_blocks(xp, x, _wide(out), body)


def _wide(out: Any) -> tuple[Any]:
    return (accumulator(out.dtype),)


softmax_p = general(
    "softmax",
    impl=_run_softmax,
    infer=_infer_last,
    vjp=[lambda ct, out: barrier(softmax_vjp_p, out, ct)],
    jvp=[lambda t, out: barrier(softmax_vjp_p, out, t)],
    into=True,
    exact=False,
    lift=_same_params,
    samples=[Sample((3, 4)), Sample((2, 3, 5)), Sample((4,)), Sample((0, 3)), Sample((3, 0)), Sample((2, 1))],
    doc="``exp(x) / sum(exp(x))`` over the last axis.",
)


def _run_softmax_vjp(xp: Any, y: Any, g: Any, *, out: Any) -> None:
    y, gs, results = matrix(xp, y), matrices(xp, g, y.ndim), matrices(xp, out, y.ndim)

    def body(number: int, rows: slice, spare: Any) -> None:
        for g, result in zip(gs, results):
            work = _target(result[rows], spare)
            xp.multiply(y[rows], g[rows], out=work, dtype=work.dtype)
            total = xp.add.reduce(work, axis=-1, keepdims=True)
            xp.subtract(g[rows], total, out=work)
            xp.multiply(work, y[rows], out=work)
            _deliver(xp, work, result[rows])

    by_blocks(xp, y, _wide(out), body)


def _softmax_vjp_in_y(y: Tensor, g: Tensor, other: Tensor) -> Tensor:
    return other * (g - sum(y * g, axis=-1, keepdims=True))


softmax_vjp_p: Primitive = general(
    "softmax_vjp",
    impl=_run_softmax_vjp,
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
    lift=_same_params,
    samples=[
        Sample((3, 4), (3, 4)),
        Sample((2, 3, 5), (2, 3, 5)),
        Sample((0, 3), (0, 3)),
        Sample((3, 0), (3, 0)),
        Sample((3, 4), (2, 3, 4)),
    ],
    doc="``y * (g - sum(y * g))``: the derivative of softmax, which is symmetric, at the result ``y``.",
)


def _run_log_softmax(xp: Any, x: Any, *, out: Any) -> None:
    x, result = matrix(xp, x), matrix(xp, out)

    def body(number: int, rows: slice, work: Any) -> None:
        most = _shifted_exp(xp, x[rows], work)
        scale = xp.log(xp.add.reduce(work, axis=-1, keepdims=True))
        with xp.errstate(invalid="ignore"):
            xp.subtract(x[rows], most, out=work, dtype=work.dtype)
        xp.subtract(work, scale, out=result[rows], casting="same_kind")

    by_blocks(xp, x, _wide(out), body)


log_softmax_p = general(
    "log_softmax",
    impl=_run_log_softmax,
    infer=_infer_last,
    vjp=[lambda ct, out: barrier(log_softmax_vjp_p, out, ct)],
    jvp=[lambda t, out: t - sum(exp(out) * t, axis=-1, keepdims=True)],
    into=True,
    exact=False,
    lift=_same_params,
    samples=[Sample((3, 4)), Sample((2, 3, 5)), Sample((4,)), Sample((0, 3)), Sample((3, 0)), Sample((2, 1))],
    doc="``log(softmax(x))`` over the last axis, without overflow.",
)


def _run_log_softmax_vjp(xp: Any, y: Any, g: Any, *, out: Any) -> None:
    y, gs, results = matrix(xp, y), matrices(xp, g, y.ndim), matrices(xp, out, y.ndim)

    def body(number: int, rows: slice, spare: Any) -> None:
        for g, result in zip(gs, results):
            work = _target(result[rows], spare)
            xp.exp(y[rows], out=work, dtype=work.dtype)
            xp.multiply(work, xp.add.reduce(g[rows], axis=-1, keepdims=True, dtype=work.dtype), out=work)
            xp.subtract(g[rows], work, out=result[rows], casting="same_kind")

    by_blocks(xp, y, _wide(out), body)


log_softmax_vjp_p: Primitive = general(
    "log_softmax_vjp",
    impl=_run_log_softmax_vjp,
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
    exact=False,
    lift=_same_params,
    samples=[
        Sample((3, 4), (3, 4)),
        Sample((2, 3, 5), (2, 3, 5)),
        Sample((0, 3), (0, 3)),
        Sample((3, 0), (3, 0)),
        Sample((3, 4), (2, 3, 4)),
    ],
    doc="``g - exp(y) * sum(g)``: the transposed derivative of log_softmax at the result ``y``.",
)


def _along(op: str, prim: Any, x: Any, axis: int) -> Tensor:
    (x,) = promote(op, (x,), in_float)
    axis = normalize_axis(op, axis, x.ndim)
    if axis == x.ndim - 1:
        return barrier(prim, x)
    return moveaxis(barrier(prim, moveaxis(x, axis, -1)), -1, axis)


def softmax(x: Any, /, axis: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``axis``, without overflow.  Raises AxisError."""
    return _along("softmax", softmax_p, x, axis)


def log_softmax(x: Any, /, axis: int = -1) -> Tensor:
    """``log(softmax(x))`` along ``axis``, without overflow.  Raises AxisError."""
    return _along("log_softmax", log_softmax_p, x, axis)


def _infer_cross_entropy(x: ShapedArray, labels: ShapedArray) -> ShapedArray:
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"cross_entropy: labels must be integers, got {labels.dtype}; use astype(labels, 'int64')")
    if not x.ndim or labels.shape != x.shape[:-1]:
        wanted = x.shape[:-1] if x.ndim else "(...)"
        raise ShapeError(f"cross_entropy: logits {x.shape} want labels of shape {wanted}, got {labels.shape}")
    return x.with_shape(labels.shape)


def _checked(xp: Any, labels: Any, classes: int) -> Any:
    labels = xp.reshape(labels, (-1,))
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        raise IndexingError(
            f"cross_entropy: label {labels[wrong][0]} is out of range for {classes} classes; "
            "mask ignored rows with where"
        )
    return labels


def _run_cross_entropy(xp: Any, x: Any, labels: Any, *, out: Any) -> None:
    labels, result = _checked(xp, labels, x.shape[-1]), xp.reshape(out, (-1,))
    x = matrix(xp, x)

    def body(number: int, rows: slice, work: Any) -> None:
        most = _shifted_exp(xp, x[rows], work)
        loss = xp.log(xp.add.reduce(work, axis=-1))
        at_label = x[rows][xp.arange(len(work)), labels[rows]]
        with xp.errstate(invalid="ignore"):
            xp.add(loss, xp.subtract(most[:, 0], at_label, dtype=work.dtype), out=result[rows], casting="same_kind")

    by_blocks(xp, x, _wide(out), body)


def _at(x: Tensor, labels: Tensor) -> Tensor:
    """The entry of each row at its label."""
    return sum(where(arange(x.shape[-1]) == expand_dims(labels, -1), x, 0), axis=-1)


def _without(p: Tensor, labels: Tensor) -> Tensor:
    """``p`` less 1 at the label of each row."""
    return where(arange(p.shape[-1]) == expand_dims(labels, -1), p - 1, p)


cross_entropy_p = general(
    "cross_entropy",
    impl=_run_cross_entropy,
    infer=_infer_cross_entropy,
    vjp=[lambda ct, x, labels: barrier(cross_entropy_vjp_p, x, labels, ct), None],
    jvp=[lambda t, x, labels: sum(softmax(x) * t, axis=-1) - _at(t, labels), None],
    into=True,
    exact=False,
    lift=_same_params,
    samples=[
        Sample((3, 4), [0, 3, 1]), Sample((2, 3, 4), [[0, 3, 1], [2, 2, 0]]),
        Bad((3, 4), [0, 1], error=ShapeError), Bad((3, 4), [0, 4, 1], error=IndexingError),
        Bad((3, 4), [0.0, 1.0, 2.0], error=DTypeError),
    ],
    doc="``logsumexp(x) - x[label]`` of each row.",
)  # fmt: skip


def cross_entropy(logits: Any, labels: Any, /) -> Tensor:
    """The loss ``logsumexp(row) - row[label]`` of each row, never making the probabilities.

    logits: ``(..., classes)``; labels: integers ``(...)``.  Raises ShapeError, DTypeError for labels that are not
    integers, IndexingError for one out of range.
    """
    (logits,) = promote("cross_entropy", (logits,), in_float)
    return barrier(cross_entropy_p, logits, tensor("cross_entropy", labels))


def _run_cross_entropy_vjp(xp: Any, x: Any, labels: Any, g: Any, *, out: Any) -> None:
    labels = _checked(xp, labels, x.shape[-1])
    results = matrices(xp, out, x.ndim)
    x, gs = matrix(xp, x), xp.reshape(g, (*results.shape[:-1], 1))

    def body(number: int, rows: slice, spare: Any) -> None:
        for g, result in zip(gs, results):
            work = _target(result[rows], spare)
            _shifted_exp(xp, x[rows], work)
            xp.multiply(work, g[rows] / xp.add.reduce(work, axis=-1, keepdims=True), out=work)
            work[xp.arange(len(work)), labels[rows]] -= g[rows, 0]
            _deliver(xp, work, result[rows])

    by_blocks(xp, x, _wide(out), body)


def _infer_cross_entropy_vjp(x: ShapedArray, labels: ShapedArray, g: ShapedArray) -> ShapedArray:
    _infer_cross_entropy(x, labels)
    return x.with_shape((*g.shape, x.shape[-1]))


cross_entropy_vjp_p: Primitive = general(
    "cross_entropy_vjp",
    impl=_run_cross_entropy_vjp,
    infer=_infer_cross_entropy_vjp,
    vjp=[
        lambda ct, x, labels, g: expand_dims(g, -1) * barrier(softmax_vjp_p, softmax(x), ct),
        None,
        lambda ct, x, labels: sum(ct * _without(softmax(x), labels), axis=-1),
    ],
    jvp=[
        lambda t, x, labels, g: expand_dims(g, -1) * barrier(softmax_vjp_p, softmax(x), t),
        None,
        lambda t, x, labels: barrier(cross_entropy_vjp_p, x, labels, t),
    ],
    into=True,
    exact=False,
    lift=_same_params,
    samples=[Sample((3, 4), [0, 3, 1], (3,)), Sample((2, 3, 4), [[0, 3, 1], [2, 2, 0]], (2, 3))],
    doc="``(softmax(x) - onehot(label)) * g`` of each row.",
)
