"""What convolutions share: operands, modes, axes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from tapegrad.core.aval import Shape, normalize_axes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.dispatch import promote
from tapegrad.tensor import Tensor, TensorLike

_MODES = ("full", "valid", "same")


def centred(x: Tensor, shape: Sequence[int], late: int = 0) -> Tensor:
    """The middle of ``x``; ``late``: 1 takes the later one where there are two."""
    first = [(n - m + late) // 2 for n, m in zip(x.shape, shape, strict=True)]
    return x[tuple(slice(i, i + m) for i, m in zip(first, shape, strict=True))]


def pair(op: str, in1: TensorLike, in2: TensorLike, mode: str) -> tuple[Tensor, Tensor]:
    """Both operands as tensors of one dtype and rank.  Raises ShapeError, TapegradError for a mode."""
    x, y = promote(op, (in1, in2))
    if mode not in _MODES:
        raise TapegradError(f"{op}: mode {mode!r}; take 'full', 'valid' or 'same'")
    if x.ndim != y.ndim:
        raise ShapeError(f"{op}: operands {x.shape} and {y.shape} differ in rank; add axes")
    return x, y


def swapped(op: str, x: Shape, y: Shape, mode: str) -> bool:
    """Whether ``y`` is the longer one, within which ``x`` slides.  Raises ShapeError if neither is."""
    if mode != "valid" or all(a >= b for a, b in zip(x, y)):
        return False
    if all(a <= b for a, b in zip(x, y)):
        return True
    raise ShapeError(f"{op}: mode 'valid' of {x} and {y}: one must be as long as the other in every dimension")


def axes_of(op: str, axes: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes to transform, sorted; None: all.  Raises AxisError."""
    return tuple(
        sorted(normalize_axes(op, axes if axes is None or isinstance(axes, (int, Integral)) else tuple(axes), ndim))
    )
