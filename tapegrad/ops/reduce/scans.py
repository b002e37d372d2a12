"""The largest, smallest and logarithm of the sum of exponentials of all elements so far."""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.core.aval import normalize_axis
from tapegrad.core.primitive import Sample, general
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import scans
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.dispatch import barrier, ordered, own, promote, real_float
from tapegrad.ops.elementwise.arithmetic import maximum
from tapegrad.ops.elementwise.exponential import difference, exp, log
from tapegrad.ops.index.indexing import take_along_axis
from tapegrad.ops.shape.join import concat
from tapegrad.tensor import Tensor, TensorLike, identity_of

__all__ = ["cummax", "cummin", "logcumsumexp"]


class Running(NamedTuple):
    """The extreme elements so far, and where they stand."""

    values: Tensor
    indices: Tensor


running_place_p = general(
    "running_place",
    impl=lambda xp, x, *, axis, ufunc: scans.last_extreme(xp, x, axis, ufunc),
    infer=lambda x, *, axis, ufunc: x.with_dtype(dtypes.int64),
    lift=lift_axis,
    samples=[
        Sample((3, 5), axis=1, ufunc="maximum"), Sample([[2.0, 2.0], [1.0, 3.0]], axis=0, ufunc="minimum"),
        Sample((0, 2), axis=0, ufunc="maximum"),
    ],
    doc="For each position along an axis the last position up to it where the extreme element stands.",
)  # fmt: skip


def _running(op: str, x: TensorLike, axis: int, ufunc: str) -> Running:
    x = ordered(op, x)
    if not x.ndim:
        return Running(identity_of(x), barrier(running_place_p, x[None], axis=0, ufunc=ufunc)[0])
    a = normalize_axis(op, axis, x.ndim)
    places = barrier(running_place_p, x, axis=a, ufunc=ufunc)
    return Running(take_along_axis(x, places, axis=a), places)


def cummax(input: TensorLike, dim: int = -1) -> Running:
    """The largest element so far along ``dim``, and its position: the last one of equal elements, as in PyTorch.

    The gradient goes to that element.  After a NaN all is NaN.  Raises AxisError, DTypeError for complex.
    """
    return _running("cummax", input, dim, "maximum")


def cummin(input: TensorLike, dim: int = -1) -> Running:
    """The smallest element so far along ``dim``, and its position: the last one of equal elements, as in PyTorch.

    The gradient goes to that element.  After a NaN all is NaN.  Raises AxisError, DTypeError for complex.
    """
    return _running("cummin", input, dim, "minimum")


def _joined(late: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest exponent and the sum of exponentials less it, of two stretches."""
    most = unrecorded(maximum, late[0], before[0])
    scaled = (s * unrecorded(lambda m: exp(difference(m, most)), m) for m, s in (late, before))
    return most, next(scaled) + next(scaled)


def logcumsumexp(input: TensorLike, dim: int = -1) -> Tensor:
    """``log(cumsum(exp(x)))`` along ``dim`` without overflow (PyTorch's ``logcumsumexp``).

    Computed by doubling, in log n steps of whole arrays.  Where the largest element so far is infinite, the elements
    equal to it share the gradient.
    Raises AxisError, DTypeError for complex.
    """
    (x,) = promote("logcumsumexp", (input,), real_float("logcumsumexp"))
    if not x.ndim:
        return own(x, input)
    source = x
    a = normalize_axis("logcumsumexp", dim, x.ndim)
    lead, n, reach = (slice(None),) * a, x.shape[a], 1
    # The largest exponents are constants to a tape, so gradients are those of the sums, however large the exponents.
    most, total = unrecorded(identity_of, x), exp(difference(x, unrecorded(identity_of, x)))
    while reach < n:
        early, late, before = ((*lead, part) for part in (slice(reach), slice(reach, None), slice(n - reach)))
        m, s = _joined((most[late], total[late]), (most[before], total[before]))
        most = unrecorded(lambda parts: concat(parts, axis=a), [most[early], m])
        total = concat([total[early], s], axis=a)
        reach *= 2
    return own(log(total) + most, source)
