"""Linear maps and tables under torch.nn.functional's names: linear, bilinear, embeddings, one-hot vectors."""

from __future__ import annotations

from tapegrad import ops
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.ops.casting import by_policy
from tapegrad.ops.dispatch import of_floats
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["bilinear", "embedding", "embedding_bag", "linear", "one_hot"]


@of_floats()
def linear(input: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """``x @ weight.T + bias``; input: (..., k), weight: (units, k) or (k,), bias: (units,).  Raises ShapeError."""
    x, w, b = by_policy("linear", (input, ops.asarray(weight), bias))
    if w.ndim not in (1, 2):
        raise ShapeError(f"linear: wanted a weight (units, k), got {w.shape}")
    y = ops.matmul(x, w.mT if w.ndim == 2 else w)
    return y if b is None else y + b


@of_floats()
def bilinear(input1: TensorLike, input2: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """``x1 @ weight[u] @ x2 + bias[u]`` for each unit u.

    input1: (..., k), input2: (..., m), weight: (units, k, m), bias: (units,), result: (..., units).  Raises ShapeError.
    """
    x, y, w, bias = by_policy("bilinear", (ops.asarray(input1), ops.asarray(input2), ops.asarray(weight), bias))
    if w.ndim != 3 or x.shape[:-1] != y.shape[:-1] or (*x.shape[-1:], *y.shape[-1:]) != w.shape[1:]:
        raise ShapeError(f"bilinear: wanted (..., k), (..., m), (units, k, m), got {x.shape}, {y.shape}, {w.shape}")
    z = ops.einsum("...i,uij,...j->...u", x, w, y)
    return z if bias is None else z + bias


def embedding(
    input: TensorLike, weight: TensorLike, padding_idx: int | None = None, *, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of ``weight``; input: integers (...), weight: (n, k), result: (..., k).

    The row ``padding_idx`` gets no gradient.  ``max_norm``: rows with a larger norm count as shortened to it; unlike
    PyTorch, which writes this into the weight, the table stays as it is.  ``sparse``: the gradient of the weight that
    ``tape.gradient`` gives is a ``tg.IndexedSlices`` of the rows read (see ``tg.take``).  Raises IndexingError,
    DTypeError.
    """
    indices, table = ops.asarray(input), ops.asarray(weight)
    checks.integers("embedding", "input", indices)
    rows = ops.take(table, indices, axis=0, sparse_grad=sparse)
    if padding_idx is not None:
        padding = indices == _row("embedding", padding_idx, table.shape[0])
        rows = ops.where(ops.expand_dims(padding, axis=-1), stop_gradient(rows), rows)
    if max_norm is not None:
        rows = rows * _shortening(rows, max_norm, norm_type)
    if scale_grad_by_freq:
        counts = _frequencies(indices, table.shape[0], table)
        share = rows / ops.expand_dims(ops.take(counts, indices, axis=0), axis=-1)
        rows = share + stop_gradient(rows - share)
    return rows


def _row(op: str, index: int, n: int) -> int:
    if not -n <= index < n:
        raise ShapeError(f"{op}: padding_idx {index} is not one of {n} rows")
    return index % n


def _frequencies(indices: Tensor, n: int, beside: Tensor) -> Tensor:
    """How often each of ``n`` rows is named, as numbers of the dtype of ``beside``."""
    ones = ops.ones(indices.shape, dtype=beside.dtype, device=beside.device)
    return ops.zeros((n,), dtype=beside.dtype, device=beside.device).at[indices].add(ones)


def _shortening(rows: Tensor, most: float, p: float) -> Tensor:
    """The factor that shortens each row to the norm ``most``; PyTorch does it outside the tape, and so does this."""
    norm = ops.sum(ops.abs(rows) ** p, axis=-1, keepdims=True) ** (1.0 / p)
    return stop_gradient(ops.where(norm > most, most / (norm + 1e-7), 1.0))


def embedding_bag(
    input: TensorLike, weight: TensorLike, offsets: TensorLike | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, *, per_sample_weights: TensorLike | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Sums, means or maxima of bags of rows of ``weight``; an empty bag gives zeros.

    input: integers (bags, m), or (m,) with ``offsets`` (bags,), where each bag begins; weight: (n, k); result: (bags,
    k).  ``per_sample_weights``: shaped as input, for sums only.  Entries ``padding_idx`` do not count.  A maximum's
    gradient goes to the first of equal ones.  ``sparse``: as of :func:`embedding`.  Raises ShapeError,
    DTypeError, IndexingError, TapegradError.
    """
    op, indices = "embedding_bag", ops.asarray(input)
    checks.integers(op, "input", indices)
    if mode not in ("sum", "mean", "max"):
        raise TapegradError(f'{op}: wanted mode "sum", "mean" or "max", got {mode!r}')
    if indices.ndim not in (1, 2) or (indices.ndim == 2) != (offsets is None):
        raise ShapeError(f"{op}: wanted input (bags, m), or (m,) with offsets; got {indices.shape}")
    if per_sample_weights is not None and mode != "sum":
        raise TapegradError(f'{op}: per_sample_weights are for mode "sum", not {mode!r}')
    table = ops.asarray(weight)
    rows = embedding(
        indices, table, None, max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )  # fmt: skip
    counted = ops.ones(indices.shape, dtype="bool", device=rows.device)
    if padding_idx is not None:
        counted = indices != _row(op, padding_idx, table.shape[0])
    if per_sample_weights is not None:
        scale = ops.asarray(per_sample_weights)
        if scale.shape != indices.shape:
            raise ShapeError(f"{op}: wanted per_sample_weights {indices.shape}, got {scale.shape}")
        rows = rows * ops.expand_dims(scale, axis=-1)
    if offsets is not None:
        rows, counted = _in_bags(op, rows, counted, ops.asarray(offsets), include_last_offset)
    return _pooled(rows, ops.expand_dims(counted, axis=-1), mode)


def _pooled(rows: Tensor, counted: Tensor, mode: str) -> Tensor:
    """(bags, m, k) with (bags, m, 1), which ones count, to (bags, k)."""
    if not rows.shape[1]:
        return ops.zeros((rows.shape[0], rows.shape[2]), dtype=rows.dtype, device=rows.device)
    if mode == "max":
        best = ops.argmax(ops.where(counted, rows, -float("inf")), axis=1, keepdims=True)
        largest = ops.take_along_axis(rows, best, axis=1)[:, 0]
        return ops.where(ops.any(counted, axis=1), largest, 0)
    total = ops.sum(ops.where(counted, rows, 0), axis=1)
    if mode == "sum":
        return total
    return total / ops.maximum(ops.sum(ops.astype(counted, rows.dtype), axis=1), 1)


def _in_bags(op: str, rows: Tensor, counted: Tensor, offsets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """(m, k) as (bags, longest, k), and which entries are there.  The offsets are needed on the host."""
    if offsets.ndim != 1 or "int" not in str(offsets.dtype):
        raise DTypeError(f"{op}: wanted integer offsets (bags,), got {offsets.dtype} {offsets.shape}")
    starts = offsets.tolist()
    ends = starts[1:] if last else [*starts[1:], rows.shape[0]]
    starts = starts[: len(ends)]
    if any(a > b or a < 0 for a, b in zip(starts, ends)) or (starts and (starts[0] or ends[-1] > rows.shape[0])):
        raise ShapeError(f"{op}: offsets must begin at 0, ascend and end within input, got {starts}")
    most = max((b - a for a, b in zip(starts, ends)), default=0)
    if not most:
        bags = (len(ends), 0)
        return ops.reshape(rows[:0], (*bags, rows.shape[1])), ops.reshape(counted[:0], bags)
    places = [[min(a + j, rows.shape[0] - 1) for j in range(most)] for a in starts]
    there = [[a + j < b for j in range(most)] for a, b in zip(starts, ends)]
    at = ops.asarray(places, dtype="int64", device=rows.device)
    inside = ops.asarray(there, dtype="bool", device=rows.device)
    return ops.take(rows, at, axis=0), ops.logical_and(inside, ops.take(counted, at, axis=0))


def one_hot(tensor: TensorLike, num_classes: int = -1) -> Tensor:
    """1 at the position of the label, else 0, as int64; (...) -> (..., num_classes), by default the largest plus one.

    Raises DTypeError for labels that are not integers, IndexingError for one outside the classes.
    """
    labels = ops.asarray(tensor)
    checks.integers("one_hot", "labels", labels)
    if num_classes == -1:
        if not labels.size:
            raise ShapeError(f"one_hot: labels {labels.shape} are empty; give num_classes")
        num_classes = int(ops.max(labels).item()) + 1
    checks.within("one_hot", "labels", labels, num_classes)
    return ops.astype(ops.one_hot(labels, num_classes), "int64")
