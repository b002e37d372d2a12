"""Functions known by one name with their derivatives in float64, to ask half types for every bit pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from scipy import special

import tapegrad as tg
from tapegrad.nn import functional as F

HALVES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Curve = Callable[[np.ndarray], np.ndarray]


def _s(x: np.ndarray) -> np.ndarray:
    return special.expit(x)


def _bell(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _u(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The argument of the sigmoid in gelu's approximation by tanh, and its derivatives."""
    a, b = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
    return x * (a + b * x * x), a + 3 * b * x * x, 6 * b * x


def _gelu_tanh(x: np.ndarray) -> list[np.ndarray]:
    u, du, ddu = _u(x)
    s, r = _s(u), _s(-u)
    return [x * s, s + x * du * s * r, s * r * (2 * du + x * ddu + x * du * du * (r - s))]


def _mish(x: np.ndarray) -> list[np.ndarray]:
    s, r = _s(x), _s(-x)
    return [x * s * (1 + r) / (1 + r * r), s * (1 + r) / (1 + r * r) + 4 * x * r * r * s / (1 + r * r) ** 2]


def _elu(x: np.ndarray, alpha: float = 1, scale: float = 1, over: float = 1) -> list[np.ndarray]:
    below = np.minimum(x, 0) / over
    return [
        scale * np.where(x > 0, x, alpha * np.expm1(below)),
        scale * np.where(x > 0, 1, alpha / over * np.exp(below)),
        scale * np.where(x > 0, 0, alpha / over**2 * np.exp(below)),
    ]


def _far(limits: tuple[float, ...], f: Callable[[np.ndarray], list[np.ndarray]]) -> Callable[[np.ndarray], list]:
    """``f`` at plus and minus infinity replaced by limits: those of the value, then of each derivative."""

    def with_limits(x: np.ndarray) -> list[np.ndarray]:
        found = f(np.where(np.isinf(x), 0, x))
        pairs = zip(found, limits[::2], limits[1::2], strict=True)
        return [np.where(x == np.inf, high, np.where(x == -np.inf, low, y)) for y, low, high in pairs]

    return with_limits


inf = math.inf
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], list[np.ndarray]]]] = {
    "gelu": (
        tg.gelu,
        _far(
            (-0.0, inf, 0, 1, 0, 0),
            lambda x: [x * special.ndtr(x), special.ndtr(x) + x * _bell(x), (2 - x * x) * _bell(x)],
        ),
    ),
    "gelu tanh": (lambda x: tg.gelu(x, approximate="tanh"), _far((-0.0, inf, 0, 1, 0, 0), _gelu_tanh)),
    "F.gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), _far((-0.0, inf, 0, 1, 0, 0), _gelu_tanh)),
    "silu": (
        tg.silu,
        _far(
            (-0.0, inf, 0, 1, 0, 0),
            lambda x: [x * _s(x), _s(x) * (1 + x * _s(-x)), _s(x) * _s(-x) * (2 + x * (_s(-x) - _s(x)))],
        ),
    ),
    "mish": (F.mish, _far((-0.0, inf, 0, 1), _mish)),
    "sigmoid": (tg.sigmoid, lambda x: [_s(x), _s(x) * _s(-x), -_s(x) * _s(-x) * np.tanh(x / 2)]),
    "tanh": (
        tg.tanh,
        lambda x: [np.tanh(x), 4 * _s(2 * x) * _s(-2 * x), -8 * np.tanh(x) * _s(2 * x) * _s(-2 * x)],
    ),
    "softplus": (
        tg.softplus,
        lambda x: [np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), _s(x), _s(x) * _s(-x)],
    ),
    "log_sigmoid": (tg.log_sigmoid, lambda x: [special.log_expit(x), _s(-x), -_s(x) * _s(-x)]),
    "elu": (tg.elu, _elu),
    "selu": (F.selu, lambda x: _elu(x, 1.6732632423543772, 1.0507009873554805)),
    "celu": (lambda x: F.celu(x, 0.3), lambda x: _elu(x, 0.3, 1, 0.3)),
    "leaky_relu": (
        lambda x: tg.leaky_relu(x, 0.01), lambda x: [np.where(x > 0, x, 0.01 * x), np.where(x > 0, 1, 0.01)]
    ),
    "hardswish": (
        F.hardswish,
        lambda x: [
            np.where(x <= -3, 0, np.where(x >= 3, x, np.clip(x, -3, 3) * (np.clip(x, -3, 3) + 3) / 6)),
            np.where(x <= -3, 0, np.where(x >= 3, 1, (2 * np.clip(x, -3, 3) + 3) / 6)),
        ],
    ),
    "hardsigmoid": (F.hardsigmoid, lambda x: [np.clip(x / 6 + 0.5, 0, 1), np.where(np.abs(x) < 3, 1 / 6, 0)]),
    "softsign": (
        tg.softsign,
        _far(
            (-1, 1, 0, 0, 0, 0),
            lambda x: [
                x / (1 + np.abs(x)), 1 / (1 + np.abs(x)) ** 2, -2 * np.sign(x) / (1 + np.abs(x)) ** 3
            ],
        ),
    ),
    "expm1": (tg.expm1, lambda x: [np.expm1(x), np.exp(x), np.exp(x)]),
    "erf": (tg.erf, lambda x: [special.erf(x), 2 / math.sqrt(math.pi) * np.exp(-x * x)]),
    "erfc": (tg.erfc, lambda x: [special.erfc(x), -2 / math.sqrt(math.pi) * np.exp(-x * x)]),
    "atan": (tg.atan, lambda x: [np.arctan(x), 1 / (1 + x * x)]),
    "asinh": (tg.asinh, lambda x: [np.arcsinh(x), 1 / np.hypot(1, x)]),
    "asin": (tg.asin, lambda x: [np.arcsin(x), 1 / np.sqrt((1 - x) * (1 + x))]),
    "atanh": (tg.atanh, lambda x: [np.arctanh(x), 1 / ((1 - x) * (1 + x))]),
}  # fmt: skip

SQUARED = ("atan", "asinh", "atanh")
"""Their derivatives square ``x``, which overflows in float32 beyond 1e19."""


def ulps(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The error in units of the last place that the result's dtype has at the wanted number."""
    limits = ml_dtypes.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded, found = wanted.astype(got.dtype).astype(np.float64), got.astype(np.float64)
        place = np.maximum(np.frexp(wanted)[1] - 1, math.frexp(float(limits.smallest_normal))[1] - 1)
        error = np.abs(found - wanted) / np.exp2(place - limits.nmant)
    same = (found == rounded) | (np.isnan(found) & np.isnan(wanted))
    return np.where(same, 0, np.where(np.isnan(error), np.inf, error))


def derivatives(f: Callable[[Any], Any], x: Any, count: int) -> list[Any]:
    """The value, and derivatives of each element up to the order ``count - 1``."""
    found = [f]
    while len(found) < count:
        found.append(lambda x, g=found[-1]: tg.vjp(g, x)[1](tg.ones_like(x))[0])
    return [g(x) for g in found]


def check_every_number(name: str, dtype: str, device: Any) -> None:
    """Values of all 65,536 numbers are rounded once; derivatives are within 0.8 units of the last place.

    (Near a zero of a derivative float32 itself errs by more, relative to the result.)
    """
    f, exact = CASES[name]
    with np.errstate(all="ignore"):
        x = np.arange(65536, dtype=np.uint16).view(HALVES[dtype])
        if name in SQUARED:
            x = x[~(np.abs(x.astype(np.float64)) > 1e19)]
        wanted = exact(x.astype(np.float64))
        found = [y.numpy() for y in derivatives(f, tg.asarray(x, device=device), len(wanted))]
        number = ~np.isnan(x)
        assert np.isnan(found[0][~number]).all()
        for order, (got, value) in enumerate(zip(found, wanted, strict=True)):
            assert got.dtype == dtype
            assert ulps(got[number], value[number]).max() <= (0.8 if order else 0.502)
