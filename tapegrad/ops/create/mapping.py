"""Functions of slices, called one by one, and NumPy's other ways to make an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tapegrad.core.aval import normalize_axis
from tapegrad.device import Device, dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import own, tensor
from tapegrad.ops.index.grid_indices import indices
from tapegrad.ops.shape.arrange import vstack
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import expand_dims, moveaxis, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, identity_of

__all__ = [
    "apply_along_axis", "apply_over_axes", "array", "asanyarray", "ascontiguousarray", "copy", "fromfunction",
    "row_stack",
]  # fmt: skip

asanyarray = ascontiguousarray = asarray
row_stack = vstack


def apply_along_axis(
    func1d: Callable[..., TensorLike], axis: int, arr: TensorLike, *args: object, **kwargs: object
) -> Tensor:
    """``func1d(vector, *args, **kwargs)`` of every vector along ``axis``; its results replace that axis.

    The function is called once for each vector, on the tape.  Raises AxisError, and ShapeError if there is none.
    """
    x = tensor("apply_along_axis", arr)
    a = normalize_axis("apply_along_axis", axis, x.ndim)
    rows = moveaxis(x, a, -1)
    lead = rows.shape[:-1]
    results = [asarray(func1d(rows[index], *args, **kwargs)) for index in product(*map(range, lead))]
    if not results:
        raise ShapeError(f"apply_along_axis: {x.shape} has no vectors along axis {a} to apply a function to")
    out = reshape(stack(results), (*lead, *results[0].shape))
    inner = results[0].ndim
    return moveaxis(out, tuple(range(len(lead), len(lead) + inner)), tuple(range(a, a + inner)))


def apply_over_axes(func: Callable[[Tensor, int], TensorLike], a: TensorLike, axes: int | Sequence[int]) -> Tensor:
    """``func(x, axis)`` again and again, for each of ``axes``; an axis it removes is put back with length 1.

    Raises AxisError, and ShapeError for a result of another rank.
    """
    x = source = tensor("apply_over_axes", a)
    n = x.ndim
    for axis in axes if isinstance(axes, (tuple, list)) else (axes,):
        at = normalize_axis("apply_over_axes", axis, n)
        result = asarray(func(x, at))
        x = expand_dims(result, at) if result.ndim == n - 1 else result
        if x.ndim != n:
            raise ShapeError(f"apply_over_axes: the function made {result.shape} of an array of {n} dimensions")
    return own(x, source)


def array(
    object: TensorLike, dtype: DTypeLike | None = None, *, copy: bool | None = True, ndmin: int = 0,
    device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """``object`` as a tensor of at least ``ndmin`` dimensions (NumPy's ``array``): see :func:`asarray`."""
    x = asarray(object, dtype=dtype, device=device, copy=copy)
    return x if x.ndim >= ndmin else reshape(x, (1,) * (ndmin - x.ndim) + x.shape)


def copy(a: TensorLike) -> Tensor:
    """A tensor of the same value, which tapes follow separately; no bytes are copied, since tensors never change."""
    return identity_of(tensor("copy", a))


def fromfunction(
    function: Callable[..., object], shape: Sequence[int], *, dtype: DTypeLike | None = None, **kwargs: object
) -> Any:
    """``function`` of the indices along each dimension at every point of ``shape``; dtype None: the default dtype."""
    grid = indices(shape, dtype=dtypes.asdtype(dtype))
    return function(*(grid[k] for k in range(len(shape))), **kwargs)
