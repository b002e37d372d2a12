"""Losses over a few drawn classes of many, as Chainer has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks
from tapegrad.nn.functional.activations import log1mexp
from tapegrad.nn.losses.classification import reduced
from tapegrad.nn.losses.regression import chainers
from tapegrad.ops.dispatch import of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["black_out", "negative_sampling"]


def _rows(op: str, x: TensorLike, t: TensorLike, W: TensorLike) -> tuple[Tensor, Tensor, Tensor]:
    x, t, w = ops.asarray(x), ops.asarray(t), ops.asarray(W)
    checks.integers(op, "labels", t)
    if x.ndim != 2 or w.ndim != 2 or t.shape != x.shape[:1] or x.shape[1] != w.shape[1]:
        raise ShapeError(f"{op}: wanted x (n, k), t (n,), W (classes, k), got {x.shape}, {t.shape}, {w.shape}")
    return x, t, w


def _scores(w: Tensor, at: Tensor, x: Tensor) -> Tensor:
    """The products of each x with the rows of its classes: (n, m) indices -> (n, m)."""
    return ops.matmul(ops.take(w, at, axis=0), ops.expand_dims(x, axis=-1))[..., 0]


@real_only
@of_floats("t", "samples")
def black_out(x: TensorLike, t: TensorLike, W: TensorLike, samples: TensorLike, reduce: str = "mean") -> Tensor:
    """``-log p(label) - sum of log(1 - p(sample))`` of the softmax over the label and the samples (Ji et al., arXiv
    1511.06909; Chainer).

    x: (n, k), t: (n,), W: (classes, k), samples: (n, m), classes drawn.  Raises ShapeError, DTypeError, IndexingError.
    """
    x, t, w = _rows("black_out", x, t, W)
    drawn = ops.asarray(samples)
    checks.integers("black_out", "samples", drawn)
    if drawn.ndim != 2 or drawn.shape[0] != x.shape[0]:
        raise ShapeError(f"black_out: wanted samples ({x.shape[0]}, m), got {drawn.shape}")
    own, other = _scores(w, ops.expand_dims(t, axis=1), x), _scores(w, drawn, x)
    total = ops.logsumexp(ops.concat([own, other], axis=1), axis=1, keepdims=True)
    losses = -((own - total)[:, 0] + ops.sum(log1mexp(total - other), axis=1))
    return reduced("black_out", losses, chainers(reduce))


@real_only
@of_floats("t")
def negative_sampling(
    x: TensorLike, t: TensorLike, W: TensorLike, sampler: Callable[[tuple[int, int]], Any], sample_size: int,
    reduce: str = "sum", *, return_samples: bool = False,
) -> Any:  # fmt: skip
    """``softplus(-x . W[label]) + sum of softplus(x . W[sample])`` (Mikolov et al., arXiv 1310.4546; Chainer).

    x: (n, k), t: (n,), where -1 does not count, W: (classes, k); ``sampler((n, sample_size))`` draws classes.
    ``return_samples``: these, too.  Raises ShapeError, DTypeError, IndexingError.
    """
    x, t, w = _rows("negative_sampling", x, t, W)
    drawn = ops.asarray(sampler((x.shape[0], sample_size)))
    kept = t != -1
    own = _scores(w, ops.expand_dims(ops.where(kept, t, 0), axis=1), x)[:, 0]
    losses = ops.softplus(-own) + ops.sum(ops.softplus(_scores(w, drawn, x)), axis=1)
    losses = reduced("negative_sampling", ops.where(kept, losses, 0), chainers(reduce))
    return (losses, drawn) if return_samples else losses
