"""Weighted averages, covariances, ranges: statistics beside ``mean`` and ``var``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tapegrad.core.aval import normalize_axes
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import DomainError, DTypeError, ShapeError, TapegradError
from tapegrad.ops.create.creation import full_like
from tapegrad.ops.dispatch import cast, precise, promote, tensor
from tapegrad.ops.elementwise.arithmetic import clip, divide, multiply, sqrt, subtract
from tapegrad.ops.elementwise.comparison import equal, floor, less, not_equal
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.complex_parts import complex_of
from tapegrad.ops.index.bounds import every, require
from tapegrad.ops.products.products import matmul
from tapegrad.ops.reduce.reductions import Axis, max, mean, min, std, sum, var
from tapegrad.ops.reduce.reductions import any as any_of
from tapegrad.ops.shape.arrange import atleast_2d
from tapegrad.ops.shape.diagonals import diag
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, permute_dims, reshape, squeeze
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = ["aminmax", "average", "corrcoef", "cov", "ptp", "std_mean", "var_mean"]


def average(
    a: TensorLike, axis: Axis = None, weights: TensorLike | None = None, returned: bool = False, *,
    keepdims: bool = False,
) -> Any:  # fmt: skip
    """The mean over ``axis`` (None: all), weighted by ``weights``: of the shape of ``a``, or of its axes ``axis``.

    Differentiable in both.  returned: also the sum of the weights.  Raises ShapeError, and ZeroDivisionError where the
    weights sum to 0 (it reads the sums).
    """
    x = tensor("average", a)
    axes = normalize_axes("average", axis, x.ndim)
    if weights is None:
        result = mean(x, axis=axes, keepdims=keepdims)
        return (result, full_like(result, math.prod(x.shape[i] for i in axes))) if returned else result
    w = weights_like("average", weights, x, axis, axes)
    at_least = dtypes.float64 if x.dtype.kind in "biu" else w.dtype
    x, w = promote("average", (x, w), lambda d: dtypes.result_type(d, at_least))
    total = sum(w, axis=axes, keepdims=keepdims)
    vanishes = unrecorded(lambda: any_of(equal(every(total), 0)))
    if thread.executor.decided(lambda: bool(vanishes), False):
        raise ZeroWeightsError("average: the weights sum to 0, so there is no average")
    result = divide(sum(multiply(x, w), axis=axes, keepdims=keepdims), total)
    return (result, broadcast_to(total, result.shape)) if returned else result


class ZeroWeightsError(TapegradError, ZeroDivisionError):
    """Weights of an average sum to 0."""


def weights_like(op: str, weights: TensorLike, x: Tensor, axis: Axis, axes: tuple[int, ...]) -> Tensor:
    """``weights`` in the shape of ``x``, or with length 1 where they do not vary."""
    w = precise(op, weights, x)
    if w.shape == x.shape:
        return w
    named = axis if isinstance(axis, (tuple, list)) else (axis,)
    if axis is None or w.shape != tuple(x.shape[i] for i in named):
        raise ShapeError(
            f"{op}: weights of shape {w.shape} must have the shape {x.shape} of the data, or that of its axes {axis}"
        )
    order = sorted(range(len(named)), key=lambda k: named[k] % x.ndim)
    w = permute_dims(w, order)
    return broadcast_to(reshape(w, tuple(n if i in axes else 1 for i, n in enumerate(x.shape))), x.shape)


def ptp(a: TensorLike, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The largest less the smallest element over ``axis`` (None: all).

    Elements that tie share the gradient of each equally.  Raises AxisError, ShapeError, DTypeError for complex.
    """
    return subtract(max(a, axis=axis, keepdims=keepdims), min(a, axis=axis, keepdims=keepdims))


class MinMax(NamedTuple):
    """The smallest and the largest elements."""

    min: Tensor
    max: Tensor


def aminmax(input: TensorLike, *, dim: Axis = None, keepdim: bool = False) -> MinMax:
    """The smallest and the largest elements over ``dim`` (PyTorch's ``aminmax``); ties share gradients equally."""
    return MinMax(min(input, axis=dim, keepdims=keepdim), max(input, axis=dim, keepdims=keepdim))


def var_mean(
    input: TensorLike, dim: Axis = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim`` (None: all) (PyTorch's ``var_mean``).  Raises AxisError."""
    return var(input, axis=dim, correction=correction, keepdims=keepdim), mean(input, axis=dim, keepdims=keepdim)


def std_mean(
    input: TensorLike, dim: Axis = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over ``dim`` (None: all) (PyTorch's ``std_mean``).  Raises AxisError."""
    return std(input, axis=dim, correction=correction, keepdims=keepdim), mean(input, axis=dim, keepdims=keepdim)


def _samples(m: TensorLike, y: TensorLike | None, rowvar: bool, dtype: DTypeLike | None) -> Tensor:
    """Variables by rows: those of ``m``, then those of ``y``."""
    parts = [precise("cov", x) for x in ((m,) if y is None else (m, y))]
    if any(x.ndim > 2 for x in parts):
        raise ShapeError(f"cov: takes vectors and matrices, got shapes {[x.shape for x in parts]}")
    wanted = dtypes.result_type(*(x.dtype for x in parts), dtypes.float64) if dtype is None else dtypes.asdtype(dtype)
    rows = [cast(x if x.ndim == 2 else atleast_2d(x), wanted) for x in parts]
    if not rowvar:
        rows = [
            permute_dims(x, (1, 0)) if (k == 0 and parts[0].ndim != 1) or (k and x.shape[0] != 1) else x
            for k, x in enumerate(rows)
        ]
    return rows[0] if y is None or not rows[0].shape[0] else concat(rows, axis=0)


def _refuse(name: str, wrong: Tensor, error: Exception) -> None:
    """Raises ``error`` where an element is ``wrong``."""
    require(unrecorded(cast, wrong, dtypes.int32), 0, 0, ("cov", name, str(error)), lambda *_: error)


def _one_weight(fweights: TensorLike | None, aweights: TensorLike | None, x: Tensor) -> Tensor | None:
    """The weights of the observations multiplied."""
    w = None
    for name, factor in (("fweights", fweights), ("aweights", aweights)):
        if factor is not None:
            (v,) = promote("cov", (precise("cov", factor, x),), lambda d: dtypes.float64)
            if v.shape != x.shape[1:]:
                raise ShapeError(f"cov: weights of shape {v.shape} for {x.shape[1]} observations")
            if name == "fweights":
                error = DTypeError("cov: fweights count observations, so they must be integers; use aweights")
                _refuse(name, not_equal(v, floor(v)), error)
            _refuse(name, less(v, 0), DomainError(f"cov: {name} must not be negative"))
            w = v if w is None else w * v
    return w


def cov(
    m: TensorLike, y: TensorLike | None = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None,
    fweights: TensorLike | None = None, aweights: TensorLike | None = None, *, dtype: DTypeLike | None = None,
) -> Tensor:  # fmt: skip
    """The covariance matrix of variables (rows, or columns without ``rowvar``) over observations (NumPy's ``cov``).

    Divided by ``N - 1``, with ``bias`` by ``N``, with ``ddof`` by ``N - ddof``; fweights, aweights: how often, and how
    heavily, each observation counts.  Computed in float64 at least unless ``dtype`` says otherwise; 0-d for one
    variable.  Raises ShapeError, DTypeError for fweights that are no whole numbers, DomainError for negative weights
    (on a GPU when the host next waits for it).
    """
    x = _samples(m, y, rowvar, dtype)
    if not x.shape[0]:
        return x @ x.mT
    if ddof is None:
        ddof = 0 if bias else 1
    w = _one_weight(fweights, aweights, x)
    if w is None:
        middle, count = mean(x, axis=1), x.shape[1] - ddof
        fact: Any = count if count > 0 else 0.0
    else:
        middle, total = average(x, axis=1, weights=w, returned=True)
        total = real(total[0])
        fact = total if not ddof else total - (ddof if aweights is None else ddof * sum(w * aweights) / total)
    x = x - reshape(middle, (middle.size, 1))
    weighted = x if w is None else x * w
    products = matmul(x, conj(permute_dims(weighted, (1, 0))))
    return squeeze(products * (divide(1.0, fact) if isinstance(fact, Tensor) else (1 / fact if fact else math.inf)))


def corrcoef(
    x: TensorLike, y: TensorLike | None = None, rowvar: bool = True, *, dtype: DTypeLike | None = None
) -> Tensor:
    """The matrix of correlation coefficients (NumPy's ``corrcoef``), held within [-1, 1]: see :func:`cov`.

    1 (0-d) for one variable; NaN where a variable does not vary.  Raises ShapeError.
    """
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    deviation = sqrt(real(diag(c)))
    c = c / reshape(deviation, (deviation.size, 1)) / deviation
    if c.dtype.kind == "c":
        return complex_of(clip(real(c), -1, 1), clip(imag(c), -1, 1))
    return clip(c, -1, 1)
