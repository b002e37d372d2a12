"""Convolution and correlation of two vectors.  Each primitive is the other's transpose."""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, bilinear
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.elementwise.complex import conj
from tapegrad.ops.shape.join import flip
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["convolve", "correlate"]


def _infer_full(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if x.ndim != 1 or y.ndim != 1 or not x.size or not y.size:
        raise ShapeError(f"convolve_full: needs vectors, not empty, got {x.shape} and {y.shape}")
    return x.with_shape((x.size + y.size - 1,))


def _infer_valid(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if x.ndim != 1 or y.ndim != 1 or not x.size >= y.size > 0:
        raise ShapeError(f"convolve_valid: needs vectors, the longer one first, got {x.shape} and {y.shape}")
    return x.with_shape((x.size - y.size + 1,))


full_p: Primitive = bilinear(
    "convolve_full",
    impl=lambda xp, x, y: xp.convolve(x, y, "full"),
    infer=_infer_full,
    transposes=[
        lambda ct, y: barrier(valid_p, ct, flip(y)),
        lambda ct, x: barrier(valid_p, ct, flip(x)),
    ],
    flops=lambda x, y: 2 * x.size * y.size,
    samples=[Sample((5,), (3,)), Sample((2,), (4,)), Sample((1,), (1,)), Bad((0,), (2,), error=ShapeError)],
    doc="The convolution of two vectors wherever they overlap.",
)
valid_p: Primitive = bilinear(
    "convolve_valid",
    impl=lambda xp, x, y: xp.convolve(x, y, "valid"),
    infer=_infer_valid,
    transposes=[
        lambda ct, y: barrier(full_p, ct, flip(y)),
        lambda ct, x: flip(barrier(valid_p, x, flip(ct))),
    ],
    flops=lambda x, y: 2 * (x.size - y.size + 1) * y.size,
    samples=[Sample((5,), (3,)), Sample((4,), (4,)), Sample((3,), (1,)), Bad((2,), (3,), error=ShapeError)],
    doc="The convolution of two vectors where the second lies within the first.",
)
MODES: dict[str | int, str] = {0: "valid", 1: "same", 2: "full"}


def _of_mode(op: str, x: Tensor, y: Tensor, mode: str | int) -> Tensor:
    """The convolution of ``x`` with ``y``, which is not the longer one."""
    mode = MODES.get(mode, mode)
    if mode == "valid":
        return barrier(valid_p, x, y)
    whole = barrier(full_p, x, y)
    if mode == "same":
        first = (y.size - 1) // 2
        return whole[first : first + x.size]
    if mode != "full":
        raise TapegradError(f"{op}: mode {mode!r} is not one of full, same, valid")
    return whole


def _vectors(op: str, a: TensorLike, v: TensorLike) -> tuple[Tensor, ...]:
    vectors = promote(op, (a, v))
    shaped = tuple(t if t.ndim else t.reshape((1,)) for t in vectors)
    if any(t.ndim != 1 or not t.size for t in shaped):
        raise ShapeError(f"{op}: needs two vectors, not empty, got shapes {[t.shape for t in vectors]}")
    return shaped


def convolve(a: TensorLike, v: TensorLike, mode: str = "full") -> Tensor:
    """The convolution of two vectors (NumPy's ``convolve``).

    mode: ``full``, wherever they overlap; ``same``, as long as the longer one; ``valid``, where they overlap whole.
    Raises ShapeError unless both are vectors, and not empty.
    """
    x, y = _vectors("convolve", a, v)
    return _of_mode("convolve", *((y, x) if y.size > x.size else (x, y)), mode)


def correlate(a: TensorLike, v: TensorLike, mode: str = "valid") -> Tensor:
    """The cross-correlation of two vectors: ``sum(a[n + k] * conj(v[n]))`` at each shift ``k`` (NumPy's ``correlate``).

    mode: see :func:`convolve`.  Raises ShapeError unless both are vectors, and not empty.
    """
    x, y = _vectors("correlate", a, v)
    y = flip(conj(y))
    if y.size <= x.size:
        return _of_mode("correlate", x, y, mode)
    return flip(_of_mode("correlate", flip(y), flip(x), mode))  # NumPy, too, correlates the other way round
