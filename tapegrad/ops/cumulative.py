"""Sums and products of all elements so far."""

from __future__ import annotations

from typing import Any

from tapegrad.aval import ShapedArray, normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops.arithmetic import multiply, subtract
from tapegrad.ops.creation import ones, zeros
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.indexing import slice_p
from tapegrad.ops.joining import concat
from tapegrad.ops.shape import reshape
from tapegrad.primitive import Primitive, Sample, linear
from tapegrad.tensor import Tensor


def _infer_cumulative(x: ShapedArray, *, axis: int, reverse: bool) -> ShapedArray:
    return x


def _run_cumulative_sum(xp: Any, x: Any, *, axis: int, reverse: bool, out: Any) -> None:
    if reverse:
        back = (slice(None),) * axis + (slice(None, None, -1),)
        x, out = x[back], out[back]
    xp.cumsum(x, axis=axis, dtype=out.dtype, out=out)


cumulative_sum_p: Primitive = linear(
    "cumulative_sum",
    impl=_run_cumulative_sum,
    infer=_infer_cumulative,
    transpose=lambda ct, x, *, axis, reverse: barrier(cumulative_sum_p, ct, axis=axis, reverse=not reverse),
    into=True,
    lift=lambda params, n: {**params, "axis": params["axis"] + 1},
    samples=[
        Sample((3, 4), axis=1, reverse=False), Sample((3, 4), axis=0, reverse=True),
        Sample((0, 2), axis=0, reverse=True),
    ],
)  # fmt: skip


def _prepared(op: str, x: Any, axis: int | None, dtype: Any) -> tuple[Tensor, int, Any]:
    """The operand in the dtype to compute in, the axis, the dtype of the result."""
    x = tensor(op, x)
    if axis is None:
        if x.ndim > 1:
            raise ShapeError(f"{op}: name the axis of {x.shape}: only an array of one dimension has a default")
        x, axis = reshape(x, (x.size,)), 0
    wanted = dtypes.sum_dtype(x.dtype) if dtype is None else dtypes.asdtype(dtype)
    return cast(x, dtypes.accumulator(wanted)), normalize_axis(op, axis, x.ndim), wanted


def _after_initial(x: Tensor, axis: int, value: Tensor) -> Tensor:
    """One more element, ``value``, in front along ``axis``."""
    return concat([value, x], axis=axis)


def _first_shape(x: Tensor, axis: int) -> tuple[int, ...]:
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """The sums of the elements so far along ``axis``; ``include_initial``: 0 in front.  Raises AxisError, ShapeError.

    Small integers are summed in 64 bits.
    """
    x, a, wanted = _prepared("cumulative_sum", x, axis, dtype)
    out = barrier(cumulative_sum_p, x, axis=a, reverse=False)
    if include_initial:
        out = _after_initial(out, a, zeros(_first_shape(x, a), dtype=x.dtype, device=x.device))
    return cast(out, wanted)


def cumsum(x: Any, /, axis: int | None = None, dtype: Any = None) -> Tensor:
    """NumPy's name for :func:`cumulative_sum`; axis None: of the flattened array."""
    x = tensor("cumsum", x)
    return cumulative_sum(reshape(x, (x.size,)) if axis is None else x, axis=axis, dtype=dtype)


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Tensor:
    """The products of the elements so far along ``axis``; ``include_initial``: 1 in front.

    Computed by doubling, log n products of whole arrays, so its gradient is right where elements are 0.  Raises
    AxisError, ShapeError.
    """
    x, a, wanted = _prepared("cumulative_prod", x, axis, dtype)
    n, reach = x.shape[a], 1
    whole = [(0, m, 1) for m in x.shape]
    while reach < n:
        early, late, before = (
            barrier(slice_p, x, index=(*whole[:a], (first, count, 1), *whole[a + 1 :]))
            for first, count in ((0, reach), (reach, n - reach), (0, n - reach))
        )
        x = concat([early, multiply(late, before)], axis=a)
        reach *= 2
    if include_initial:
        x = _after_initial(x, a, ones(_first_shape(x, a), dtype=x.dtype, device=x.device))
    return cast(x, wanted)


def cumprod(x: Any, /, axis: int | None = None, dtype: Any = None) -> Tensor:
    """NumPy's name for :func:`cumulative_prod`; axis None: of the flattened array."""
    x = tensor("cumprod", x)
    return cumulative_prod(reshape(x, (x.size,)) if axis is None else x, axis=axis, dtype=dtype)


def diff(x: Any, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours along ``axis``, taken ``n`` times.  Raises AxisError, ShapeError."""
    x = tensor("diff", x)
    a = normalize_axis("diff", axis, x.ndim)
    if n < 0:
        raise ShapeError(f"diff: n={n}; differences are taken 0 times or more")
    around = [tensor("diff", part) for part in (prepend, append) if part is not None]
    if around:
        x = concat([*around[: prepend is not None], x, *around[prepend is not None :]], axis=a)
    for _ in range(min(n, x.shape[a])):
        ahead, behind = (slice(None),) * a + (slice(1, None),), (slice(None),) * a + (slice(None, -1),)
        x = (x[ahead] != x[behind]) if x.dtype.kind == "b" else subtract(x[ahead], x[behind])
    return x
