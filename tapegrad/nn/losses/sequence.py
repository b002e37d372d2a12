"""Losses of sequences: connectionist temporal classification, and linear chains of conditional random fields.

Both are sums over all paths, computed forwards step by step in logarithms: plain loops on the tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks
from tapegrad.nn.losses.classification import at_label, reduced
from tapegrad.nn.losses.regression import chainers
from tapegrad.ops.dispatch import of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["argmax_crf1d", "crf1d", "ctc_loss"]


@real_only
@of_floats("targets", "input_lengths", "target_lengths")
def ctc_loss(
    log_probs: TensorLike, targets: TensorLike, input_lengths: TensorLike, target_lengths: TensorLike, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """``-log`` of the probability of all alignments that read as the target (Graves et al., 2006).

    log_probs: (t, n, c), or (t, c) of one sequence, as ``log_softmax`` gives them; targets: integers (n, s), or one
    after the other (sum of lengths,); lengths: (n,) or numbers.  "mean": of each loss over its target's length.  A
    target that cannot be reached costs infinity, with gradient 0, or with ``zero_infinity`` nothing.

    The gradient is that of this function of log_probs; PyTorch's differs by what log_softmax takes away again.
    Raises ShapeError, DTypeError, IndexingError.
    """
    x, t = ops.asarray(log_probs), ops.asarray(targets)
    alone = x.ndim == 2
    if alone:
        x = ops.expand_dims(x, axis=1)
    if x.ndim != 3 or not x.shape[0]:
        raise ShapeError(f"ctc_loss: wanted log_probs (t, n, c) or (t, c), got {x.shape}")
    steps, n, classes = x.shape
    if not 0 <= blank < classes:
        raise ShapeError(f"ctc_loss: blank {blank} is not one of {classes} classes")
    long, short = (_lengths(name, a, n) for name, a in (("input", input_lengths), ("target", target_lengths)))
    if max(long, default=0) > steps:
        raise ShapeError(f"ctc_loss: input_lengths {long} exceed the {steps} steps of log_probs")
    labels = _padded(t, short, blank)
    checks.within("ctc_loss", "labels", labels, classes)
    losses = -_ctc(x, ops.clip(labels, 0, classes - 1), long, short, blank)  # on a GPU the error comes later
    reached = losses < _IMPOSSIBLE[str(x.dtype) == "float16"] / 2
    losses = ops.where(reached, losses, 0.0 if zero_infinity else float("inf"))
    if reduction == "mean":
        counts = ops.asarray([max(1, s) for s in short], dtype=x.dtype, device=x.device)
        return ops.mean(losses / counts)
    return reduced("ctc_loss", ops.squeeze(losses, axis=0) if alone and reduction == "none" else losses, reduction)


_IMPOSSIBLE = (1e30, 3e4)
"""The cost of what cannot be, for all dtypes but float16 and for that: finite, so that differences are not NaN."""


def _lengths(name: str, given: Any, n: int) -> list[int]:
    """Lengths on the host, where they shape the loop."""
    a = ops.asarray(given)
    checks.integers("ctc_loss", f"{name}_lengths", a)
    counts = ops.reshape(a, (-1,)).tolist()
    if len(counts) != n or any(k < 0 for k in counts):
        raise ShapeError(f"ctc_loss: wanted {n} {name}_lengths >= 0, got {a.shape}")
    return counts


def _padded(t: Tensor, lengths: list[int], blank: int) -> Tensor:
    """Targets as (n, longest), with blanks after the end."""
    checks.integers("ctc_loss", "targets", t)
    n, most = len(lengths), max(lengths, default=0)
    if t.ndim == 1 and t.shape[0] == sum(lengths):
        starts = [sum(lengths[:i]) for i in range(n)]
        places = [[s + j if j < k else 0 for j in range(most)] for s, k in zip(starts, lengths)]
        if not most or not n:
            return ops.zeros((n, most), dtype="int64", device=t.device)
        rows = ops.take(t, ops.asarray(places, dtype="int64", device=t.device), axis=0)
    elif t.ndim == 2 and t.shape[0] == n and t.shape[1] >= most:
        rows = t[:, :most]
    else:
        raise ShapeError(f"ctc_loss: targets {t.shape} do not hold {lengths} labels; wanted (n, s) or all in a row")
    ends = ops.asarray(lengths, dtype="int64", device=t.device)
    inside = ops.arange(most, device=t.device) < ops.expand_dims(ends, axis=1)
    return ops.astype(ops.where(inside, rows, blank), "int64")


def _ctc(x: Tensor, labels: Tensor, long: list[int], short: list[int], blank: int) -> Tensor:
    """The logarithm of the probability of each target; x: (t, n, c), labels: (n, s)."""
    (n, most), device = labels.shape, x.device
    never = -_IMPOSSIBLE[str(x.dtype) == "float16"]
    apart = ops.stack([labels, ops.full_like(labels, blank)], axis=-1)
    states = ops.pad(ops.reshape(apart, (n, 2 * most)), ((0, 0), (1, 0)), constant_values=blank)  # blanks in between
    x = ops.where(x > never, x, never)
    emitted = ops.take_along_axis(x, ops.expand_dims(states, axis=0), axis=-1)  # (t, n, 2 s + 1)
    before = ops.pad(states[:, :-2], ((0, 0), (2, 0)), constant_values=blank) if most else states
    skips = ops.logical_and(states != blank, states != before)
    first = ops.arange(2 * most + 1, device=device) < 2
    alpha = ops.where(first, emitted[0], never)
    ends = ops.expand_dims(ops.asarray(long, dtype="int64", device=device), axis=1)
    for step in range(1, max(long, default=0)):
        one, two = (_moved(alpha, k, never) for k in (1, 2))
        total = ops.logaddexp(ops.logaddexp(alpha, one), ops.where(skips, two, never)) + emitted[step]
        alpha = ops.where(step < ends, ops.maximum(total, never), alpha)
    last = ops.asarray([[2 * k, max(0, 2 * k - 1)] for k in short], dtype="int64", device=device)
    last = ops.reshape(last, (n, 2))
    final = ops.take_along_axis(alpha, last, axis=1)
    none = ops.asarray([k == 0 for k in short], dtype="bool", device=device)
    score = ops.where(none, final[:, 0], ops.logaddexp(final[:, 0], final[:, 1]))
    # Without steps only the empty target can be.
    stepless = ops.asarray([k == 0 for k in long], dtype="bool", device=device)
    return ops.where(stepless, ops.where(none, 0.0, never), score)


def _moved(x: Tensor, by: int, fill: float) -> Tensor:
    """States moved up by ``by`` places."""
    return ops.pad(x, ((0, 0), (by, 0)), constant_values=fill)[:, : x.shape[1]]


def _chain(op: str, cost: TensorLike, xs: Sequence[TensorLike]) -> tuple[Tensor, list[Tensor]]:
    c, steps = ops.asarray(cost), [ops.asarray(x) for x in xs]
    shapes = [x.shape for x in steps]
    if not steps or c.ndim != 2 or any(len(s) != 2 or c.shape != (s[1], s[1]) for s in shapes):
        raise ShapeError(f"{op}: wanted cost (k, k) and xs of (batch, k), got {c.shape} and {shapes}")
    if any(a[0] < b[0] for a, b in zip(shapes, shapes[1:])):
        raise ShapeError(f"{op}: batches must not grow from step to step (longest sequences first), got {shapes}")
    return c, steps


@real_only
@of_floats("ys")
def crf1d(cost: TensorLike, xs: Sequence[TensorLike], ys: Sequence[TensorLike], reduce: str = "mean") -> Tensor:
    """``-log`` of the probability of label sequences in a linear chain (Lafferty et al., 2001; Chainer).

    cost: (k, k), from label to label; xs: for each step (batch, k), the labels' scores; ys: for each step (batch,).
    Sequences that end drop out of the batch, longest first.  Raises ShapeError, DTypeError, IndexingError.
    """
    c, steps = _chain("crf1d", cost, xs)
    labels = [ops.asarray(y) for y in ys]
    if [y.shape for y in labels] != [x.shape[:1] for x in steps]:
        raise ShapeError(f"crf1d: wanted labels of shapes {[x.shape[:1] for x in steps]}")
    for y in labels:
        checks.integers("crf1d", "labels", y)
        checks.within("crf1d", "labels", y, c.shape[0])
    alpha, score, ended = steps[0], at_label(steps[0], labels[0]), []
    for x, y, before in zip(steps[1:], labels[1:], labels):
        batch = x.shape[0]
        if alpha.shape[0] > batch:
            ended.append(ops.logsumexp(alpha[batch:], axis=1) - score[batch:])
        alpha = ops.logsumexp(ops.expand_dims(alpha[:batch], axis=2) + c, axis=1) + x
        score = score[:batch] + at_label(x, y) + at_label(ops.take(c, before[:batch], axis=0), y)
    losses = ops.concat([ops.logsumexp(alpha, axis=1) - score, *ended[::-1]], axis=0)
    return reduced("crf1d", losses, chainers(reduce))


@real_only
@of_floats()
def argmax_crf1d(cost: TensorLike, xs: Sequence[TensorLike]) -> tuple[Tensor, list[Tensor]]:
    """The largest score of a label sequence in a linear chain, (batch,), and for each step its labels (Viterbi, 1967).

    cost and xs: as of :func:`crf1d`.  Of equal paths the one with the first label counts, and gets the gradient.
    Raises ShapeError.
    """
    c, steps = _chain("argmax_crf1d", cost, xs)
    alpha, came = steps[0], []
    ended: list[Tensor] = []
    for x in steps[1:]:
        ended.append(alpha[x.shape[0] :])
        scores = ops.expand_dims(alpha[: x.shape[0]], axis=2) + c
        best = ops.argmax(scores, axis=1, keepdims=True)
        came.append(best[:, 0])
        alpha = ops.take_along_axis(scores, best, axis=1)[:, 0] + x
    score, labels = _best(alpha)
    path = [labels]
    for best, rest in zip(came[::-1], ended[::-1]):
        labels = ops.take_along_axis(best, ops.expand_dims(labels, axis=1), axis=1)[:, 0]
        if rest.shape[0]:
            more, others = _best(rest)
            score, labels = ops.concat([score, more]), ops.concat([labels, others])
        path.append(labels)
    return score, path[::-1]


def _best(alpha: Tensor) -> tuple[Tensor, Tensor]:
    best = ops.argmax(alpha, axis=1, keepdims=True)
    return ops.take_along_axis(alpha, best, axis=1)[:, 0], best[:, 0]
