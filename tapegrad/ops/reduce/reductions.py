"""Reductions.  A reduction of a big array may take a region as its prologue: what it sums is never stored.

The order of summation is fixed by the shape alone (``engine.cpu.tiles``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tapegrad.core.aval import ShapedArray, normalize_axes
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.engine.realize import waiting
from tapegrad.errors import ShapeError
from tapegrad.ops.create.creation import ones, ones_like
from tapegrad.ops.dispatch import barrier, cast, in_float32, ordered, tensor
from tapegrad.ops.elementwise.arithmetic import (
    add,
    maximum,
    minimum,
    multiply,
    root_of_squares,
    squared_size,
    subtract,
)
from tapegrad.ops.elementwise.comparison import equal, isfinite, not_equal
from tapegrad.ops.elementwise.complex import real
from tapegrad.ops.elementwise.exponential import difference, exp, log
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce._masks import mask_of, masked, start_of, worst
from tapegrad.ops.shape.blocks import reshaped
from tapegrad.ops.shape.join import concat, stack
from tapegrad.ops.shape.shape import broadcast_to, infer_reduction, kept_shape, lift_axes, permute_dims, reshape, sum_p
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, identity_of

Axis = int | Sequence[int] | None


def _infer_nonempty(name: str) -> Callable[..., ShapedArray]:
    """As ``infer_reduction``; an empty axis has no extreme element."""

    def infer(x: ShapedArray, *, axis: tuple[int, ...]) -> ShapedArray:
        if not math.prod(x.shape[a] for a in axis):
            raise ShapeError(f"{name}: {x.shape} is empty along axis {axis}; there is no {name} of nothing")
        return infer_reduction(x, axis=axis)

    return infer


def sum(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
    initial: TensorLike | None = None, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The sum over ``axis`` (None: all), plus ``initial``; small integers are summed in 64 bits.

    ``where``: a mask of the elements that count (bools that broadcast to ``a``).  Raises AxisError, and ShapeError and
    DTypeError for ``initial`` and ``where``.
    """
    a = tensor("sum", a)
    axes = normalize_axes("sum", axis, a.ndim)
    a = cast(a, dtypes.sum_dtype(a.dtype) if dtype is None else dtypes.asdtype(dtype))
    a = masked("sum", a, where, 0)
    out = barrier(sum_p, a, axis=axes, keepdims=bool(keepdims)) if axes else identity_of(a)
    return out if initial is None else add(out, start_of("sum", initial, out))


def _in(op: str, x: TensorLike, dtype: DTypeLike | None) -> Tensor:
    """``x`` in the dtype to average in."""
    x = tensor(op, x)
    if dtype is not None:
        return cast(x, dtypes.asdtype(dtype))
    return x if dtypes.is_inexact(x.dtype) else cast(x, dtypes.float64)


def mean(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The mean over ``axis`` (None: all), in ``dtype`` if given; NaN for an empty array, as in NumPy.

    ``where``: a mask of the elements that count (bools that broadcast to ``a``).  Integers are averaged in float64.
    Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    a = _in("mean", a, dtype)
    axes = normalize_axes("mean", axis, a.ndim)
    if where is None:
        return _mean(a, axes, keepdims)
    mask = mask_of("mean", where, a)
    return _mean(masked("mean", a, mask, 0), axes, keepdims, mask)


@in_float32
def _mean(x: Tensor, axes: tuple[int, ...], keepdims: bool, mask: Tensor | None = None) -> Tensor:
    if not x.size:
        return of_nothing(x, axes, keepdims, math.nan)
    count = _count(x, axes, keepdims, mask, 0)
    return waiting(x._buffer.node.aval, lambda: sum(x, axis=axes, keepdims=keepdims) / count)


def of_nothing(x: Tensor, axes: tuple[int, ...], keepdims: bool, value: float) -> Tensor:
    """Return ``value`` for each reduction of no elements; it depends on ``x`` with derivative 0, not 0 / 0."""
    constant = value if x.dtype.kind != "c" else complex(value, value if math.isnan(value) else 0)
    return sum(x, axis=axes, keepdims=keepdims) + constant


def _count(x: Tensor, axes: tuple[int, ...], keepdims: bool, mask: Tensor | None, correction: float) -> Tensor | float:
    """How many elements there are, or ``mask`` selects, less ``correction``; NaN in place of 0 and what is below."""
    if mask is None:
        count = math.prod(x.shape[a] for a in axes) - correction
        return count if count > 0 else float("nan")

    def counted() -> Tensor:
        count = sum(broadcast_to(mask, x.shape), axis=axes, keepdims=keepdims)
        number = cast(count, dtypes.real_of(x.dtype)) - correction
        return where(number > 0, number, float("nan"))

    return unrecorded(counted)


def _ties(x: Tensor, out: Tensor, axis: tuple[int, ...], ndim: int) -> tuple[Tensor, Tensor]:
    """Which elements are the extreme one (as numbers), and how many share it: ``axis`` of an array of ``ndim``."""
    own = tuple(a - ndim + x.ndim for a in axis)  # a Jacobian's rows give the cotangent one axis more than x has
    kept = kept_shape(x.shape, own)
    mask = cast(equal(x, reshape(out, kept)), dtypes.accumulator(x.dtype))  # a float16 counts only to 2048
    return mask, sum(mask, axis=own, keepdims=True)


def _pull_extreme(ct: Tensor, out: Tensor, x: Tensor, x_aval: ShapedArray, *, axis: tuple[int, ...]) -> Tensor:
    mask, count = _ties(x, out, axis, x_aval.ndim)
    return mask * (reshape(ct, kept_shape(x_aval.shape, axis)) / count)


def _push_extreme(t: Tensor, out: Tensor, x: Tensor, *, axis: tuple[int, ...]) -> Tensor:
    mask, count = _ties(x, out, axis, x.ndim)
    return sum(mask * t / count, axis=axis)


def _extreme(name: str, ufunc: str) -> Primitive:
    return general(
        f"reduce_{name}",
        infer=_infer_nonempty(name),
        vjp=[_pull_extreme],
        jvp=[_push_extreme],
        reduce=ufunc,
        lift=lift_axes,
        samples=[
            Sample((3, 4), axis=(1,)), Sample((2, 3, 4), axis=(0, 2)), Sample((0, 4), axis=(1,)),
            Sample((150, 120), axis=(1,)), Bad((0, 4), axis=(0,), error=ShapeError),
        ],
        doc="Elements that tie share the gradient equally.",
    )  # fmt: skip


max_p = _extreme("max", "maximum")
min_p = _extreme("min", "minimum")


def _others(x: Tensor) -> Tensor:
    """For each element the product of all others along the last axis: exact where elements are 0.

    Pairs are multiplied, so it takes 2 log n steps over ever fewer elements.
    """
    n = x.shape[-1]
    if n < 2:
        return ones_like(x)
    lead = x.shape[:-1]
    if n % 2:
        x = concat([x, ones((*lead, 1), dtype=x.dtype, device=x.device)], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    up = _others(multiply(a, b))
    out = reshape(stack([multiply(up, b), multiply(up, a)], axis=-1), (*lead, n + n % 2))
    return out[..., :n]


def _prod_partial(x: Tensor, axis: tuple[int, ...]) -> Tensor:
    """The derivative of the product over ``axis`` in each element."""
    kept = tuple(a for a in range(x.ndim) if a not in axis)
    order = (*kept, *axis)
    shape = tuple(x.shape[a] for a in order)
    rows = reshape(permute_dims(x, order), (*shape[: len(kept)], math.prod(shape[len(kept) :])))
    return permute_dims(reshape(_others(rows), shape), tuple(order.index(a) for a in range(x.ndim)))


def _pull_prod(ct: Tensor, x: Tensor, x_aval: ShapedArray, *, axis: tuple[int, ...]) -> Tensor:
    own = tuple(a - x_aval.ndim + x.ndim for a in axis)
    return reshape(ct, kept_shape(x_aval.shape, axis)) * _prod_partial(x, own)


prod_p = general(
    "prod",
    infer=infer_reduction,
    vjp=[_pull_prod],
    jvp=[lambda t, x, *, axis: sum(t * _prod_partial(x, axis), axis=axis)],
    reduce="multiply",
    lift=lift_axes,
    samples=[
        Sample((3, 5), axis=(1,)), Sample((2, 3, 2), axis=(0, 2)), Sample((0, 4), axis=(0,)), Sample((0, 4), axis=(1,)),
    ],
)  # fmt: skip


def _logical(name: str, ufunc: str) -> Primitive:
    return general(
        name,
        infer=infer_reduction,
        reduce=ufunc,
        lift=lift_axes,
        samples=[Sample([[True, False], [True, True]], axis=(1,)), Sample([[False]], axis=())],
    )


any_p = _logical("any", "logical_or")
all_p = _logical("all", "logical_and")


def _reduced(prim: Primitive, name: str, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    axes = normalize_axes(name, axis, x.ndim)
    out = barrier(prim, x, axis=axes) if axes else identity_of(x)
    return reshaped(out, kept_shape(x.shape, axes)) if keepdims else out


def _extreme_of(
    prim: Primitive, name: str, x: Tensor, axis: Axis, keepdims: bool, initial: TensorLike | None,
    selected: TensorLike | None,
) -> Tensor:  # fmt: skip
    if initial is None:
        if selected is not None:
            raise ShapeError(f"{name}: where= may select nothing; give initial=, the {name} of nothing")
        return _reduced(prim, name, x, axis, keepdims)
    axes, start = normalize_axes(name, axis, x.ndim), start_of(name, initial, x)
    x = masked(name, x, selected, worst(x.dtype, largest=prim is max_p))
    if not math.prod(x.shape[a] for a in axes):
        kept = kept_shape(x.shape, axes)
        return broadcast_to(start, kept if keepdims else tuple(n for a, n in enumerate(x.shape) if a not in axes))
    return (maximum if prim is max_p else minimum)(_reduced(prim, name, x, axis, keepdims), start)


def max(
    a: TensorLike, axis: Axis = None, *, keepdims: bool = False, initial: TensorLike | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The largest element over ``axis`` (None: all), NaN if there is one; ties share the gradient equally.

    ``initial``: a number that counts, too (of a tie with it the elements have the gradient).  ``where``: a mask of the
    elements that count (bools that broadcast to ``a``); it needs ``initial``.  Raises AxisError, ShapeError for an
    empty axis without ``initial``, DTypeError for complex.
    """
    return _extreme_of(max_p, "max", ordered("max", a), axis, keepdims, initial, where)


def min(
    a: TensorLike, axis: Axis = None, *, keepdims: bool = False, initial: TensorLike | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The smallest element over ``axis`` (None: all), NaN if there is one; ties share the gradient equally.

    ``initial``: a number that counts, too (of a tie with it the elements have the gradient).  ``where``: a mask of the
    elements that count (bools that broadcast to ``a``); it needs ``initial``.  Raises AxisError, ShapeError for an
    empty axis without ``initial``, DTypeError for complex.
    """
    return _extreme_of(min_p, "min", ordered("min", a), axis, keepdims, initial, where)


def prod(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
    initial: TensorLike | None = None, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The product over ``axis`` (None: all), times ``initial``; 1 if empty; its gradient is right where elements are 0.

    ``where``: a mask of the elements that count (bools that broadcast to ``a``).  Small integers are multiplied in 64
    bits.  Raises AxisError, and ShapeError and DTypeError for ``initial`` and ``where``.
    """
    a = tensor("prod", a)
    a = cast(a, dtypes.sum_dtype(a.dtype) if dtype is None else dtypes.asdtype(dtype))
    out = _reduced(prod_p, "prod", masked("prod", a, where, 1), axis, keepdims)
    return out if initial is None else multiply(out, start_of("prod", initial, out))


def any(
    a: TensorLike, axis: Axis = None, *, keepdims: bool = False, where: TensorLike | None = None
) -> Tensor:  # fmt: skip
    """Whether some element over ``axis`` (None: all), of those in the mask ``where``, is not 0; NaN is not 0.

    Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    return _reduced(any_p, "any", masked("any", _truth(tensor("any", a)), where, False), axis, keepdims)


def all(
    a: TensorLike, axis: Axis = None, *, keepdims: bool = False, where: TensorLike | None = None
) -> Tensor:  # fmt: skip
    """Whether no element over ``axis`` (None: all), of those in the mask ``where``, is 0.

    Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    return _reduced(all_p, "all", masked("all", _truth(tensor("all", a)), where, True), axis, keepdims)


def _truth(x: Tensor) -> Tensor:
    return cast(x, dtypes.bool_) if x.dtype.kind != "c" else not_equal(x, 0)


def count_nonzero(a: TensorLike, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """How many elements over ``axis`` (None: all) are not 0.  Raises AxisError."""
    return sum(_truth(tensor("count_nonzero", a)), axis=axis, keepdims=keepdims)


def var(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, *, correction: float = 0,
    ddof: float | None = None, keepdims: bool = False, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The variance over ``axis`` (None: all): squared deviations summed, divided by ``count - correction``.

    ddof: NumPy's name for ``correction``.  where: a mask of the elements that count (bools that broadcast to ``a``).
    Integers are computed in float64.  Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    a = _in("var", a, dtype)
    axes, mask = normalize_axes("var", axis, a.ndim), None if where is None else mask_of("var", where, a)
    return _var(a, axes, correction if ddof is None else ddof, keepdims, mask)


@in_float32
def _var(x: Tensor, axes: tuple[int, ...], correction: float, keepdims: bool, mask: Tensor | None = None) -> Tensor:
    if not x.size:
        return of_nothing(real(x), axes, keepdims, math.nan)
    deviation = masked("var", subtract(x, mean(x, axis=axes, keepdims=True, where=mask)), mask, 0)
    squares, number = squared_size(deviation), _count(x, axes, keepdims, mask, correction)
    return waiting(x._buffer.node.aval, lambda: sum(squares, axis=axes, keepdims=keepdims) / number)


def std(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, *, correction: float = 0,
    ddof: float | None = None, keepdims: bool = False, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The square root of :func:`var`; where that is 0 (all elements equal, or one alone), so is its gradient.

    There it has a kink, and 0 is its smallest subgradient (PyTorch's answer).  Raises AxisError.
    """
    a = _in("std", a, dtype)
    axes, mask = normalize_axes("std", axis, a.ndim), None if where is None else mask_of("std", where, a)
    return _std(a, axes, correction if ddof is None else ddof, keepdims, mask)


@in_float32
def _std(x: Tensor, axes: tuple[int, ...], correction: float, keepdims: bool, mask: Tensor | None = None) -> Tensor:
    if not x.size:
        return of_nothing(real(x), axes, keepdims, math.nan)
    return root_of_squares(_var(x, axes, correction, keepdims, mask))


@in_float32
def logsumexp(x: TensorLike, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return ``log(sum(exp(x)))`` over ``axis`` (None: all) without overflow; -inf if empty.  Raises AxisError.

    It is computed as ``m + log(sum(exp(x - m)))``, where ``m`` is the largest (real part); the derivative does not
    depend on ``m``, so tapes do not see it.  Where ``m`` is infinite, the elements equal to it share the gradient.
    """
    x = tensor("logsumexp", x)
    axes = normalize_axes("logsumexp", axis, x.ndim)
    x = cast(x, dtypes.in_float(x.dtype))
    if not x.size:
        return of_nothing(x, axes, keepdims, -math.inf)

    def shift() -> Tensor:
        most = max(real(x), axis=axes, keepdims=True)
        # Complex infinities may differ in their imaginary parts, so their difference is NaN.
        return where(isfinite(most), most, 0) if x.dtype.kind == "c" else most

    most = unrecorded(shift)
    out = waiting(x._buffer.node.aval, lambda: log(sum(exp(difference(x, most)), axis=axes, keepdims=True)) + most)
    return out if keepdims else reshape(out, tuple(n for i, n in enumerate(x.shape) if i not in axes))
