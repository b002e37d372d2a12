"""Convolution and correlation of arrays of any rank (scipy.signal's functions)."""

from __future__ import annotations

from math import prod
from typing import Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, bilinear
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops import conj, expand_dims, flip, pad
from tapegrad.ops.dispatch import barrier
from tapegrad.signal.by_fft import fftconvolve
from tapegrad.signal.modes import centred, pair, swapped
from tapegrad.tensor import Tensor, TensorLike

_METHODS = ("auto", "direct", "fft")
_BOUNDARIES = {"fill": "constant", "wrap": "wrap", "symm": "symmetric"}


def _run(xp: Namespace, x: Array, y: Array, *, full: bool) -> Array:
    kind = xp.int64 if x.dtype.kind == "b" else dtypes.accumulator(x.dtype)
    n = tuple(a + b - 1 for a, b in zip(x.shape, y.shape)) if full else x.shape
    if not x.size or not y.size or not prod(n):
        return xp.zeros(n if full else tuple(a - b + 1 for a, b in zip(x.shape, y.shape)), dtype=kind)
    x, y = x.astype(kind, copy=False), y.astype(kind, copy=False)
    return scipy.signal(xp).convolve(x, y, mode="full" if full else "valid", method="direct")


def _infer(x: ShapedArray, y: ShapedArray, *, full: bool) -> ShapedArray:
    if x.ndim != y.ndim or not x.ndim or not all(x.shape + y.shape):
        raise ShapeError(f"convolve: operands {x.shape} and {y.shape}; need the same rank of at least 1, none empty")
    if not full and any(a < b for a, b in zip(x.shape, y.shape)):
        raise ShapeError(f"convolve: mode 'valid' of {x.shape} and {y.shape}: one must be as long in every dimension")
    step = 1 if full else -1
    return x.with_shape(tuple(a + step * (b - 1) for a, b in zip(x.shape, y.shape)))


def _again(x: Tensor, y: Tensor, full: bool) -> Tensor:
    return barrier(convolve_p, x, y, full=full)


convolve_p: Primitive = bilinear(
    "convolve",
    impl=_run,
    infer=_infer,
    transposes=[
        lambda ct, y, *, full: _again(ct, flip(y), not full),
        lambda ct, x, *, full: _again(ct, flip(x), False) if full else flip(_again(x, flip(ct), False)),
    ],
    flops=lambda x, y, *, full: 2 * x.size * y.size,
    samples=[
        Sample((5,), (3,), full=True), Sample((5,), (3,), full=False), Sample((2,), (3,), full=True),
        Sample((3, 4), (2, 3), full=True), Sample((3, 4, 2), (2, 3, 2), full=False), Sample((1,), (1,), full=False),
        Bad((3,), (2, 2), full=True, error=ShapeError), Bad((2, 3), (2, 4), full=False, error=ShapeError),
        Bad((0,), (2,), full=True, error=ShapeError),
    ],
    doc="The convolution wherever the operands overlap (``full``), or where ``y`` lies within ``x``.",
)  # fmt: skip


def convolve(in1: TensorLike, in2: TensorLike, mode: str = "full", method: str = "auto") -> Tensor:
    """The convolution of two arrays of one rank (scipy.signal.convolve).

    mode: ``full``; ``valid``, where one lies within the other; ``same``, the middle of ``full``, as large as ``in1``.
    method: ``direct``, ``fft``, or ``auto``: by size, and directly for integers.  Raises ShapeError, and TapegradError
    for a mode or method.
    """
    x, y = pair("convolve", in1, in2, mode)
    if method not in _METHODS:
        raise TapegradError(f"convolve: method {method!r}; take 'auto', 'direct' or 'fft'")
    if method == "fft" or (method == "auto" and _is_long(x, y)):
        return fftconvolve(x, y, mode)
    if not x.ndim:
        return x * y
    if swapped("convolve", x.shape, y.shape, mode):
        x, y = y, x
    result = barrier(convolve_p, x, y, full=mode != "valid")
    return centred(result, x.shape) if mode == "same" else result


def _is_long(x: Tensor, y: Tensor) -> bool:
    """Whether transforming is quicker: the operations of either way, an FFT's with the factor measured for NumPy's."""
    if not dtypes.is_inexact(x.dtype) or not x.ndim:
        return False
    n = prod(a + b - 1 for a, b in zip(x.shape, y.shape))
    return x.size * y.size > 40 * n * max(n, 2).bit_length()


def correlate(in1: TensorLike, in2: TensorLike, mode: str = "full", method: str = "auto") -> Tensor:
    """The cross-correlation of two arrays of one rank (scipy.signal.correlate): ``in1`` convolved with ``in2``,
    reversed and conjugated; see :func:`convolve`.
    """
    x, y = pair("correlate", in1, in2, mode)
    return convolve(x, _reversed(y), mode, method)


def _reversed(y: Tensor) -> Tensor:
    return conj(flip(y)) if y.ndim else conj(y)


def _bounded(
    op: str, in1: TensorLike, in2: TensorLike, mode: str, boundary: str, fillvalue: TensorLike, turn: bool
) -> Tensor:
    x, y = pair(op, in1, in2, mode)
    if x.ndim != 2:
        raise ShapeError(f"{op}: operands {x.shape} and {y.shape}; need two dimensions")
    if boundary not in _BOUNDARIES:
        raise TapegradError(f"{op}: boundary {boundary!r}; take 'fill', 'wrap' or 'symm'")
    if swapped(op, x.shape, y.shape, mode):
        if turn:  # with exchanged operands the correlation is reversed
            return conj(flip(_bounded(op, y, x, mode, boundary, fillvalue, True)))
        x, y = y, x
    kernel = _reversed(y) if turn else y
    if mode == "valid":
        return barrier(convolve_p, x, kernel, full=False)
    plain = boundary == "fill" and isinstance(fillvalue, (int, float, complex)) and fillvalue == 0
    if plain:
        result = barrier(convolve_p, x, kernel, full=True)
    else:
        fill: dict[str, Any] = {"constant_values": fillvalue} if boundary == "fill" else {}
        around = pad(x, [(n - 1, n - 1) for n in y.shape], mode=_BOUNDARIES[boundary], **fill)
        result = barrier(convolve_p, around, kernel, full=False)
    return centred(result, x.shape, int(turn)) if mode == "same" else result


def convolve2d(
    in1: TensorLike, in2: TensorLike, mode: str = "full", boundary: str = "fill", fillvalue: TensorLike = 0
) -> Tensor:
    """The convolution of two matrices (scipy.signal.convolve2d).

    boundary: what lies around ``in1``: ``fillvalue`` (``fill``), itself again (``wrap``) or its mirror image
    (``symm``); modes as in :func:`convolve`.  Raises ShapeError, and TapegradError for a mode or boundary.
    """
    return _bounded("convolve2d", in1, in2, mode, boundary, fillvalue, False)


def correlate2d(
    in1: TensorLike, in2: TensorLike, mode: str = "full", boundary: str = "fill", fillvalue: TensorLike = 0
) -> Tensor:
    """The cross-correlation of two matrices (scipy.signal.correlate2d); see :func:`convolve2d`."""
    return _bounded("correlate2d", in1, in2, mode, boundary, fillvalue, True)


def widened(x: Tensor, ndim: int) -> Tensor:
    """``x`` with axes of length 1 in front."""
    while x.ndim < ndim:
        x = expand_dims(x, 0)
    return x
