"""Zero cotangents."""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.ops.create.creation import zeros
from tapegrad.tensor import Tensor


def zeros_of(aval: ShapedArray, lead: int | None = None) -> Tensor:
    """Zeros of ``aval``, with one more leading axis if ``lead`` is given."""
    shape = aval.shape if lead is None else (lead, *aval.shape)
    return zeros(shape, dtype=aval.dtype, device=aval.device)
