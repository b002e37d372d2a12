"""Random numbers from counters: Philox4x64-10, so that a recipe that draws yields the same bits again.

A generator is a key and a position.  The position is a cell: a rerun of a checkpointed function draws what its first
run drew, and leaves the stream where it is.  A drawn value's recipe holds its key and position, not the generator.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Sequence
from typing import Any

from tapegrad.aval import Shape, shaped
from tapegrad.cell import Cell
from tapegrad.device import CPU, asdevice, bits, current_device, dtypes
from tapegrad.device.bits import blocks16
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.arithmetic import sqrt
from tapegrad.ops.comparison import floor, less
from tapegrad.ops.creation import asarray
from tapegrad.ops.dispatch import SCALARS, barrier, cast
from tapegrad.ops.exponential import log1p
from tapegrad.ops.indexing import take
from tapegrad.ops.sorting import argsort
from tapegrad.ops.trigonometric import cos
from tapegrad.primitive import Sample, general
from tapegrad.tensor import Tensor

_uniform_p = general(
    "random_uniform",
    impl=lambda xp, *, key, counter, shape, dtype, device: bits.uniform(key, counter, shape, dtype),
    infer=lambda *, key, counter, shape, dtype, device: shaped(shape, dtype, device),
    cxx_drawn="tg_uniform",
    samples=[Sample(key=1, counter=0, shape=(2, 3), dtype=dtypes.float32, device=CPU)],
)
_bits16_p = general(
    "random_bits16",
    impl=lambda xp, *, key, counter, shape, device: bits.bits16(key, counter, shape),
    infer=lambda *, key, counter, shape, device: shaped(shape, dtypes.uint16, device),
    cxx_drawn="tg_bits16",
    samples=[Sample(key=1, counter=0, shape=(2, 3), device=CPU)],
)


class Generator:
    """A stream of random numbers with a ``seed`` (an integer; None: from the system)."""

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self._state = Cell((int.from_bytes(os.urandom(8), "little") if seed is None else _seed(seed), 0))

    def seed(self, n: int) -> None:
        """Start the stream of seed ``n`` from its beginning."""
        self._state.set((_seed(n), 0))

    def take(self, blocks: int) -> tuple[int, int]:
        """The key and the position of ``blocks`` fresh blocks of four 64-bit words."""
        with self._lock:  # two threads must not draw the same numbers
            key, position = self._state.get()
            self._state.set((key, position + blocks))
        return key, position

    @property
    def state(self) -> tuple[int, int]:
        """The key and the position, to be kept or compared."""
        return self._state.get()

    @state.setter
    def state(self, value: tuple[int, int]) -> None:
        self._state.set((_seed(value[0]), int(value[1])))


def _seed(n: int) -> int:
    return int(n) % 2**128


default_generator = Generator(0x7A9E)


def seed(n: int) -> None:
    """Start the default generator's stream of seed ``n`` from its beginning."""
    default_generator.seed(n)


def _shape(shape: int | Sequence[int]) -> Shape:
    lengths: Any = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        found = tuple(map(operator.index, lengths))
    except TypeError:
        raise DTypeError(f"random: a shape is made of integers, got {shape!r:.60}") from None
    if any(n < 0 for n in found):
        raise ShapeError(f"random: shape {shape} has a negative length")
    return found


def _unit(shape: Shape, dtype: Any, generator: Generator | None, device: Any = None) -> Tensor:
    """Uniform in [0, 1) on a grid: multiples of 2**-53 (float64), 2**-24 (float32), or the coarser of a short float."""
    drawn = _drawn(dtype)
    dtype = dtypes.asdtype(dtype)
    size = 1
    for n in shape:
        size *= n
    words = size if drawn == dtypes.float64 else -(-size // 2)
    key, counter = (generator or default_generator).take(-(-words // 4))
    unit = barrier(_uniform_p, key=key, counter=counter, shape=shape, dtype=drawn, device=_where(device))
    if dtype == drawn:
        return unit
    steps = 2.0 ** (11 if dtype == dtypes.float16 else 8 if dtype.itemsize == 2 else 3)  # no rounding up to 1
    return cast(floor(unit * steps) / steps, dtype)


def _where(device: Any) -> Any:
    return current_device() if device is None else asdevice(device)


def _drawn(dtype: Any) -> Any:
    """The dtype in which numbers for ``dtype`` are made."""
    dtype = dtypes.asdtype(dtype)
    if not dtypes.is_inexact(dtype) or dtype.kind == "c":
        raise DTypeError(f"random: dtype must be a float, got {dtype}")
    return dtypes.float64 if dtype == dtypes.float64 else dtypes.float32


def _is_number(x: Any, value: float) -> bool:
    return isinstance(x, SCALARS) and x == value


def uniform(
    shape: int | Sequence[int] = (), low: Any = 0.0, high: Any = 1.0, dtype: Any = "float32",
    generator: Generator | None = None, device: Any = None,
) -> Tensor:  # fmt: skip
    """Uniform numbers in ``[low, high)`` (rounding may reach ``high``, as in NumPy); differentiable in the bounds.

    Raises DTypeError, ShapeError.
    """
    unit = _unit(_shape(shape), dtype, generator, device)
    return unit if _is_number(low, 0.0) and _is_number(high, 1.0) else low + (high - low) * unit


def normal(
    shape: int | Sequence[int] = (), mean: Any = 0.0, std: Any = 1.0, dtype: Any = "float32",
    generator: Generator | None = None, device: Any = None,
) -> Tensor:  # fmt: skip
    """Normal numbers (Box and Muller 1958), differentiable in ``mean`` and ``std``.  Raises DTypeError, ShapeError."""
    lengths = _shape(shape)
    u, v = (_unit(lengths, _drawn(dtype), generator, device) for _ in range(2))
    z = cast(sqrt(-2.0 * log1p(-u)) * cos(6.283185307179586 * v), dtypes.asdtype(dtype))
    return z if _is_number(mean, 0.0) and _is_number(std, 1.0) else mean + std * z


def bernoulli(
    shape: int | Sequence[int] = (), p: Any = 0.5, dtype: Any = "float32", generator: Generator | None = None,
    *, bits: int = 24, device: Any = None,
) -> Tensor:  # fmt: skip
    """1 with probability ``p``, else 0, decided by a float32 draw (``p`` rounded up to a multiple of 2**-24).

    ``bits=16`` takes a quarter of a word for each element, with a number ``p`` rounded to a multiple of 2**-16 (so it
    is off by at most 7.7e-6): quicker, and what dropout uses.
    """
    if bits == 16 and isinstance(p, (int, float)):
        lengths, threshold = _shape(shape), round(float(p) * 65536)
        key, counter = (generator or default_generator).take(blocks16(lengths))
        drawn = barrier(_bits16_p, key=key, counter=counter, shape=lengths, device=_where(device))
        return cast(less(drawn, threshold) if threshold < 65536 else drawn >= 0, dtypes.asdtype(dtype))
    return cast(less(_unit(_shape(shape), "float32", generator, device), p), dtypes.asdtype(dtype))


def permutation(x: Any, generator: Generator | None = None) -> Tensor:
    """A random order of ``range(x)``, or of the rows of an array or sequence ``x``.  Raises ShapeError, DTypeError."""
    rows = asarray(x) if isinstance(x, (list, tuple)) or getattr(x, "shape", None) else None
    order = argsort(_unit(_shape(x if rows is None else rows.shape[0]), "float64", generator))
    return order if rows is None else take(rows, order, axis=0)
