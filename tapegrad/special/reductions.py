"""Functions of whole rows, with SciPy's signatures."""

from __future__ import annotations

import math
from collections.abc import Callable

from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.core.aval import normalize_axes
from tapegrad.device.dtypes import finfo, in_float
from tapegrad.ops import abs, exp, isfinite, log, max, minimum, reshape, sign, sum, where
from tapegrad.ops.dispatch import promote
from tapegrad.ops.elementwise.exponential import difference
from tapegrad.ops.reduce.reductions import logsumexp as _logsumexp
from tapegrad.ops.rows.softmax import log_softmax as _log_softmax
from tapegrad.ops.rows.softmax import softmax as _softmax
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["log_softmax", "logsumexp", "softmax"]


def logsumexp(
    a: TensorLike,
    axis: int | None = None,
    b: TensorLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log(sum(b * exp(a)))`` over ``axis`` without overflow (SciPy's ``logsumexp``).

    axis: None, an integer or several; b: weights that broadcast with ``a``; return_sign: the logarithm of the sum's
    magnitude, and its sign; otherwise a negative sum gives NaN.  Where all is -inf the elements share the gradient, but
    with ``b`` or a sign it is 0.  Raises AxisError.
    """
    if b is None and not return_sign:
        return _logsumexp(a, axis=axis, keepdims=keepdims)
    a, b = promote("logsumexp", (a, 1.0 if b is None else b), in_float)
    a = a + 0 * b
    axes = normalize_axes("logsumexp", axis, a.ndim)
    most = stop_gradient(max(where(b == 0, -float("inf"), a), axis=axes, keepdims=True)) if a.size else 0.0
    most = where(most == -float("inf"), 0.0, most)
    # Only an element of weight 0 may exceed the largest, and its exponential must not overflow: 0 times inf is NaN.
    powers = exp(minimum(difference(a, most), math.log(float(finfo(a.dtype).max)) - 1))
    total = sum(b * powers, axis=axes, keepdims=True)
    gone = total == 0
    size = where(gone, 1.0, abs(total) if return_sign else total)
    out = where(gone, -float("inf"), log(size)) + most
    shape = tuple(n for i, n in enumerate(out.shape) if keepdims or i not in axes)
    if not return_sign:
        return reshape(out, shape)
    return reshape(out, shape), reshape(sign(total), shape)


def _flat(op: Callable[..., Tensor], x: TensorLike, axis: int | None) -> Tensor:
    """``op`` along one axis, over several, or over all."""
    (x,) = promote(op.__name__, (x,), in_float)
    axes = normalize_axes(op.__name__, axis, x.ndim)
    if len(axes) == 1:
        return op(x, axis=axes[0])
    if len(axes) == x.ndim:
        return reshape(op(reshape(x, (x.size,))), x.shape)
    most = stop_gradient(max(x, axis=axes, keepdims=True))
    shifted = x - where(isfinite(most), most, 0.0)
    if op is _softmax:
        powers = exp(shifted)
        return powers / sum(powers, axis=axes, keepdims=True)
    return shifted - log(sum(exp(shifted), axis=axes, keepdims=True))


def softmax(x: TensorLike, axis: int | None = None) -> Tensor:
    """``exp(x) / sum(exp(x))`` over ``axis`` (SciPy's ``softmax``); None: over all elements.  Raises AxisError."""
    return _flat(_softmax, x, axis)


def log_softmax(x: TensorLike, axis: int | None = None) -> Tensor:
    """``log(softmax(x))`` over ``axis`` (SciPy's ``log_softmax``); None: over all elements.  Raises AxisError."""
    return _flat(_log_softmax, x, axis)
