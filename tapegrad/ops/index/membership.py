"""Membership."""

from __future__ import annotations

from tapegrad.device import dtypes
from tapegrad.ops.create.creation import asarray, full
from tapegrad.ops.dispatch import SCALARS, promote, tensor
from tapegrad.ops.elementwise.arithmetic import minimum
from tapegrad.ops.elementwise.comparison import equal, logical_not
from tapegrad.ops.index.indexing import take
from tapegrad.ops.index.sort import searchsorted, sort
from tapegrad.ops.reduce.reductions import any as any_
from tapegrad.ops.shape.shape import expand_dims, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["isin"]


def isin(element: TensorLike, test_elements: TensorLike, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element of ``element`` is among ``test_elements``, or with ``invert`` whether it is not.

    A bool of the shape of ``element``; NaN is among nothing.  assume_unique: accepted for NumPy's sake; nothing is
    faster for it.  There is no gradient.  Raises DTypeError.  NumPy's ``isin``.
    """
    if not isinstance(element, Tensor) and isinstance(test_elements, Tensor):
        element = _beside(element, test_elements)
    x = tensor("isin", element)
    x, among = promote("isin", (x, _beside(test_elements, x)))
    among = reshape(among, (among.size,))
    if not among.size:
        contained = full(x.shape, False, dtype=dtypes.bool_, device=x.device)
    elif x.dtype.kind == "c":  # without an order to search by
        contained = any_(equal(expand_dims(x, -1), among), axis=-1)
    else:
        among = sort(among)
        places = minimum(searchsorted(among, x), among.size - 1)  # past the end: not the last one either
        contained = equal(take(among, places), x)
    return logical_not(contained) if invert else contained


def _beside(elements: TensorLike, x: Tensor) -> TensorLike:
    """A sequence of Python numbers as a tensor on the device of ``x``, as weak as one of them: floats of its dtype."""
    if isinstance(elements, SCALARS) or hasattr(elements, "dtype"):
        return elements
    return asarray(elements, dtype=x.dtype if dtypes.is_inexact(x.dtype) else None, device=x.device)
