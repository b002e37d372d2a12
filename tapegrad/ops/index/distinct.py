"""NumPy's set functions of sorted distinct values.  Values are gathered, so each has the gradient of one element.

How many there are depends on the values, so all operands are evaluated.
"""

from __future__ import annotations

from typing import Any

from tapegrad.core.aval import normalize_axis
from tapegrad.device import dtypes
from tapegrad.ops.create.creation import asarray, full
from tapegrad.ops.dispatch import SCALARS, promote, sortable, tensor
from tapegrad.ops.elementwise.arithmetic import minimum
from tapegrad.ops.elementwise.comparison import equal, logical_not
from tapegrad.ops.index.indexing import take
from tapegrad.ops.index.sort import searchsorted, sort
from tapegrad.ops.reduce.reductions import any as any_
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import expand_dims, reshape
from tapegrad.tensor import Tensor, TensorLike, from_array

__all__ = ["intersect1d", "isin", "setdiff1d", "setxor1d", "union1d", "unique"]


def unique(
    ar: TensorLike, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: int | None = None, *, equal_nan: bool = True, sorted: bool = True,
) -> Any:  # fmt: skip
    """The distinct elements of the flattened array, or slices along ``axis``, ascending (NumPy's ``unique``).

    With the flags a tuple: also where each first stands, which one each element is, how often each occurs.  The
    gradient of a value goes to the first element that has it.  Raises AxisError.
    """
    x = tensor("unique", ar)
    a = None if axis is None else normalize_axis("unique", axis, x.ndim)
    array, xp = sortable(x)._array, x.device.xp
    with x.device.active():
        if a is None:
            array = array.reshape(-1)
        _, first, inverse, counts = xp.unique(
            array, return_index=True, return_inverse=True, return_counts=True, axis=a, equal_nan=equal_nan
        )
        inverse = inverse.reshape(x.shape if a is None else (x.shape[a],))
        wide = [part.astype("int64") for part in (first, inverse, counts)]
    places, which, often = (from_array(part, x.device) for part in wide)
    values = take(reshape(x, (x.size,)), places, axis=0) if a is None else take(x, places, axis=a)
    flags = ((return_index, places), (return_inverse, which), (return_counts, often))
    more = tuple(part for wanted, part in flags if wanted)
    return (values, *more) if more else values


def _flat(op: str, *xs: TensorLike) -> tuple[Tensor, ...]:
    return tuple(reshape(x, (x.size,)) for x in promote(op, xs))


def isin(
    element: TensorLike, test_elements: TensorLike, assume_unique: bool = False, invert: bool = False, *,
    kind: str | None = None,
) -> Tensor:  # fmt: skip
    """Whether each element of ``element`` is among ``test_elements``, or with ``invert`` whether it is not.

    A bool of the shape of ``element``; NaN equals no element.  assume_unique, kind: accepted for NumPy's sake; nothing
    is faster for them.  There is no gradient.  Raises DTypeError.  NumPy's ``isin``.
    """
    if not isinstance(element, Tensor) and isinstance(test_elements, Tensor):
        element = _beside(element, test_elements)
    x = tensor("isin", element)
    x, among = promote("isin", (x, _beside(test_elements, x)))
    among = reshape(among, (among.size,))
    if not among.size:
        contained = full(x.shape, False, dtype=dtypes.bool_, device=x.device)
    elif x.dtype.kind == "c":  # complex numbers have no order
        contained = any_(equal(expand_dims(x, -1), among), axis=-1)
    else:
        among = sort(among)
        places = minimum(searchsorted(among, x), among.size - 1)  # past the end: not the last one either
        contained = equal(take(among, places), x)
    return logical_not(contained) if invert else contained


def _beside(elements: TensorLike, x: Tensor) -> TensorLike:
    """A sequence of Python numbers as a tensor on the device of ``x``; they are weak: floats get its dtype."""
    if isinstance(elements, SCALARS) or hasattr(elements, "dtype"):
        return elements
    return asarray(elements, dtype=x.dtype if dtypes.is_inexact(x.dtype) else None, device=x.device)


def union1d(ar1: TensorLike, ar2: TensorLike) -> Tensor:
    """The distinct values in either array, ascending; the gradient goes to the first element that has a value."""
    return unique(concat(_flat("union1d", ar1, ar2)))


def intersect1d(ar1: TensorLike, ar2: TensorLike, assume_unique: bool = False, return_indices: bool = False) -> Any:
    """The values in both arrays, ascending; return_indices: also where they first stand in each.

    The gradient goes to the first array.  assume_unique: accepted for NumPy, and ignored.
    """
    x, y = _flat("intersect1d", ar1, ar2)
    values, first = unique(x, return_index=True)
    both = isin(values, y)
    values, first = values[both], first[both]
    if not return_indices:
        return values
    theirs, second = unique(y, return_index=True)
    return values, first, second[isin(theirs, x)]


def setdiff1d(ar1: TensorLike, ar2: TensorLike, assume_unique: bool = False) -> Tensor:
    """The distinct values of ``ar1`` that are not in ``ar2``, ascending; with ``assume_unique`` as they stand."""
    x = tensor("setdiff1d", ar1)
    x = reshape(x, (x.size,))
    values = x if assume_unique else unique(x)
    return values[isin(values, ar2, invert=True)]


def setxor1d(ar1: TensorLike, ar2: TensorLike, assume_unique: bool = False) -> Tensor:
    """The distinct values in one of the two arrays only, ascending.

    assume_unique: accepted for NumPy, and ignored.
    """
    x, y = map(unique, _flat("setxor1d", ar1, ar2))
    return unique(concat([x[isin(x, y, invert=True)], y[isin(y, x, invert=True)]]), equal_nan=False)
