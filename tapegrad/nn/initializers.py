"""Initial weights: each initializer is ``f(shape, dtype, generator) -> Tensor``, found by Keras' name.

The ``generator`` belongs to one weight.  So a layer may be built inside a checkpointed function: the rerun, which
finds the weights made, draws the same dropout masks as the first run, since making weights never touched their stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import tapegrad.linalg as linalg
import tapegrad.random as random
from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.spellings import open_to_users
from tapegrad.tensor import DTypeLike, Tensor

__all__ = ["get", "glorot_uniform", "he_uniform", "lecun_uniform", "normal", "ones", "orthogonal", "uniform", "zeros"]

Initializer = Callable[[tuple[int, ...], Any, random.Generator], Tensor]


def zeros(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """All zeros."""
    return ops.zeros(shape, dtype=dtype)


def ones(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """All ones."""
    return ops.ones(shape, dtype=dtype)


def _uniform(limit: float, shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    return random.uniform(shape, -limit, limit, dtype=dtype, generator=generator)


def _normal(stddev: float, shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    return random.normal(shape, 0.0, stddev, dtype=dtype, generator=generator)


def uniform(limit: float = 0.05) -> Initializer:
    """An initializer uniform in ``[-limit, limit)``."""
    return partial(_uniform, limit)


def normal(stddev: float = 0.05) -> Initializer:
    """An initializer with mean 0 and standard deviation ``stddev``."""
    return partial(_normal, stddev)


def glorot_uniform(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """Uniform with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, AISTATS 2010)."""
    fan_in, fan_out = fans(shape)
    return uniform(math.sqrt(6.0 / max(1, fan_in + fan_out)))(shape, dtype, generator)


def he_uniform(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """Uniform with variance ``2 / fan_in``, for ReLU (He et al., ICCV 2015)."""
    return uniform(math.sqrt(6.0 / max(1, fans(shape)[0])))(shape, dtype, generator)


def lecun_uniform(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """Uniform with variance ``1 / fan_in`` (LeCun et al., Efficient BackProp, 1998)."""
    return uniform(math.sqrt(3.0 / max(1, fans(shape)[0])))(shape, dtype, generator)


def orthogonal(shape: tuple[int, ...], dtype: DTypeLike, generator: random.Generator) -> Tensor:
    """Orthonormal rows, or columns if these are fewer, uniformly drawn (Saxe et al., arXiv 1312.6120).

    Axes before the last count as rows, as in Keras.  Raises ShapeError for fewer than two axes.
    """
    if len(shape) < 2:
        raise ShapeError(f"orthogonal: wanted at least two axes, got {tuple(shape)}")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    drawn = _normal(1.0, (max(rows, columns), min(rows, columns)), "float64", generator)
    q, r = linalg.qr(drawn)
    q = q * ops.sign(linalg.diagonal(r))  # else not uniform: Mezzadri, Notices of the AMS 54, 2007
    return ops.astype(ops.reshape(q.T if rows < columns else q, shape), dtype)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(inputs, outputs) of one unit; axes before the last two count as the receptive field."""
    if len(shape) < 2:
        return (shape[0], shape[0]) if shape else (1, 1)
    field = math.prod(shape[:-2])
    return shape[-2] * field, shape[-1] * field


_BY_NAME: dict[str, Initializer] = {
    "zeros": zeros,
    "ones": ones,
    "glorot_uniform": glorot_uniform,
    "he_uniform": he_uniform,
    "lecun_uniform": lecun_uniform,
    "orthogonal": orthogonal,
    "uniform": uniform(),
    "random_uniform": uniform(),
    "normal": normal(),
    "random_normal": normal(),
}


def get(initializer: str | Initializer) -> Initializer:
    """The initializer of that name, or the function itself.

    Raises TapegradError for an unknown name.
    """
    if callable(initializer):
        return initializer
    maker = _BY_NAME.get(initializer) if isinstance(initializer, str) else None
    if maker is None:
        raise TapegradError(f"initializer: wanted a function or one of {', '.join(_BY_NAME)}; got {initializer!r}")
    return maker


open_to_users(globals(), __name__)
