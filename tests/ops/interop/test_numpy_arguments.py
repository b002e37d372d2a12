"""Arguments as NumPy's functions take them: by position, and under NumPy's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.testing import check_grads

X = np.random.default_rng(5).standard_normal((3, 4))
SAME: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda m, x: m.sum(x, 0),
    "sum in a dtype": lambda m, x: m.sum(x, 0, "float32"),
    "prod": lambda m, x: m.prod(x, 1, "float32"),
    "mean": lambda m, x: m.mean(x, 0),
    "mean in a dtype": lambda m, x: m.mean(x, None, "float32"),
    "mean of integers in a dtype": lambda m, x: m.mean(m.asarray([1, 2]), dtype="float32"),
    "max": lambda m, x: m.max(x, (0, 1)),
    "min": lambda m, x: m.min(x, -1),
    "any": lambda m, x: m.any(x > 0, 0),
    "all": lambda m, x: m.all(x > 0, 1),
    "count_nonzero": lambda m, x: m.count_nonzero(x > 0, 1),
    "argmax": lambda m, x: m.argmax(x, 0),
    "argmin": lambda m, x: m.argmin(x, 1),
    "var": lambda m, x: m.var(x, 0, ddof=1),
    "std": lambda m, x: m.std(x, 1, "float64", ddof=2, keepdims=True),
    "std, correction": lambda m, x: m.std(x, correction=1),
    "sort": lambda m, x: m.sort(x, 0),
    "sort flattened": lambda m, x: m.sort(x, None, "stable"),
    "argsort": lambda m, x: m.argsort(x, 0, kind="mergesort"),
    "argsort flattened": lambda m, x: m.argsort(x, axis=None),
    "searchsorted": lambda m, x: m.searchsorted(m.asarray([0.0, 1.0]), x, "right"),
    "diff": lambda m, x: m.diff(x, 2, 0),
    "concatenate": lambda m, x: m.concatenate([x, x], 1),
    "stack": lambda m, x: m.stack([x, x], -1),
    "flip": lambda m, x: m.flip(x, 0),
    "roll": lambda m, x: m.roll(x, 2, 1),
    "repeat": lambda m, x: m.repeat(x, 2, 1),
    "take": lambda m, x: m.take(x, [2, 0], 1),
    "take_along_axis": lambda m, x: m.take_along_axis(x, m.argsort(x, 0), 0),
    "tensordot": lambda m, x: m.tensordot(x, x, ((0, 1), (0, 1))),
    "tril": lambda m, x: m.tril(x, 1),
    "triu": lambda m, x: m.triu(x, -1),
    "clip": lambda m, x: m.clip(x, a_min=-0.5, a_max=0.5),
    "clip below": lambda m, x: m.clip(x, 0, None),
    "meshgrid": lambda m, x: m.meshgrid(x[0], x[:, 0], sparse=True, copy=False)[1],
    "zeros": lambda m, x: m.zeros((2, 3), "int32"),
    "ones": lambda m, x: m.ones(3, bool),
    "full": lambda m, x: m.full((2,), 7, "float64"),
    "zeros_like": lambda m, x: m.zeros_like(x, "int8", shape=(2, 2)),
    "ones_like": lambda m, x: m.ones_like(x, shape=3),
    "full_like": lambda m, x: m.full_like(x, 2.5, "float32", shape=()),
    "arange": lambda m, x: m.arange(1, 9, 3, "float64"),
    "eye": lambda m, x: m.eye(3, 4, 1, "float64"),
    "asarray": lambda m, x: m.asarray([1, 2], "float64"),
    "broadcast_shapes": lambda m, x: m.zeros(m.broadcast_shapes((3, 1), 4), "int8"),
}


@pytest.mark.parametrize("name", SAME)
def test_like_numpy(name: str) -> None:
    got, wanted = SAME[name](tg, tg.asarray(X)), SAME[name](np, X)
    np.testing.assert_array_equal(got.numpy(), wanted, strict=True)


@pytest.mark.parametrize("decimals", [0, 1, 3, -1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int64"])
def test_round(decimals: int, dtype: str) -> None:
    x = (X * 40).astype(dtype) if "complex" not in dtype else (X * 40 + 40j * X[::-1]).astype(dtype)
    np.testing.assert_array_equal(tg.round(x, decimals).numpy(), np.round(x, decimals), strict=True)
    np.testing.assert_array_equal(tg.asarray(x).round(decimals).numpy(), np.round(x, decimals), strict=True)


def test_round_has_gradient_zero() -> None:
    assert not tg.grad(lambda x: tg.sum(tg.round(x, 1)))(tg.asarray(X)).numpy().any()


def test_linspace_of_complex_numbers() -> None:
    far = complex(0, 1e300)
    np.testing.assert_array_equal(tg.linspace(0j, far, 4, dtype=tg.complex128).numpy(), np.linspace(0j, far, 4))
    assert tg.linspace(0, 1j, 3).dtype == tg.complex64


@pytest.mark.parametrize("call", ["var", "std", "mean"])
def test_gradients_with_dtype_and_ddof(call: str) -> None:
    more = {} if call == "mean" else {"ddof": 1}
    check_grads(lambda x: getattr(tg, call)(x, 0, "float64", **more), [X], order=2)
