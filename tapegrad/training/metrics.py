"""Metrics under Keras' names: figures that add up on the device, batch by batch, and are read when they are wanted.

``update_state`` waits for nothing and may be a part of a captured step (``tg.function``); ``result`` is a tensor, and
reading that waits.  What is added up lives in ``variables``, which are saved like others.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from tapegrad import ops
from tapegrad.core.state import unrecorded
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.variable import Variable


class Metric:
    """The base of metrics.  Subclasses make variables by ``add_variable`` and define ``update_state`` and ``result``.

    A call of the metric is ``update_state``, then ``result``.  Tapes record none of it.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = type(self).__name__ if name is None else name
        self.variables: list[Variable] = []

    def __repr__(self) -> str:
        return f'metric "{self.name}"'

    def add_variable(self, name: str, shape: tuple[int, ...] = (), dtype: DTypeLike = "float64") -> Variable:
        """A variable of zeros on the default device."""
        made = Variable(ops.zeros(shape, dtype), trainable=False, name=f"{self.name}/{name}", category="user")
        self.variables.append(made)
        return made

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Take a batch in; every subclass defines it."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no update_state")

    def result(self) -> Tensor:
        """The figure of all that was taken in; every subclass defines it."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no result")

    def reset_state(self) -> None:
        """Begin anew."""
        for v in self.variables:
            v.assign(ops.zeros(v.shape, v.dtype, device=v.device))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.update_state(*args, **kwargs)
        return self.result()

    def _add(self, variable: Variable, more: Tensor) -> None:
        variable.assign_add(ops.astype(more, variable.dtype).to_device(variable.device))


class Mean(Metric):
    """The mean of all numbers, in float64; 0 before there are any.

    values: real numbers of any shape; sample_weight: broadcasts to it.  Raises ShapeError, DTypeError.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.total, self.count = self.add_variable("total"), self.add_variable("count")

    def update_state(self, values: TensorLike, sample_weight: TensorLike | None = None) -> None:
        unrecorded(self._take, ops.asarray(values), sample_weight)

    def _take(self, values: Tensor, weight: TensorLike | None) -> None:
        if values.dtype.kind == "c":
            raise DTypeError(f"{self}: wanted real numbers, got {values.dtype}")
        values = ops.astype(values, "float64")
        weights = _weights(self, weight, values)
        self._add(self.total, ops.sum(values if weights is None else values * weights))
        count = ops.asarray(float(values.size), dtype="float64") if weights is None else ops.sum(weights)
        self._add(self.count, count)

    def result(self) -> Tensor:
        return unrecorded(lambda: _quotient(self.total.read(), self.count.read()))


class Accuracy(Mean):
    """The share of labels that are equal.

    y_true, y_pred: of one shape; sample_weight: broadcasts to it.  Raises ShapeError.
    """

    def update_state(self, y_true: TensorLike, y_pred: TensorLike, sample_weight: TensorLike | None = None) -> None:  # type: ignore[override]
        unrecorded(lambda: self._take(self._equal(ops.asarray(y_true), ops.asarray(y_pred)), sample_weight))

    def _equal(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        _same(self, y_true, y_pred)
        return y_true == y_pred


class BinaryAccuracy(Accuracy):
    """The share of labels 0 or 1 that scores have right: those above ``threshold`` say 1.

    y_true, y_pred: of one shape.  For logits ``threshold`` is 0.  Raises ShapeError.
    """

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = threshold

    def _equal(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        _same(self, y_true, y_pred)
        return (y_true != 0) == (y_pred > self.threshold)


class CategoricalAccuracy(Accuracy):
    """The share of examples whose largest score is that of the class that has the largest number in ``y_true``.

    y_true (one-hot, say), y_pred: (..., classes), of one shape; sample_weight: broadcasts to (...).  Raises ShapeError.
    """

    def _equal(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        _same(self, y_true, y_pred)
        return ops.argmax(y_true, axis=-1) == ops.argmax(y_pred, axis=-1)


class SparseCategoricalAccuracy(Accuracy):
    """The share of examples whose class has the largest score.

    y_true: integers (...), y_pred: scores (..., classes); sample_weight: broadcasts to (...).  Raises ShapeError.
    """

    def _equal(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        if y_pred.shape[:-1] != y_true.shape or not y_pred.ndim:
            shapes = f"{y_true.shape}, {y_pred.shape}"
            raise ShapeError(f"{self}: wanted y_true (...) and y_pred (..., classes), got {shapes}")
        return y_true == ops.argmax(y_pred, axis=-1)


class ConfusionMatrix(Metric):
    """How many examples of each class (rows) were taken for each class (columns): (num_classes, num_classes).

    y_true: integers (...), y_pred: integers (...) or scores (..., num_classes); sample_weight: broadcasts to (...).
    ``dtype``: "int64", or a float for weights that are not whole.

    Raises ShapeError, DTypeError, IndexingError for a class that is not there (on a GPU at the next waiting).
    """

    def __init__(self, num_classes: int, name: str | None = None, dtype: DTypeLike = "int64") -> None:
        super().__init__(name)
        self.num_classes = checks.positive(self, "num_classes", num_classes)
        self.matrix = self.add_variable("matrix", (num_classes, num_classes), dtype)

    def update_state(self, y_true: TensorLike, y_pred: TensorLike, sample_weight: TensorLike | None = None) -> None:
        unrecorded(lambda: self._take(ops.asarray(y_true), ops.asarray(y_pred), sample_weight))

    def _take(self, y_true: Tensor, y_pred: Tensor, weight: TensorLike | None) -> None:
        k = self.num_classes
        if y_pred.shape == (*y_true.shape, k) and y_pred.shape != y_true.shape:
            y_pred = ops.argmax(y_pred, axis=-1)
        _same(self, y_true, y_pred)
        for name, labels in (("y_true", y_true), ("y_pred", y_pred)):
            checks.integers(self, name, labels)
            checks.within(self, name, labels, k)
        cells = ops.reshape(ops.astype(y_true, "int64") * k + ops.astype(y_pred, "int64"), (y_true.size,))
        weights = _weights(self, weight, y_true)
        every = ops.ones_like(y_true, dtype="float64") if weights is None else weights
        counts = ops.zeros(k * k, dtype="float64", device=cells.device).at[cells].add(ops.reshape(every, cells.shape))
        self._add(self.matrix, ops.reshape(counts, (k, k)))

    def result(self) -> Tensor:
        return self.matrix.read()

    def precision(self) -> Tensor:
        """Of each class, the share that is right of what was taken for it; 0 where nothing was."""
        return unrecorded(self._shares, 0)

    def recall(self) -> Tensor:
        """Of each class, the share of its examples that was recognized; 0 where there are none."""
        return unrecorded(self._shares, 1)

    def _shares(self, axis: int) -> Tensor:
        matrix = ops.astype(self.matrix.read(), "float64")
        right = ops.sum(matrix * ops.eye(self.num_classes, dtype="float64", device=matrix.device), axis=axis)
        return _quotient(right, ops.sum(matrix, axis=axis))


class AUC(Metric):
    """The area under the curve of true over false positives ("ROC"), or of precision over recall ("PR").

    y_true: 0 or 1, y_pred: scores in [0, 1], of one shape (``from_logits``: their logits); sample_weight: broadcasts
    to it.  Scores are sorted into ``num_thresholds - 1`` equal bins: the area under ROC is exact where no bin holds
    scores of both labels, and else wrong by at most half the product of both labels' shares in common bins.  Under PR
    the points are joined as Davis and Goadrich (ICML 2006) say, and as Keras does.

    Raises ShapeError, TapegradError for fewer than 3 thresholds or another curve.
    """

    def __init__(
        self, num_thresholds: int = 200, curve: str = "ROC", name: str | None = None, *, from_logits: bool = False
    ) -> None:
        super().__init__(name)
        if not isinstance(num_thresholds, (int, Integral)) or num_thresholds < 3:
            raise TapegradError(f"{self}: wanted an integer of at least 3 for num_thresholds, got {num_thresholds!r}")
        if curve not in ("ROC", "PR"):
            raise TapegradError(f'{self}: wanted curve "ROC" or "PR", got {curve!r}')
        self.num_thresholds, self.curve, self.from_logits = num_thresholds, curve, from_logits
        self.positives = self.add_variable("positives", (num_thresholds - 1,))
        self.negatives = self.add_variable("negatives", (num_thresholds - 1,))

    def update_state(self, y_true: TensorLike, y_pred: TensorLike, sample_weight: TensorLike | None = None) -> None:
        unrecorded(lambda: self._take(ops.asarray(y_true), ops.asarray(y_pred), sample_weight))

    def _take(self, y_true: Tensor, y_pred: Tensor, weight: TensorLike | None) -> None:
        _same(self, y_true, y_pred)
        scores = ops.sigmoid(y_pred) if self.from_logits else y_pred
        bins = self.num_thresholds - 1
        # What is not a number has no bin of its own: it counts as the lowest score.
        placed = ops.where(ops.isnan(scores), 0.0, ops.clip(ops.astype(scores, "float64"), 0.0, 1.0))
        at = ops.reshape(ops.minimum(ops.astype(ops.floor(placed * bins), "int64"), bins - 1), (scores.size,))
        weights = _weights(self, weight, y_true)
        positive = ops.astype(y_true != 0, "float64")
        for variable, share in ((self.positives, positive), (self.negatives, 1.0 - positive)):
            counted = ops.reshape(share if weights is None else share * weights, at.shape)
            self._add(variable, ops.zeros(bins, dtype="float64", device=at.device).at[at].add(counted))

    def result(self) -> Tensor:
        return unrecorded(self._area)

    def _area(self) -> Tensor:
        """From the highest threshold down: how many of each label are above."""
        none = ops.zeros(1, dtype="float64", device=self.positives.device)
        true, false = (
            ops.concat([none, ops.cumulative_sum(ops.flip(v.read()))]) for v in (self.positives, self.negatives)
        )
        if self.curve == "ROC":
            area = ops.sum((false[1:] - false[:-1]) * (true[1:] + true[:-1]) / 2)
            return _quotient(area, true[-1] * false[-1])
        all_ = true + false
        slope = _quotient(true[1:] - true[:-1], all_[1:] - all_[:-1])
        start = true[:-1] - slope * all_[:-1]
        between = (all_[:-1] > 0) & (all_[1:] > 0)
        ratio = ops.where(between, all_[1:] / ops.where(between, all_[:-1], 1.0), 1.0)
        pieces = slope * (true[1:] - true[:-1] + start * ops.log(ratio))
        return ops.sum(_quotient(pieces, true[-1]))


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """``x / y``, 0 where ``y`` is."""
    return ops.where(y == 0, 0.0, x / ops.where(y == 0, 1.0, y))


def _same(who: Metric, y_true: Tensor, y_pred: Tensor) -> None:
    if y_true.shape != y_pred.shape:
        raise ShapeError(f"{who}: wanted y_true and y_pred of one shape, got {y_true.shape}, {y_pred.shape}")


def _weights(who: Metric, weight: TensorLike | None, values: Tensor) -> Tensor | None:
    if weight is None:
        return None
    given = ops.astype(ops.asarray(weight, device=values.device), "float64")
    try:
        return ops.broadcast_to(given, values.shape)
    except ShapeError:
        raise ShapeError(f"{who}: sample_weight {given.shape} does not broadcast to {values.shape}") from None
