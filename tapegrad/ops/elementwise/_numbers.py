"""Python numbers where NumPy computes in float64 whatever their kind."""

from __future__ import annotations

from tapegrad.device import dtypes
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import SCALARS, tensor
from tapegrad.tensor import Tensor, TensorLike


def precise(op: str, x: TensorLike, beside: Tensor | None = None) -> Tensor:
    """``x`` as a tensor; of Python floats, which elsewhere become float32, one of float64 (complex: complex128)."""
    if not isinstance(x, (list, tuple, *SCALARS)):
        return tensor(op, x, beside)
    t = asarray(x, device=None if beside is None else beside.device)
    if t.dtype == dtypes.float32 or t.dtype == dtypes.complex64:
        wide = dtypes.float64 if t.dtype == dtypes.float32 else dtypes.complex128
        t = asarray(x, dtype=wide, device=t.device)
    return t
