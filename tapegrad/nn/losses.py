"""The losses of :mod:`tapegrad.nn.functional`, with torch's names, argument order and defaults."""

from __future__ import annotations

from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.tensor import Tensor


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
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
    axis = 0 if logits.ndim == 1 else 1
    if not logits.ndim:
        raise ShapeError("cross_entropy: wanted input (n, c, ...) or (c,), got a scalar")
    classes, rest = logits.shape[axis], logits.shape[:axis] + logits.shape[axis + 1 :]
    logits = _class_axis_last(logits, axis)
    if weight is not None:
        weight = ops.asarray(weight)
        if weight.shape != (classes,):
            raise ShapeError(f"cross_entropy: wanted weight ({classes},), got {weight.shape}")
    if "float" in str(target.dtype):
        if target.shape != ops.asarray(input).shape:
            raise ShapeError(f"cross_entropy: wanted probabilities shaped as input {input.shape}, got {target.shape}")
        shares = _class_axis_last(target, axis) * (1.0 - label_smoothing) + label_smoothing / classes
        if weight is not None:
            shares = shares * weight
        return _reduced("cross_entropy", -ops.sum(shares * ops.log_softmax(logits, axis=-1), axis=-1), reduction)
    kept, labels = _checked_labels("cross_entropy", target, rest, classes, ignore_index)
    if not label_smoothing and weight is None:
        losses = ops.where(kept, ops.cross_entropy(logits, labels), 0.0)
        return _weighted("cross_entropy", losses, ops.astype(kept, logits.dtype), reduction)
    logp = ops.log_softmax(logits, axis=-1)
    if weight is None:
        weight = ops.ones((classes,), dtype=logits.dtype, device=logits.device)
    of_label = ops.where(kept, ops.take(weight, labels, axis=0), 0.0)
    hard = -_at_label(logp, labels) * of_label
    if not label_smoothing:
        return _weighted("cross_entropy", hard, of_label, reduction)
    soft = ops.where(kept, -ops.sum(weight * logp, axis=-1), 0.0)
    losses = (1.0 - label_smoothing) * hard + (label_smoothing / classes) * soft
    return _weighted("cross_entropy", losses, of_label, reduction)


def nll_loss(input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """``-input`` at the target: ``cross_entropy`` for input that is ``log_softmax`` already; same shapes.

    Raises ShapeError, DTypeError, IndexingError.
    """
    logp, target = ops.asarray(input), ops.asarray(target)
    axis = 0 if logp.ndim == 1 else 1
    if not logp.ndim:
        raise ShapeError("nll_loss: wanted input (n, c, ...) or (c,), got a scalar")
    classes, rest = logp.shape[axis], logp.shape[:axis] + logp.shape[axis + 1 :]
    kept, labels = _checked_labels("nll_loss", target, rest, classes, ignore_index)
    weight = ops.ones((classes,), dtype=logp.dtype, device=logp.device) if weight is None else ops.asarray(weight)
    if weight.shape != (classes,):
        raise ShapeError(f"nll_loss: wanted weight ({classes},), got {weight.shape}")
    of_label = ops.where(kept, ops.take(weight, labels, axis=0), 0.0)
    losses = -_at_label(_class_axis_last(logp, axis), labels) * of_label
    return _weighted("nll_loss", losses, of_label, reduction)


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """``(input - target)**2``.  Raises ShapeError unless both have one shape: no broadcasting by accident."""
    x, y = _same_shape("mse_loss", input, target)
    return _reduced("mse_loss", (x - y) ** 2, reduction)


def l1_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """``|input - target|``.  Raises ShapeError unless both have one shape."""
    x, y = _same_shape("l1_loss", input, target)
    return _reduced("l1_loss", ops.abs(x - y), reduction)


def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """``d**2 / 2`` for ``|d| <= delta``, else ``delta * (|d| - delta / 2)``.  Raises ShapeError."""
    x, y = _same_shape("huber_loss", input, target)
    d = ops.abs(x - y)
    near = ops.minimum(d, delta)
    return _reduced("huber_loss", near * (d - 0.5 * near), reduction)


def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """``huber_loss(delta=beta) / beta``; for beta 0 it is ``l1_loss``.  Raises ShapeError."""
    if beta == 0:
        return l1_loss(input, target, reduction)
    return huber_loss(input, target, reduction, delta=beta) / beta


def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """``-(target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x)))`` without overflow.  Raises ShapeError."""
    x, y = _same_shape("binary_cross_entropy_with_logits", input, target)
    positive = y * ops.softplus(-x)
    loss = (positive if pos_weight is None else positive * pos_weight) + (1.0 - y) * ops.softplus(x)
    return _reduced("binary_cross_entropy_with_logits", loss if weight is None else loss * weight, reduction)


def _class_axis_last(x: Tensor, axis: int) -> Tensor:
    order = (*(a for a in range(x.ndim) if a != axis), axis)
    return x if axis == x.ndim - 1 else ops.permute_dims(x, order)


def _at_label(logp: Tensor, labels: Tensor) -> Tensor:
    """The entry of each label; logp: (..., c), labels and result: (...).  Other entries may be infinite."""
    of_class = ops.arange(logp.shape[-1], device=logp.device) == ops.expand_dims(labels, axis=-1)
    return ops.sum(ops.where(of_class, logp, 0.0), axis=-1)


def _checked_labels(
    who: str, target: Tensor, shape: tuple[int, ...], classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Which labels count, and the labels with 0 in the place of those that do not."""
    checks.integers(who, "labels", target)
    if target.shape != shape:
        raise ShapeError(f"{who}: wanted labels of shape {shape}, got {target.shape}")
    kept = target != ignore_index
    labels = ops.where(kept, target, 0)
    checks.within(who, "labels", labels, classes)
    return kept, labels


def _same_shape(who: str, input: Any, target: Any) -> tuple[Tensor, Tensor]:
    x, y = ops.asarray(input), ops.asarray(target)
    if x.shape != y.shape:
        raise ShapeError(f"{who}: wanted input and target of one shape, got {x.shape} and {y.shape}")
    return x, y


def _weighted(who: str, losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """The mean of weighted losses is their sum over the sum of weights (NaN where that is 0, as in PyTorch)."""
    if reduction == "mean":
        return ops.sum(losses) / ops.sum(weights)
    return _reduced(who, losses, reduction)


def _reduced(who: str, losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return ops.mean(losses)
    if reduction == "sum":
        return ops.sum(losses)
    if reduction != "none":
        raise TapegradError(f'{who}: wanted reduction "mean", "sum" or "none", got {reduction!r}')
    return losses
