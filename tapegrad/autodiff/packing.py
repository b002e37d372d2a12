"""Several arrays as one: how an operation with several results stays a node with one value.

The elements of all of them lie one after the other along the last axis; each result is a slice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.core.aval import Shape, ShapedArray, shaped
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, GradientError, ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import cast
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.device import Device
    from tapegrad.device.types import Array, DType


class Layout:
    """The shapes of an operation's results (one, or ``several``), after ``lead`` axes that all of them have."""

    __slots__ = ("aval", "lead", "several", "shapes")

    def __init__(self, shapes: Sequence[Shape], several: bool, dtype: DType, device: Device, lead: Shape = ()) -> None:
        self.shapes = tuple(shapes)
        self.several = several
        self.lead = lead
        whole = (*lead, sum(prod(s) for s in self.shapes)) if several else (*lead, *self.shapes[0])
        self.aval: ShapedArray = shaped(whole, dtype, device)

    @staticmethod
    def of(op: str, result: Array | list[Array], device: Device) -> Layout:
        """The layout of an array, or of a list of arrays.  Raises DTypeError if their dtypes are of different kinds."""
        arrays = result if isinstance(result, list) else [result]
        return Layout([a.shape for a in arrays], arrays is result, _common(op, [a.dtype for a in arrays]), device)

    @staticmethod
    def told(op: str, told: Any, device: Device) -> Layout:
        """The layout of ``(shape, dtype)``, or a list of such pairs.  Raises ShapeError, DTypeError."""
        several = isinstance(told, list)
        try:
            pairs = [(tuple(shape), dtypes.asdtype(dtype)) for shape, dtype in (told if several else [told])]
        except (TypeError, ValueError):
            raise ShapeError(f"{op}: infer must return (shape, dtype), or a list of such pairs, got {told!r}") from None
        return Layout([s for s, _ in pairs], several, _common(op, [d for _, d in pairs]), device)

    def lifted(self, n: int) -> Layout:
        """The layout with one more leading axis of length ``n``."""
        return Layout(self.shapes, self.several, self.aval.dtype, self.aval.device, (n, *self.lead))

    def packed(self, result: Array | list[Array]) -> Array:
        """One array of a list of arrays (or the only one itself).  Raises ShapeError if it is not what was expected."""
        arrays = result if isinstance(result, list) else [result]
        shapes = [(*self.lead, *s) for s in self.shapes]
        if isinstance(result, list) != self.several or [a.shape for a in arrays] != shapes:
            raise ShapeError(f"a primitive returned shapes {[a.shape for a in arrays]}, expected {shapes}")
        if not self.several:
            return arrays[0].astype(self.aval.dtype, copy=False)
        xp = self.aval.device.xp
        sized = [(a, (*self.lead, prod(s))) for a, s in zip(arrays, self.shapes, strict=True) if a.size]
        flat = [a.reshape(shape).astype(self.aval.dtype, copy=False) for a, shape in sized]
        return xp.concatenate(flat, axis=-1) if flat else xp.zeros(self.aval.shape, self.aval.dtype)

    def unpacked(self, whole: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The results as a tuple of tensors (or the only one itself)."""
        if not self.several:
            return whole
        parts, start = [], 0
        lead = whole.shape[:-1]  # a cotangent may have more leading axes than the results
        for shape in self.shapes:
            size = prod(shape)
            parts.append(reshape(whole[..., start : start + size], (*lead, *shape)))
            start += size
        return tuple(parts)

    def repacked(self, op: str, given: Any) -> Tensor:
        """The tangents of the results, packed into one.  Raises ShapeError."""
        if isinstance(given, (tuple, list)) != self.several or (self.several and len(given) != len(self.shapes)):
            wanted = f"a tuple of {len(self.shapes)} tangents, one for each result" if self.several else "one tangent"
            raise GradientError(f"{op}: a JVP rule returned {nest.shown(given)}; it returns {wanted}")
        pieces = [asarray(x) for x in (given if self.several else [given])]
        shapes = [p.shape for p in pieces]
        if shapes != [(*self.lead, *s) for s in self.shapes]:
            raise ShapeError(f"{op}: a JVP rule returned shapes {shapes}, the results have {list(self.shapes)}")
        if not self.several:
            return cast(pieces[0], self.aval.dtype)
        flat = [
            cast(reshape(p, (*self.lead, prod(s))), self.aval.dtype) for p, s in zip(pieces, self.shapes, strict=True)
        ]
        return concat(flat, axis=-1)


def _common(op: str, items: list[DType]) -> DType:
    if len({d.kind for d in items}) > 1:
        names = ", ".join(d.name for d in items)
        raise DTypeError(f"{op}: returned dtypes {names}: results of one primitive must be of one kind; cast them")
    return dtypes.result_type(*items) if items else dtypes.float32
