"""The losses of classification, with torch's names, argument order and defaults; checks that all losses share."""

from __future__ import annotations

import math

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.nn.functional.linear_maps import linear
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div", "linear_cross_entropy",
    "multilabel_soft_margin_loss", "nll_loss", "soft_margin_loss",
]  # fmt: skip


@real_only
@of_floats("target")
def cross_entropy(
    input: TensorLike,
    target: TensorLike,
    weight: TensorLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``-log(softmax(input))`` at the target; the classes are on axis 1 (axis 0 if there is one axis), as in PyTorch.

    input: (n, c, ...) or (c,); target: integers (n, ...) or (), in [0, c) or ``ignore_index``; or probabilities shaped
    as input.  ``weight``: (c,).  The mean is over the weights of the targets that are not ignored, as in PyTorch.

    Raises ShapeError, DTypeError for targets that are neither integers nor floats, IndexingError for other labels.
    """
    logits, target = ops.asarray(input), ops.asarray(target)
    axis, shape = 0 if logits.ndim == 1 else 1, logits.shape
    if not logits.ndim:
        raise ShapeError("cross_entropy: wanted input (n, c, ...) or (c,), got a scalar")
    classes, rest = logits.shape[axis], logits.shape[:axis] + logits.shape[axis + 1 :]
    logits = _class_axis_last(logits, axis)
    if weight is not None:
        weight = class_weights("cross_entropy", weight, classes)
    if "float" in str(target.dtype):
        if target.shape != shape:
            raise ShapeError(f"cross_entropy: wanted probabilities shaped as input {shape}, got {target.shape}")
        shares = _class_axis_last(target, axis) * (1.0 - label_smoothing) + label_smoothing / classes
        if weight is not None:
            shares = shares * weight
        return reduced("cross_entropy", -ops.sum(shares * ops.log_softmax(logits, axis=-1), axis=-1), reduction)
    kept, labels = checked_labels("cross_entropy", target, rest, classes, ignore_index)
    if not label_smoothing and weight is None:
        losses = ops.where(kept, ops.cross_entropy(logits, labels), 0.0)
        return _weighted("cross_entropy", losses, ops.astype(kept, logits.dtype), reduction)
    logp = ops.log_softmax(logits, axis=-1)
    if weight is None:
        weight = ops.ones((classes,), dtype=logits.dtype, device=logits.device)
    of_label = ops.where(kept, ops.take(weight, labels, axis=0), 0.0)
    hard = -at_label(logp, labels) * of_label
    if not label_smoothing:
        return _weighted("cross_entropy", hard, of_label, reduction)
    soft = ops.where(kept, -ops.sum(weight * logp, axis=-1), 0.0)
    losses = (1.0 - label_smoothing) * hard + (label_smoothing / classes) * soft
    return _weighted("cross_entropy", losses, of_label, reduction)


@real_only
@of_floats("target")
def nll_loss(
    input: TensorLike, target: TensorLike, weight: TensorLike | None = None, ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``-input`` at the target: ``cross_entropy`` for input that is ``log_softmax`` already; same shapes.

    Raises ShapeError, DTypeError, IndexingError.
    """
    logp, target = ops.asarray(input), ops.asarray(target)
    axis = 0 if logp.ndim == 1 else 1
    if not logp.ndim:
        raise ShapeError("nll_loss: wanted input (n, c, ...) or (c,), got a scalar")
    classes, rest = logp.shape[axis], logp.shape[:axis] + logp.shape[axis + 1 :]
    kept, labels = checked_labels("nll_loss", target, rest, classes, ignore_index)
    weight = ops.ones((classes,), dtype=logp.dtype, device=logp.device) if weight is None else weight
    weight = class_weights("nll_loss", weight, classes)
    of_label = ops.where(kept, ops.take(weight, labels, axis=0), 0.0)
    losses = -at_label(_class_axis_last(logp, axis), labels) * of_label
    return _weighted("nll_loss", losses, of_label, reduction)


@real_only
@of_floats("target")
def linear_cross_entropy(
    input: TensorLike,
    linear_weight: TensorLike,
    target: TensorLike,
    *,
    linear_bias: TensorLike | None = None,
    weight: TensorLike | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target)``.  Raises as both do."""
    logits = linear(input, linear_weight, linear_bias)
    ignored = -100 if ignore_index is None else ignore_index
    return cross_entropy(logits, target, weight, ignored, reduction, label_smoothing)


@real_only
@of_floats()
@in_float32
def binary_cross_entropy(
    input: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean"
) -> Tensor:
    """``-(target * log(p) + (1 - target) * log(1 - p))`` for probabilities p; logarithms stop at -100, as in PyTorch.

    The gradient of a stopped logarithm is 0.  Raises ShapeError unless input and target have one shape.
    """
    p, y = same_shape("binary_cross_entropy", input, target)
    loss = -(y * _stopped_log(p) + (1 - y) * _stopped_log(1 - p))
    return reduced("binary_cross_entropy", loss if weight is None else loss * weight, reduction)


def _stopped_log(x: Tensor) -> Tensor:
    """``max(log(x), -100)`` with gradient 0 where it stops."""
    above = x > 3.720075976020836e-44  # exp(-100)
    return ops.where(above, ops.log(ops.where(above, x, 1)), -100.0)


@real_only
@of_floats()
@in_float32
def binary_cross_entropy_with_logits(
    input: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean",
    pos_weight: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """``-(target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x)))`` without overflow.  Raises ShapeError."""
    x, y = same_shape("binary_cross_entropy_with_logits", input, target)
    positive = y * ops.softplus(-x)
    loss = (positive if pos_weight is None else positive * pos_weight) + (1.0 - y) * ops.softplus(x)
    return reduced("binary_cross_entropy_with_logits", loss if weight is None else loss * weight, reduction)


@real_only
@of_floats()
@in_float32
def kl_div(input: TensorLike, target: TensorLike, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """``target * (log(target) - input)``: input holds logarithms, target probabilities or, if so said, logarithms.

    ``reduction="batchmean"``: the sum over the length of the first axis.  Where a target is not positive its logarithm
    counts as 0.  Raises ShapeError unless they broadcast.
    """
    x, t = ops.asarray(input), ops.asarray(target)
    if log_target:
        losses = ops.exp(t) * (t - x)
    else:
        some = t > 0
        losses = ops.where(some, t * ops.log(ops.where(some, t, 1)), 0) - t * x
    if reduction == "batchmean":
        return ops.sum(losses) / max(1, x.shape[0] if x.ndim else 1)
    return reduced("kl_div", losses, reduction)


@real_only
@of_floats()
@in_float32
def soft_margin_loss(input: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """``log(1 + exp(-target * input))`` for targets 1 and -1, without overflow.  Raises ShapeError."""
    x, y = same_shape("soft_margin_loss", input, target)
    return reduced("soft_margin_loss", ops.softplus(-y * x), reduction)


@real_only
@of_floats()
@in_float32
def multilabel_soft_margin_loss(
    input: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: str = "mean"
) -> Tensor:
    """The mean over the last axis of ``binary_cross_entropy_with_logits``; input and target: (..., c).

    Raises ShapeError.
    """
    x, y = same_shape("multilabel_soft_margin_loss", input, target)
    losses = y * ops.softplus(-x) + (1 - y) * ops.softplus(x)
    losses = ops.mean(losses if weight is None else losses * weight, axis=-1)
    return reduced("multilabel_soft_margin_loss", losses, reduction)


def _class_axis_last(x: Tensor, axis: int) -> Tensor:
    order = (*(a for a in range(x.ndim) if a != axis), axis)
    return x if axis == x.ndim - 1 else ops.permute_dims(x, order)


def at_label(logp: Tensor, labels: Tensor) -> Tensor:
    """The entry of each label; logp: (..., c), labels and result: (...).  Other entries may be infinite."""
    of_class = ops.arange(logp.shape[-1], device=logp.device) == ops.expand_dims(labels, axis=-1)
    return ops.sum(ops.where(of_class, logp, 0.0), axis=-1)


def checked_labels(
    who: str, target: Tensor, shape: tuple[int, ...], classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Which labels count, and the labels with 0 for those that do not."""
    checks.integers(who, "labels", target)
    if target.shape != shape:
        raise ShapeError(f"{who}: wanted labels of shape {shape}, got {target.shape}")
    target = ops.astype(target, "int64")  # narrow and unsigned dtypes cannot hold every `ignore_index`
    kept = target != ignore_index
    labels = ops.where(kept, target, 0)
    checks.within(who, "labels", labels, classes)
    return kept, labels


def class_weights(who: str, weight: TensorLike, classes: int) -> Tensor:
    """One weight for each class.  Raises ShapeError."""
    w = ops.asarray(weight)
    if w.shape != (classes,):
        raise ShapeError(f"{who}: wanted weight ({classes},), got {w.shape}")
    return w


def same_shape(who: str, input: TensorLike, target: TensorLike) -> tuple[Tensor, Tensor]:
    """Both as tensors.  Raises ShapeError unless they have one shape: they do not broadcast."""
    x, y = ops.asarray(input), ops.asarray(target)
    if x.shape != y.shape:
        raise ShapeError(f"{who}: wanted input and target of one shape, got {x.shape} and {y.shape}")
    return x, y


@in_float32
def _weighted(who: str, losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """The mean of weighted losses is their sum over the sum of weights (NaN where that is 0, as in PyTorch)."""
    if reduction == "mean":
        total = ops.sum(weights)
        return ops.where(total == 0, math.nan, ops.sum(losses) / ops.where(total == 0, 1, total))
    return reduced(who, losses, reduction)


def reduced(who: str, losses: Tensor, reduction: str) -> Tensor:
    """The mean, the sum, or the losses themselves.  Raises TapegradError for another word."""
    if reduction == "mean":
        return ops.mean(losses)
    if reduction == "sum":
        return ops.sum(losses)
    if reduction != "none":
        raise TapegradError(f'{who}: wanted reduction "mean", "sum" or "none", got {reduction!r}')
    return losses
