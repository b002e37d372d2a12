"""Sums and products of all elements so far."""

from __future__ import annotations

from tapegrad.core.aval import normalize_axis
from tapegrad.core.primitive import Primitive, Sample, general, linear
from tapegrad.device import dtypes
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.create.creation import ones, zeros
from tapegrad.ops.dispatch import barrier, cast, own, tensor
from tapegrad.ops.elementwise.arithmetic import subtract
from tapegrad.ops.shape.blocks import slice_p, unslice_p
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


def _run_cumulative_sum(xp: Namespace, x: Array, *, axis: int, reverse: bool, out: Array) -> None:
    if reverse:
        back = (slice(None),) * axis + (slice(None, None, -1),)
        x, out = x[back], out[back]
    xp.cumsum(x, axis=axis, dtype=out.dtype, out=out)


cumulative_sum_p: Primitive = linear(
    "cumulative_sum",
    impl=_run_cumulative_sum,
    infer=lambda x, *, axis, reverse: x,
    transpose=lambda ct, x, *, axis, reverse: barrier(cumulative_sum_p, ct, axis=axis, reverse=not reverse),
    into=True,
    lift=lift_axis,
    samples=[
        Sample((3, 4), axis=1, reverse=False), Sample((3, 4), axis=0, reverse=True),
        Sample((0, 2), axis=0, reverse=True),
    ],
)  # fmt: skip


def _prepared(op: str, x: TensorLike, axis: int | None, dtype: DTypeLike | None) -> tuple[Tensor, int, DType]:
    """The operand in the dtype to compute in, the axis, the dtype of the result."""
    x = tensor(op, x)
    if axis is None:
        if x.ndim > 1:
            raise ShapeError(f"{op}: name the axis of {x.shape}: only an array of one dimension has a default")
        x, axis = reshape(x, (x.size,)), 0
    wanted = dtypes.sum_dtype(x.dtype) if dtype is None else dtypes.asdtype(dtype)
    return cast(x, dtypes.accumulator(wanted)), normalize_axis(op, axis, x.ndim), wanted


def _first_shape(x: Tensor, axis: int) -> tuple[int, ...]:
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def cumulative_sum(
    x: TensorLike, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Tensor:
    """The sums of the elements so far along ``axis``; ``include_initial``: 0 in front.  Raises AxisError, ShapeError.

    Small integers are summed in 64 bits.
    """
    x, a, wanted = _prepared("cumulative_sum", x, axis, dtype)
    out = barrier(cumulative_sum_p, x, axis=a, reverse=False)
    if include_initial:
        out = concat([zeros(_first_shape(x, a), dtype=x.dtype, device=x.device), out], axis=a)
    return cast(out, wanted)


def cumsum(a: TensorLike, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """NumPy's name for :func:`cumulative_sum`; axis None: of the flattened array."""
    a = tensor("cumsum", a)
    return cumulative_sum(reshape(a, (a.size,)) if axis is None else a, axis=axis, dtype=dtype)


def _cut(x: Tensor, axis: int, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``reach`` elements along ``axis``, the others, and those that stand ``reach`` before the others."""
    whole = [(0, m, 1) for m in x.shape]
    n = x.shape[axis]
    early, late, before = (
        barrier(slice_p, x, index=(*whole[:axis], (first, count, 1), *whole[axis + 1 :]))
        for first, count in ((0, reach), (reach, n - reach), (0, n - reach))
    )
    return early, late, before


def _reaches(n: int) -> list[int]:
    return [1 << k for k in range((n - 1).bit_length())] if n > 1 else []


def _push_products(t: Tensor, x: Tensor, *, axis: int) -> Tensor:
    """By doubling, log n products of whole arrays: right where elements are 0, since nothing is divided."""
    behind = t.ndim - axis  # there may be more tangents than values, along leading axes
    for reach in _reaches(t.shape[axis]):
        early, late, before = _cut(x, x.ndim - behind, reach)
        t_early, t_late, t_before = _cut(t, axis, reach)
        t = concat([t_early, t_late * before + late * t_before], axis=axis)
        x = concat([early, late * before], axis=x.ndim - behind)
    return t


def _pull_products(ct: Tensor, x: Tensor, *, axis: int) -> Tensor:
    """The transpose of :func:`_push_products`."""
    behind = ct.ndim - axis
    levels = []
    for reach in _reaches(ct.shape[axis]):
        early, late, before = _cut(x, x.ndim - behind, reach)
        levels.append((reach, late, before))
        x = concat([early, late * before], axis=x.ndim - behind)
    for reach, late, before in reversed(levels):
        ct_early, ct_late, _ = _cut(ct, axis, reach)
        index = tuple((0, m, 1) for m in ct_late.shape)
        ct = concat([ct_early, ct_late * before], axis=axis) + barrier(
            unslice_p, ct_late * late, shape=ct.shape, index=index
        )
    return ct


cumulative_prod_p = general(
    "cumulative_prod",
    impl=lambda xp, x, *, axis, out: xp.cumprod(x, axis=axis, dtype=out.dtype, out=out),
    infer=lambda x, *, axis: x,
    vjp=[_pull_products],
    jvp=[_push_products],
    into=True,
    lift=lift_axis,
    samples=[Sample((3, 5), axis=1), Sample((3, 2), axis=0), Sample((2, 0), axis=1), Sample((1,), axis=0)],
)


def cumulative_prod(
    x: TensorLike, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Tensor:
    """The products of the elements so far along ``axis``; ``include_initial``: 1 in front.

    Its gradient is right where elements are 0.  Raises AxisError, ShapeError.
    """
    x, a, wanted = _prepared("cumulative_prod", x, axis, dtype)
    x = barrier(cumulative_prod_p, x, axis=a)
    if include_initial:
        x = concat([ones(_first_shape(x, a), dtype=x.dtype, device=x.device), x], axis=a)
    return cast(x, wanted)


def cumprod(a: TensorLike, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """NumPy's name for :func:`cumulative_prod`; axis None: of the flattened array."""
    a = tensor("cumprod", a)
    return cumulative_prod(reshape(a, (a.size,)) if axis is None else a, axis=axis, dtype=dtype)


def diff(
    a: TensorLike, n: int = 1, axis: int = -1, prepend: TensorLike | None = None, append: TensorLike | None = None
) -> Tensor:
    """Return the differences of neighbours along ``axis``, taken ``n`` times; for ``n=0`` ``a``, without what is put
    before and after it.  Raises AxisError, ShapeError.
    """
    a = given = tensor("diff", a)
    dim = normalize_axis("diff", axis, a.ndim)
    if n < 0:
        raise ShapeError(f"diff: n={n}; differences are taken 0 times or more")
    around = [tensor("diff", part, a) for part in (prepend, append) if part is not None]
    if around and n:
        around = [broadcast_to(part, _first_shape(a, dim)) if not part.ndim else part for part in around]
        a = concat([*around[: prepend is not None], a, *around[prepend is not None :]], axis=dim)
    for _ in range(min(n, a.shape[dim])):
        ahead, behind = (slice(None),) * dim + (slice(1, None),), (slice(None),) * dim + (slice(None, -1),)
        a = (a[ahead] != a[behind]) if a.dtype.kind == "b" else subtract(a[ahead], a[behind])
    return own(a, given)
