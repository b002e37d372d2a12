"""Losses with margins, of pairs, triplets and classes, with torch's and Chainer's names, order and defaults.

At a kink, where a margin is met exactly, the gradient is that of the side that is not flat, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.nn.functional.norm import p_norm
from tapegrad.nn.losses.classification import at_label, checked_labels, class_weights, reduced, same_shape
from tapegrad.nn.losses.distances import pairwise_distance
from tapegrad.nn.losses.regression import chainers
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "contrastive", "cosine_embedding_loss", "cross_covariance", "decov",
    "discriminative_margin_based_clustering_loss", "hinge", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
]  # fmt: skip


def _above(x: Tensor) -> Tensor:
    """``max(x, 0)`` whose gradient at 0 is 1."""
    return ops.maximum(x, 0)


@real_only
@of_floats()
@in_float32
def hinge_embedding_loss(input: TensorLike, target: TensorLike, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """A distance where the target is 1, ``max(0, margin - input)`` where it is -1.  Raises ShapeError."""
    x, y = same_shape("hinge_embedding_loss", input, target)
    losses = ops.where(y != 1, _above(margin - x), 0) + ops.where(y != -1, x, 0)
    return reduced("hinge_embedding_loss", losses, reduction)


@real_only
@of_floats()
@in_float32
def margin_ranking_loss(
    input1: TensorLike, input2: TensorLike, target: TensorLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """``max(0, -target * (input1 - input2) + margin)``: target 1 wants the first larger, -1 the second.

    Raises ShapeError unless they broadcast.
    """
    x, y, t = ops.asarray(input1), ops.asarray(input2), ops.asarray(target)
    if not x.ndim == y.ndim == t.ndim:
        raise ShapeError(f"margin_ranking_loss: wanted arrays of one rank, got {x.shape}, {y.shape}, {t.shape}")
    return reduced("margin_ranking_loss", _above(-t * (x - y) + margin), reduction)


@real_only
@of_floats()
@in_float32
def cosine_embedding_loss(
    input1: TensorLike, input2: TensorLike, target: TensorLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """``1 - cos`` where the target is 1, ``max(0, cos - margin)`` where it is -1, with the cosine of the two vectors.

    input1 and input2: (n, k) with target (n,), or (k,) with ().  Raises ShapeError.
    """
    (x, y), t = same_shape("cosine_embedding_loss", input1, input2), ops.asarray(target)
    if x.ndim not in (1, 2) or t.shape != x.shape[:-1]:
        raise ShapeError(
            f"cosine_embedding_loss: wanted (n, k), (n, k), (n,) or (k,), (k,), (); got {x.shape}, {t.shape}"
        )
    sizes = (ops.sum(ops.square(a), axis=-1) + 1e-12 for a in (x, y))
    cosine = ops.sum(x * y, axis=-1) / ops.sqrt(next(sizes) * next(sizes))
    losses = ops.where(t == 1, 1 - cosine, 0) + ops.where(t == -1, _above(cosine - margin), 0)
    return reduced("cosine_embedding_loss", losses, reduction)


@of_floats()
@in_float32
def triplet_margin_loss(
    anchor: TensorLike, positive: TensorLike, negative: TensorLike, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``max(0, d(anchor, positive) - d(anchor, negative) + margin)`` with ``pairwise_distance``; (..., k) each.

    ``swap``: the nearer of d(anchor, negative) and d(positive, negative) (Balntas et al., 2016).  Raises ShapeError.
    """
    distance = lambda x, y: pairwise_distance(x, y, p, eps)
    return _triplet("triplet_margin_loss", anchor, positive, negative, distance, margin, swap, reduction)


@of_floats()
def triplet_margin_with_distance_loss(
    anchor: TensorLike, positive: TensorLike, negative: TensorLike, *, distance_function: Callable[[Tensor, Tensor],
    Tensor] | None = None,
    margin: float = 1.0, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """As :func:`triplet_margin_loss` with another distance function, by default ``pairwise_distance``."""
    distance = distance_function or pairwise_distance
    return _triplet("triplet_margin_with_distance_loss", anchor, positive, negative, distance, margin, swap, reduction)


def _triplet(
    op: str, anchor: TensorLike, positive: TensorLike, negative: TensorLike,
    distance: Callable[[Tensor, Tensor], Tensor], margin: float, swap: bool, reduction: str,
) -> Tensor:  # fmt: skip
    if margin <= 0:
        raise TapegradError(f"{op}: margin must be positive, got {margin}")
    a, p, n = ops.asarray(anchor), ops.asarray(positive), ops.asarray(negative)
    if not a.ndim == p.ndim == n.ndim:
        raise ShapeError(f"{op}: wanted arrays of one rank, got {a.shape}, {p.shape}, {n.shape}")
    apart = distance(a, n)
    if swap:
        apart = ops.minimum(apart, distance(p, n))
    return reduced(op, _above(margin + distance(a, p) - apart), reduction)


@real_only
@of_floats("target")
@in_float32
def multi_margin_loss(
    input: TensorLike, target: TensorLike, p: int = 1, margin: float = 1.0, weight: TensorLike | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``sum over other classes of max(0, margin - x[label] + x)**p / c``; input: (n, c) or (c,), target: (n,) or ().

    ``weight``: (c,), by the label's class.  Raises ShapeError, DTypeError, IndexingError, TapegradError.
    """
    op, x, t = "multi_margin_loss", ops.asarray(input), ops.asarray(target)
    if x.ndim not in (1, 2) or not x.shape[-1]:
        raise ShapeError(f"{op}: wanted input (n, classes) or (classes,), got {x.shape}")
    if p not in (1, 2):
        raise TapegradError(f"{op}: p must be 1 or 2, got {p}")
    if t.ndim == x.ndim == 1 and t.size == 1:
        t = ops.reshape(t, ())
    classes = x.shape[-1]
    _, labels = checked_labels(op, t, x.shape[:-1], classes, -100)
    losses = _above(margin - ops.expand_dims(at_label(x, labels), axis=-1) + x) ** p
    if weight is not None:
        of_label = ops.take(class_weights(op, weight, classes), labels, axis=0)
        losses = losses * ops.expand_dims(of_label, axis=-1)
    other = ops.arange(classes, device=x.device) != ops.expand_dims(labels, axis=-1)
    return reduced(op, ops.sum(ops.where(other, losses, 0), axis=-1) / classes, reduction)


@real_only
@of_floats("target")
@in_float32
def multilabel_margin_loss(input: TensorLike, target: TensorLike, reduction: str = "mean") -> Tensor:
    """The sum over labels i and other classes j of ``max(0, 1 - (x[i] - x[j])) / c``.

    input: (n, c) or (c,); target: integers of that shape, of which those before the first -1 are labels.
    Raises ShapeError, DTypeError, IndexingError.
    """
    op = "multilabel_margin_loss"
    x, t = same_shape(op, input, target)
    if x.ndim not in (1, 2) or not x.shape[-1]:
        raise ShapeError(f"{op}: wanted input (n, classes) or (classes,), got {x.shape}")
    checks.integers(op, "labels", t)
    valid = ops.cumulative_prod(ops.astype(t >= 0, "int64"), axis=-1) > 0
    labels, classes = ops.where(valid, t, 0), x.shape[-1]
    checks.within(op, "labels", labels, classes)
    hits = ops.expand_dims(labels, axis=-1) == ops.arange(classes, device=x.device)
    is_label = ops.any(ops.logical_and(hits, ops.expand_dims(valid, axis=-1)), axis=-2)
    counted = ops.logical_and(ops.expand_dims(valid, axis=-1), ops.logical_not(ops.expand_dims(is_label, axis=-2)))
    mine = ops.expand_dims(ops.take_along_axis(x, labels, axis=-1), axis=-1)
    losses = ops.where(counted, _above(1 - (mine - ops.expand_dims(x, axis=-2))), 0)
    return reduced(op, ops.sum(losses, axis=(-2, -1)) / classes, reduction)


@real_only
@of_floats("t")
@in_float32
def hinge(x: TensorLike, t: TensorLike, norm: str = "L1", reduce: str = "mean") -> Tensor:
    """``max(0, 1 - s * x)``, s being 1 at the label and -1 elsewhere, or its square for "L2" (Chainer).

    x: (n, c), t: (n,); summed over all, over n for "mean".  Raises ShapeError, DTypeError, IndexingError.
    """
    x, t = ops.asarray(x), ops.asarray(t)
    if x.ndim != 2 or norm not in ("L1", "L2"):
        raise ShapeError(f'hinge: wanted x (n, classes) and norm "L1" or "L2", got {x.shape}, {norm!r}')
    _, labels = checked_labels("hinge", t, x.shape[:1], x.shape[1], -100)
    own = ops.arange(x.shape[1], device=x.device) == ops.expand_dims(labels, axis=-1)
    losses = _above(1 + ops.where(own, -x, x))
    losses = losses if norm == "L1" else ops.square(losses)
    if reduce == "mean":
        return ops.sum(losses) / x.shape[0]
    return reduced("hinge", losses, chainers(reduce))


@real_only
@of_floats()
@in_float32
def contrastive(x0: TensorLike, x1: TensorLike, y: TensorLike, margin: float = 1.0, reduce: str = "mean") -> Tensor:
    """``(y * d**2 + (1 - y) * max(0, margin - d)**2) / 2`` for the distance d of each row (Hadsell et al., 2006).

    x0 and x1: (n, k), y: (n,), 1 for similar ones (Chainer).  Raises ShapeError, TapegradError.
    """
    (a, b), y = same_shape("contrastive", x0, x1), ops.asarray(y)
    if a.ndim != 2 or y.shape != a.shape[:1]:
        raise ShapeError(f"contrastive: wanted x0 (n, k), x1 (n, k), y (n,), got {a.shape}, {y.shape}")
    difference = a - b
    losses = y * ops.sum(ops.square(difference), axis=1)
    losses = losses + (1 - y) * ops.square(_above(margin - p_norm(difference, 2, 1, keepdims=False)))
    return reduced("contrastive", 0.5 * losses, chainers(reduce))


def _half_squares(op: str, covariance: Tensor, reduce: str) -> Tensor:
    if reduce not in ("half_squared_sum", "no"):
        raise TapegradError(f'{op}: reduce must be "half_squared_sum" or "no", got {reduce!r}')
    return covariance if reduce == "no" else 0.5 * ops.sum(ops.square(covariance))


@real_only
@of_floats()
def cross_covariance(y: TensorLike, z: TensorLike, reduce: str = "half_squared_sum") -> Tensor:
    """Half the sum of squares of the covariances of y's and z's columns, (n, k) and (n, m); "no": these (k, m)
    (Cheung et al., arXiv 1412.6583; Chainer).  Raises ShapeError, TapegradError.
    """
    y, z = ops.asarray(y), ops.asarray(z)
    if y.ndim != 2 or z.ndim != 2 or len(y) != len(z) or not len(y):
        raise ShapeError(f"cross_covariance: wanted y (n, k) and z (n, m), got {y.shape}, {z.shape}")
    centred = [a - ops.mean(a, axis=0, keepdims=True) for a in (y, z)]
    return _half_squares("cross_covariance", ops.matmul(centred[0].mT, centred[1]) / len(y), reduce)


@real_only
@of_floats()
def decov(h: TensorLike, reduce: str = "half_squared_sum") -> Tensor:
    """Half the sum of squares of the covariances of h's columns with each other, (n, k); "no": these (k, k)
    (Cogswell et al., arXiv 1511.06068; Chainer).  Raises ShapeError, TapegradError.
    """
    h = ops.asarray(h)
    if h.ndim != 2 or not len(h):
        raise ShapeError(f"decov: wanted h (n, k), got {h.shape}")
    centred = h - ops.mean(h, axis=0, keepdims=True)
    covariance = ops.matmul(centred.mT, centred) / len(h)
    own = ops.eye(h.shape[1], dtype="bool", device=h.device)
    return _half_squares("decov", ops.where(own, 0, covariance), reduce)


@real_only
@of_floats("labels")
def discriminative_margin_based_clustering_loss(
    embeddings: TensorLike, labels: TensorLike, delta_v: float, delta_d: float, max_embedding_dim: int, norm: int = 1,
    alpha: float = 1.0, beta: float = 1.0, gamma: float = 0.001,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pixels of an instance drawn together, instances pushed apart, means kept small: three losses
    (De Brabandere et al., arXiv 1708.02551; Chainer).

    embeddings: (n, max_embedding_dim, h, w); labels: (n, h, w), the instances from 1 on; norm: 1 or 2.
    Raises ShapeError, TapegradError.
    """
    op, x, marks = "discriminative_margin_based_clustering_loss", ops.asarray(embeddings), ops.asarray(labels)
    if norm not in (1, 2):
        raise TapegradError(f"{op}: norm must be 1 or 2, got {norm}")
    count = max_embedding_dim
    if x.ndim != 4 or x.shape[1] != count or marks.shape != (x.shape[0], *x.shape[2:]):
        raise ShapeError(f"{op}: wanted (n, {count}, h, w) and (n, h, w), got {x.shape}, {marks.shape}")
    instances = ops.reshape(ops.arange(1, count + 1, device=x.device), (count, 1, 1, 1))
    masks = ops.astype(ops.expand_dims(marks == instances, axis=2), x.dtype)  # (instances, n, 1, h, w)
    sizes = ops.sum(masks, axis=(2, 3, 4))
    means = ops.sum(x * masks, axis=(3, 4)) / ops.maximum(ops.expand_dims(sizes, axis=2), 1)
    small = ops.sum(p_norm(means, norm, (1, 2), keepdims=False)) / (count * x.shape[0])
    spread = p_norm((means[..., None, None] - x) * masks, norm, 2, keepdims=False)
    near = ops.sum(ops.square(ops.relu(spread - delta_v)), axis=(1, 2, 3)) / ops.maximum(ops.sum(sizes, axis=1), 1)
    a = [i for i in range(count) for _ in range(i + 1, count)]
    b = [j for i in range(count) for j in range(i + 1, count)]
    far = ops.zeros((), dtype=x.dtype, device=x.device)
    if a:
        gaps = p_norm(ops.take(means, a, axis=0) - ops.take(means, b, axis=0), norm, 2, keepdims=False)
        far = ops.sum(ops.square(ops.relu(2 * delta_d - gaps))) / (len(a) * x.shape[0])
    return alpha * (ops.sum(near) / count), beta * far, gamma * small
