"""Uniform, normal and Bernoulli numbers, and permutations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tapegrad.device import Device, dtypes
from tapegrad.ops import argsort, asarray, less, take
from tapegrad.ops.dispatch import SCALARS, barrier, cast, tensor
from tapegrad.random.drawing import (
    Domain,
    bits16_p,
    box_muller,
    drawn_dtype,
    home,
    is_number,
    lengths_of,
    near,
    unit,
    within,
)  # fmt: skip
from tapegrad.random.stream import Generator, default_generator
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


def _parameter(op: str, p: TensorLike, beside: Tensor | None) -> Any:
    """A Python number as it is, anything else as a tensor.  Raises NotATensorError."""
    return p if isinstance(p, SCALARS) else tensor(f"random.{op}", p, beside)


def _within(op: str, domain: Domain, **parameters: TensorLike) -> None:
    """Raises DomainError, before anything is drawn."""
    beside = next((p for p in parameters.values() if isinstance(p, Tensor)), None)
    within(op, domain, {name: _parameter(op, p, beside) for name, p in parameters.items()})


def uniform(
    shape: int | Sequence[int] = (), low: Any = 0.0, high: Any = 1.0, dtype: DTypeLike | None = None,
    generator: Generator | None = None, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """Uniform numbers in ``[low, high)`` (rounding may reach ``high``, as in NumPy); differentiable in the bounds.

    Raises DomainError unless ``low <= high``, DTypeError, ShapeError.
    """
    lengths = lengths_of(shape, low, high)
    _within("uniform", {"low <= high": lambda low, high: low > high}, low=low, high=high)
    u = unit(lengths, dtype, generator, near(device, low, high))
    low, high = (_parameter("uniform", p, u) for p in (low, high))
    return u if is_number(low, 0.0) and is_number(high, 1.0) else low + (high - low) * u


def normal(
    shape: int | Sequence[int] = (), mean: Any = 0.0, std: Any = 1.0, dtype: DTypeLike | None = None,
    generator: Generator | None = None, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """Normal numbers (Box and Muller 1958), differentiable in ``mean`` and ``std``.

    Raises DomainError for a negative ``std``, DTypeError, ShapeError.
    """
    lengths, where = lengths_of(shape, mean, std), near(device, mean, std)
    _within("normal", {"std >= 0": lambda std: std < 0}, std=std)
    u, v = (unit(lengths, drawn_dtype(dtype), generator, where) for _ in range(2))
    z = cast(box_muller(u, v), dtypes.asdtype(dtype))
    mean, std = (_parameter("normal", p, z) for p in (mean, std))
    return z if is_number(mean, 0.0) and is_number(std, 1.0) else mean + std * z


def bernoulli(
    shape: int | Sequence[int] = (), p: TensorLike = 0.5, dtype: DTypeLike | None = None,
    generator: Generator | None = None, *, bits: int = 24, device: Device | str | None = None,
) -> Tensor:  # fmt: skip
    """1 with probability ``p``, else 0, decided by a float32 draw (``p`` rounded up to a multiple of 2**-24).

    ``bits=16`` takes a quarter of a word for each element, with a number ``p`` rounded to a multiple of 2**-16 (so it
    is off by at most 7.7e-6): quicker, and what dropout uses.  Raises DomainError for a ``p`` outside [0, 1].
    """
    _within("bernoulli", {"0 <= p <= 1": lambda p: (p < 0) | (p > 1) | (p != p)}, p=p)
    if bits == 16 and isinstance(p, (int, float)):
        lengths, threshold = lengths_of(shape), round(float(p) * 65536)
        key, counter = (generator or default_generator).draw16(prod(lengths))
        drawn = barrier(bits16_p, key=key, counter=counter, shape=lengths, device=home(device))
        return cast(less(drawn, threshold) if threshold < 65536 else drawn >= 0, dtypes.asdtype(dtype))
    return cast(less(unit(lengths_of(shape), "float32", generator, near(device, p)), p), dtypes.asdtype(dtype))


def permutation(x: Any, generator: Generator | None = None) -> Tensor:
    """A random order of ``range(x)``, or of the rows of an array or sequence ``x``.  Raises ShapeError, DTypeError."""
    rows = asarray(x) if isinstance(x, (list, tuple)) or getattr(x, "shape", None) else None
    count = lengths_of(x if rows is None else rows.shape[0])
    order = argsort(unit(count, "float64", generator, None if rows is None else rows.device))
    return order if rows is None else take(rows, order, axis=0)
