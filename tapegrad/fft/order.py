"""Frequencies, and the order in which a transform has them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from tapegrad.core.aval import normalize_axis
from tapegrad.device import Device, dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops import arange, concat, roll
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, identity_of

__all__ = ["fftfreq", "fftshift", "ifftshift", "rfftfreq"]


def _scaled(op: str, numbers: Tensor, n: int, d: float, dtype: DTypeLike | None) -> Tensor:
    dtype = dtypes.asdtype(dtype)
    return cast(cast(numbers, dtypes.float64) * (1.0 / (n * d)), dtype)


def _points(op: str, n: int) -> int:
    if index(n) < 1:
        raise ShapeError(f"{op}: n={n}; a transform has one point at least")
    return index(n)


def fftfreq(n: int, d: float = 1.0, *, dtype: DTypeLike | None = None, device: Device | str | None = None) -> Tensor:
    """The frequencies of the ``n`` points of a transform of samples ``d`` apart; dtype None: the default dtype.

    Raises ShapeError for ``n < 1``.
    """
    n = _points("fftfreq", n)
    ahead = arange(0, (n - 1) // 2 + 1, device=device)
    return _scaled("fftfreq", concat([ahead, arange(-(n // 2), 0, device=device)]), n, d, dtype)


def rfftfreq(n: int, d: float = 1.0, *, dtype: DTypeLike | None = None, device: Device | str | None = None) -> Tensor:
    """The frequencies of the ``n // 2 + 1`` points of a transform of ``n`` real samples ``d`` apart.

    dtype None: the default dtype.  Raises ShapeError for ``n < 1``.
    """
    n = _points("rfftfreq", n)
    return _scaled("rfftfreq", arange(0, n // 2 + 1, device=device), n, d, dtype)


def _rolled(op: str, x: TensorLike, axes: int | Sequence[int] | None, sign: int) -> Tensor:
    x = tensor(op, x)
    chosen = range(x.ndim) if axes is None else axes if isinstance(axes, Sequence) else (axes,)
    along = [normalize_axis(op, a, x.ndim) for a in chosen]
    return roll(x, [sign * (x.shape[a] // 2) for a in along], axis=along) if along else identity_of(x)


def fftshift(x: TensorLike, axes: int | Sequence[int] | None = None) -> Tensor:
    """Frequency 0 moved to the middle along ``axes`` (None: all).  Raises AxisError."""
    return _rolled("fftshift", x, axes, 1)


def ifftshift(x: TensorLike, axes: int | Sequence[int] | None = None) -> Tensor:
    """The inverse of :func:`fftshift`.  Raises AxisError."""
    return _rolled("ifftshift", x, axes, -1)
