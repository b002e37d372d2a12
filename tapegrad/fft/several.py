"""Transforms along several axes: one after the other, in NumPy's order, so that the bits are NumPy's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.core.aval import normalize_axis
from tapegrad.errors import AxisError, ShapeError
from tapegrad.fft.along import check_real, operand, swapped, transform
from tapegrad.ops.dispatch import own
from tapegrad.ops.elementwise.complex import conj
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "fft2", "fftn", "hfft2", "hfftn", "ifft2", "ifftn", "ihfft2", "ihfftn", "irfft2", "irfftn", "rfft2", "rfftn",
]  # fmt: skip

Lengths = int | Sequence[int] | None


def _lengths_and_axes(op: str, x: Tensor, s: Lengths, axes: Lengths, half: str = "") -> list[tuple[int, int]]:
    """Length and axis of each transform.  Raises ShapeError, AxisError.

    half: "made" or "given" if the result or the operand is half a spectrum along the last axis; then there must be one.
    """
    s, axes = _listed(op, "s", s), _listed(op, "axes", axes)
    if axes is None:
        axes = range(x.ndim) if s is None else range(-len(s), 0)
    along = [normalize_axis(op, a, x.ndim) for a in axes]
    if half and not along:
        raise AxisError(f"{op}: needs one axis at least")
    lengths = [x.shape[a] for a in along]
    if s is not None:
        if len(s) != len(along):
            raise ShapeError(f"{op}: {len(s)} lengths in s={s!r} for {len(along)} axes of shape {x.shape}")
        lengths = [have if n in (None, -1) else n for n, have in zip(s, lengths, strict=True)]
    elif half == "given":
        lengths[-1] = 2 * (lengths[-1] - 1)
    return list(zip(lengths, along, strict=True))


def _listed(op: str, name: str, numbers: Any) -> Sequence[int] | None:
    """One number or several as a sequence.  Raises ShapeError naming ``op`` and the argument for anything else."""
    if numbers is None or isinstance(numbers, (list, tuple, range)):
        return numbers
    try:
        return (operator.index(numbers),)
    except TypeError:
        raise ShapeError(f"{op}: {name} is one integer or a sequence of them, got {numbers!r:.60}") from None


def _complex(name: str, op: str, x: TensorLike, s: Lengths, axes: Lengths, norm: str | None) -> Tensor:
    t = operand(op, x)
    result = t
    for n, axis in reversed(_lengths_and_axes(op, t, s, axes)):
        result = transform(name, op, result, n, axis, norm)
    return own(result, t)


def _to_half(op: str, x: TensorLike, s: Lengths, axes: Lengths, norm: str | None) -> Tensor:
    x = check_real(op, operand(op, x))
    *others, (n, axis) = _lengths_and_axes(op, x, s, axes, "made")
    x = transform("rfft", op, x, n, axis, norm)
    for n, axis in reversed(others):
        x = transform("fft", op, x, n, axis, norm)
    return x


def _from_half(op: str, x: TensorLike, s: Lengths, axes: Lengths, norm: str | None) -> Tensor:
    x = operand(op, x)
    *others, (last, end) = _lengths_and_axes(op, x, s, axes, "given")
    for n, axis in others:
        x = transform("ifft", op, x, n, axis, norm)
    return transform("irfft", op, x, last, end, norm)


def fftn(a: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The Fourier transform along ``axes`` (None: all, or as many of the last as ``s`` has lengths).

    s: the number of points along each (None or -1: as many as there are); norm as of :func:`fft`.  Raises ShapeError,
    AxisError.
    """
    return _complex("fft", "fftn", a, s, axes, norm)


def ifftn(a: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The inverse of :func:`fftn`.  Raises ShapeError, AxisError."""
    return _complex("ifft", "ifftn", a, s, axes, norm)


def rfftn(a: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The Fourier transform of real numbers along ``axes``, of which the last is halved, as by :func:`rfft`.

    Raises ShapeError, DTypeError, AxisError.
    """
    return _to_half("rfftn", a, s, axes, norm)


def irfftn(a: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The inverse of :func:`rfftn`.  Raises ShapeError, AxisError."""
    return _from_half("irfftn", a, s, axes, norm)


def hfftn(x: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The real Fourier transform of what is Hermitian along ``axes``, the last given by its half (SciPy's ``hfftn``).

    Raises ShapeError, AxisError.
    """
    return _from_half("hfftn", conj(operand("hfftn", x)), s, axes, swapped("hfftn", norm))


def ihfftn(x: TensorLike, s: Lengths = None, axes: Lengths = None, norm: str | None = None) -> Tensor:
    """The inverse of :func:`hfftn`.  Raises ShapeError, DTypeError, AxisError."""
    return conj(_to_half("ihfftn", x, s, axes, swapped("ihfftn", norm)))


def _flat(name: str, several: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``several`` with the last two axes for a default."""

    def op(a: TensorLike, s: Lengths = None, axes: Lengths = (-2, -1), norm: str | None = None) -> Tensor:
        return several(a, s, axes, norm)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f":func:`{several.__name__}` along two axes.  Raises ShapeError, AxisError."
    return op


fft2, ifft2 = _flat("fft2", fftn), _flat("ifft2", ifftn)
rfft2, irfft2 = _flat("rfft2", rfftn), _flat("irfft2", irfftn)
hfft2, ihfft2 = _flat("hfft2", hfftn), _flat("ihfft2", ihfftn)
