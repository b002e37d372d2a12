"""What all distributions draw from: uniform numbers and bits, and shapes and dtypes as users give them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from tapegrad.core.aval import Shape, broadcast_shapes, shaped
from tapegrad.core.primitive import Sample, general
from tapegrad.device import CPU, asdevice, current_device, dtypes
from tapegrad.device.numerics import bits
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.dispatch import SCALARS, barrier, cast, constant, tensor
from tapegrad.ops.elementwise.arithmetic import maximum, sqrt
from tapegrad.ops.elementwise.comparison import floor
from tapegrad.ops.elementwise.exponential import log1p
from tapegrad.ops.elementwise.trigonometric import cos
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.random.stream import Generator, default_generator
from tapegrad.tensor import Tensor

uniform_p = general(
    "random_uniform",
    impl=lambda xp, *, key, counter, shape, dtype, device: bits.uniform(key, counter, shape, dtype),
    infer=lambda *, key, counter, shape, dtype, device: shaped(shape, dtype, device),
    cxx_drawn="tg_uniform",
    samples=[Sample(key=1, counter=0, shape=(2, 3), dtype=dtypes.float32, device=CPU)],
)
bits16_p = general(
    "random_bits16",
    impl=lambda xp, *, key, counter, shape, device: bits.bits16(key, counter, shape),
    infer=lambda *, key, counter, shape, device: shaped(shape, dtypes.uint16, device),
    cxx_drawn="tg_bits16",
    samples=[Sample(key=1, counter=0, shape=(2, 3), device=CPU)],
)


def lengths_of(shape: int | Sequence[int]) -> Shape:
    """A shape as users give it.  Raises DTypeError, ShapeError."""
    lengths: Any = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        found = tuple(map(operator.index, lengths))
    except TypeError:
        raise DTypeError(f"random: a shape is made of integers, got {shape!r:.60}") from None
    if any(n < 0 for n in found):
        raise ShapeError(f"random: shape {shape} has a negative length")
    return found


def unit(shape: Shape, dtype: Any, generator: Generator | None, device: Any = None) -> Tensor:
    """Uniform in [0, 1) on a grid: multiples of 2**-53 (float64), 2**-24 (float32), or the coarser of a short float."""
    drawn = drawn_dtype(dtype)
    dtype = dtypes.asdtype(dtype)
    size = prod(shape)
    words = size if drawn == dtypes.float64 else -(-size // 2)
    key, counter = (generator or default_generator).take(-(-words // 4))
    found = barrier(uniform_p, key=key, counter=counter, shape=shape, dtype=drawn, device=place(device))
    if dtype == drawn:
        return found
    steps = 2.0 ** (11 if dtype == dtypes.float16 else 8 if dtype.itemsize == 2 else 3)  # no rounding up to 1
    return cast(floor(found * steps) / steps, dtype)


def near(device: Any, *parameters: Any) -> Any:
    """``device``; where none is named that of the first parameter which is a tensor or variable."""
    return next((p.device for p in parameters if hasattr(p, "ref")), None) if device is None else device


def place(device: Any) -> Any:
    """The device on which to draw."""
    return current_device() if device is None else asdevice(device)


def drawn_dtype(dtype: Any) -> Any:
    """The dtype in which numbers for ``dtype`` are made.  Raises DTypeError."""
    dtype = dtypes.asdtype(dtype)
    if not dtypes.is_inexact(dtype) or dtype.kind == "c":
        raise DTypeError(f"random: dtype must be a float, got {dtype}")
    return dtypes.float64 if dtype == dtypes.float64 else dtypes.float32


def is_number(x: Any, value: float) -> bool:
    """Whether ``x`` is the Python number ``value``."""
    return isinstance(x, SCALARS) and x == value


class Draw:
    """One call of a distribution: its parameters as tensors of the dtype to compute in, and the shape they make.

    A parameter's dtype does not widen the result, which has ``dtype``: what is drawn is float32 unless that is float64.
    """

    def __init__(
        self, op: str, shape: Any, parameters: Sequence[Any], dtype: Any, generator: Generator | None, device: Any
    ) -> None:
        self.dtype = dtypes.asdtype(dtype)
        self.wide = drawn_dtype(dtype)
        self.generator = generator or default_generator
        tensors = [p for p in parameters if isinstance(p, Tensor)]
        self.device = tensors[0].device if device is None and tensors else place(device)
        beside = tensors[0] if tensors else None
        self.parameters = [self._parameter(op, p, beside) for p in parameters]
        self.shape = broadcast_shapes(f"random.{op}", lengths_of(shape), *(p.shape for p in self.parameters))

    def _parameter(self, op: str, p: Any, beside: Tensor | None) -> Tensor:
        if isinstance(p, (int, float)) and not hasattr(p, "dtype"):
            return Tensor(constant(float(p), self.wide, self.device))
        found = tensor(f"random.{op}", p, beside)
        if found.dtype.kind == "c":
            raise DTypeError(f"random.{op}: a parameter is {found.dtype}; parameters are real")
        return cast(found, self.wide)

    def unit(self) -> Tensor:
        """Uniform in [0, 1)."""
        return unit(self.shape, self.wide, self.generator, self.device)

    def open(self) -> Tensor:
        """Uniform in (0, 1): what would be 0 is half a step."""
        return maximum(self.unit(), 2.0**-54 if self.wide == dtypes.float64 else 2.0**-25)

    def exponential(self) -> Tensor:
        """Positive numbers of the exponential distribution of mean 1."""
        return -log1p(-self.open())

    def full(self, p: Tensor) -> Tensor:
        """A parameter in the whole shape."""
        return p if p.shape == self.shape else broadcast_to(p, self.shape)

    def done(self, x: Tensor) -> Tensor:
        """The result."""
        return cast(self.full(x), self.dtype)

    def normal(self) -> Tensor:
        """Normal numbers of mean 0 and deviation 1 (Box and Muller 1958)."""
        u, v = self.unit(), self.unit()
        return sqrt(-2.0 * log1p(-u)) * cos(6.283185307179586 * v)
