"""What the tests of CUDA share: ways for an array to lie, exact numbers, and a comparison of bits."""

from __future__ import annotations

from typing import Any

import numpy as np


def _repeated(x: Any, shape: tuple[int, ...]) -> Any:
    from cupy import broadcast_to  # the stand-in

    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else broadcast_to(x, shape)


DTYPES = ("float32", "float16", "float64", "complex64", "int16")
VIEWS = {
    "contiguous": lambda x: x,
    "misaligned": lambda x: x.reshape(-1)[1:],
    "misaligned rows": lambda x: x.reshape(-1)[1:97].reshape(12, 8),
    "step": lambda x: x[:, ::2],
    "inner rows": lambda x: x[:, 1:5],
    "aligned inner rows": lambda x: x[:, 4:12],
    "reversed": lambda x: x[::-1],
    "both reversed": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T,
    "column": lambda x: x[:, 3:4],
    "five dimensions": lambda x: x.reshape(2, 3, 2, 4, 4).transpose(3, 0, 4, 2, 1),
    "six, two swapped": lambda x: x.reshape(2, 3, 2, 2, 2, 4).swapaxes(1, 3)[:, ::-1],
    "scalar": lambda x: x[2, 3, ...],
    "repeated rows": lambda x: _repeated(x[:1], (5, 16)),
    "repeated columns": lambda x: _repeated(x[:, :1], (12, 8)),
    "one place": lambda x: _repeated(x[1, 2, ...], (3, 7)),
    "empty": lambda x: x[:0],
}


def numbers(shape: tuple[int, ...] | int, dtype: str, seed: int = 0) -> np.ndarray:
    """Small numbers that are exact in every dtype."""
    drawn = np.random.default_rng(seed).integers(-8, 9, shape)
    return (drawn + 1j * drawn[::-1] if "complex" in dtype else drawn).astype(dtype)


def arithmetic(x: Any) -> Any:
    """Operations that IEEE arithmetic rounds in one way only."""
    return (x * x + 3) * x - x


def same_bits(got: Any, wanted: Any) -> None:
    """Equal shapes, dtypes and values, NaN where NaN is; two zeros may differ in sign."""
    got, wanted = (np.asarray(t.numpy() if hasattr(t, "numpy") else t) for t in (got, wanted))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(got, wanted)
