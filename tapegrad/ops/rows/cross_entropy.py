"""Cross entropy with integer labels over the last axis.

The loss is one kernel that walks over rows and never makes the probabilities; so is its derivative, which reads the
logits again.  The derivative's own derivatives are composites.
"""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device.dtypes import in_float
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DTypeError, IndexingError, ShapeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import barrier, promote, tensor
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.rows import _cuda_rows
from tapegrad.ops.rows._rows import by_blocks, deliver, matrices, matrix, row_sums, shifted_exp, target, wide
from tapegrad.ops.rows.softmax import softmax, softmax_vjp_p
from tapegrad.ops.shape.shape import expand_dims
from tapegrad.tensor import Tensor, TensorLike


def _infer_cross_entropy(x: ShapedArray, labels: ShapedArray) -> ShapedArray:
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"cross_entropy: labels must be integers, got {labels.dtype}; use astype(labels, 'int64')")
    if not x.ndim or labels.shape != x.shape[:-1]:
        wanted = x.shape[:-1] if x.ndim else "(...)"
        raise ShapeError(f"cross_entropy: logits {x.shape} want labels of shape {wanted}, got {labels.shape}")
    return x.with_shape(labels.shape)


def _checked(xp: Namespace, labels: Array, classes: int) -> Array:
    labels = xp.reshape(labels, (-1,))
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        raise IndexingError(
            f"cross_entropy: label {labels[wrong][0]} is out of range for {classes} classes; "
            "mask ignored rows with where"
        )
    return labels


def _run_cross_entropy(xp: Namespace, x: Array, labels: Array, *, out: Array) -> None:
    labels, result = _checked(xp, labels, x.shape[-1]), xp.reshape(out, (-1,))
    x = matrix(xp, x)

    def body(number: int, rows: slice, work: Array) -> None:
        most = shifted_exp(xp, x[rows], work)
        loss = xp.log(row_sums(xp, work, work.dtype)[:, 0])
        at_label = x[rows][xp.arange(len(work)), labels[rows]]
        with xp.errstate(invalid="ignore"):
            xp.add(loss, xp.subtract(most[:, 0], at_label, dtype=work.dtype), out=result[rows], casting="same_kind")

    by_blocks(xp, x, wide(out), body)


def _at(x: Tensor, labels: Tensor) -> Tensor:
    """The entry of each row at its label."""
    return sum(where(arange(x.shape[-1], device=x.device) == expand_dims(labels, -1), x, 0), axis=-1)


def _without(p: Tensor, labels: Tensor) -> Tensor:
    """``p`` less 1 at the label of each row."""
    return where(arange(p.shape[-1], device=p.device) == expand_dims(labels, -1), p - 1, p)


cross_entropy_p = general(
    "cross_entropy",
    impl=_run_cross_entropy,
    cuda=_cuda_rows.cross_entropy,
    infer=_infer_cross_entropy,
    vjp=[lambda ct, x, labels: barrier(cross_entropy_vjp_p, x, labels, ct), None],
    jvp=[lambda t, x, labels: sum(softmax(x) * t, axis=-1) - _at(t, labels), None],
    into=True,
    lift=same_params,
    batch="all",
    samples=[
        Sample((3, 4), [0, 3, 1]), Sample((2, 3, 4), [[0, 3, 1], [2, 2, 0]]),
        Bad((3, 4), [0, 1], error=ShapeError), Bad((3, 4), [0, 4, 1], error=IndexingError),
        Bad((3, 4), [0.0, 1.0, 2.0], error=DTypeError),
    ],
    doc="``logsumexp(x) - x[label]`` of each row.",
)  # fmt: skip


def cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """The loss ``logsumexp(row) - row[label]`` of each row, never making the probabilities.

    logits: ``(..., classes)``; labels: integers ``(...)``, the shape of the result.  (TensorFlow's
    ``sparse_softmax_cross_entropy_with_logits``; PyTorch's mean is ``tg.nn.functional.cross_entropy``.)  Raises
    ShapeError, DTypeError for labels that are not integers, IndexingError for one out of range.
    """
    (logits,) = promote("cross_entropy", (logits,), in_float)
    return barrier(cross_entropy_p, logits, tensor("cross_entropy", labels, logits))


def _run_cross_entropy_vjp(xp: Namespace, x: Array, labels: Array, g: Array, *, out: Array) -> None:
    labels = _checked(xp, labels, x.shape[-1])
    results = matrices(xp, out, x.ndim)
    x, gs = matrix(xp, x), xp.reshape(g, (*results.shape[:-1], 1))

    def body(number: int, rows: slice, spare: Array) -> None:
        for g, result in zip(gs, results):
            block = result[rows]
            work = target(block, spare)
            shifted_exp(xp, x[rows], work)
            xp.multiply(work, g[rows] / row_sums(xp, work, work.dtype), out=work)
            work[xp.arange(len(work)), labels[rows]] -= g[rows, 0]
            deliver(xp, work, block)

    by_blocks(xp, x, wide(out), body)


def _infer_cross_entropy_vjp(x: ShapedArray, labels: ShapedArray, g: ShapedArray) -> ShapedArray:
    _infer_cross_entropy(x, labels)
    return x.with_shape((*g.shape, x.shape[-1]))


cross_entropy_vjp_p: Primitive = general(
    "cross_entropy_vjp",
    impl=_run_cross_entropy_vjp,
    cuda=_cuda_rows.cross_entropy_vjp,
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
    lift=same_params,
    batch="all",
    samples=[Sample((3, 4), [0, 3, 1], (3,)), Sample((2, 3, 4), [[0, 3, 1], [2, 2, 0]], (2, 3))],
    doc="``(softmax(x) - onehot(label)) * g`` of each row.",
)
