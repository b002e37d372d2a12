"""Half types: every bit pattern of float16 and bfloat16, against float64 rounded once, values and derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from half_cases import CASES, HALVES, check_every_number
from scipy import special

import tapegrad as tg
from tapegrad.nn import functional as F


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_rounded_once(name: str, dtype: str) -> None:
    check_every_number(name, dtype, "cpu")


WHOLE = {
    "mean": lambda x, y: tg.mean(x, axis=1),
    "var": lambda x, y: tg.var(x, axis=0, correction=1),
    "std": lambda x, y: tg.std(x),
    "logsumexp": lambda x, y: tg.logsumexp(x, axis=1),
    "cross": lambda x, y: tg.cross(x[:, :3], y[:, :3]),
    "linalg.cross": lambda x, y: tg.linalg.cross(x[:, :3], y[:, :3]),
    "cdist": lambda x, y: tg.cdist(x, y),
    "dist": lambda x, y: tg.dist(x, y),
    "nanmean": lambda x, y: tg.nanmean(x, axis=0),
    "nanstd": lambda x, y: tg.nanstd(x, axis=0),
    "vector_norm": lambda x, y: tg.linalg.vector_norm(x, axis=1, ord=3),
    "softmax": lambda x, y: tg.softmax(x),
    "log_softmax": lambda x, y: tg.log_softmax(x, axis=0),
    "layer_norm": lambda x, y: F.layer_norm(x, (12,), y[0], y[1]),
    "rms_norm": lambda x, y: F.rms_norm(x, (12,), y[0], eps=1e-3),
    "group_norm": lambda x, y: F.group_norm(tg.reshape(x, (2, 6, 4)), 3, y[0, :6], y[1, :6]),
    "instance_norm": lambda x, y: F.instance_norm(tg.reshape(x, (2, 6, 4)), weight=y[0, :6]),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], y[1], training=True),
    "normalize": lambda x, y: F.normalize(x),
    "standardize": lambda x, y: F.standardize(x),
    "local_response_norm": lambda x, y: F.local_response_norm(tg.reshape(x, (2, 6, 4)), 3),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, tg.abs(y)),
    "kl_div": lambda x, y: F.kl_div(x, tg.abs(y)),
    "lerp": lambda x, y: tg.lerp(x, y, 0.3),
    "rsqrt": lambda x, y: tg.rsqrt(tg.abs(x)),
    "glu": lambda x, y: F.glu(x),
    "squareplus": lambda x, y: F.squareplus(x),
}

OF_THE_RESULT = ("softmax", "log_softmax")
"""Their derivatives are made of the result, which is rounded, so that ``x`` need not be kept."""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", WHOLE)
def test_functions_of_one_name_are_those_of_float32_rounded_once(name: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    x, y = (tg.asarray(rng.normal(size=(4, 12)) + 1, dtype=dtype) for _ in range(2))
    wide = [tg.astype(t, "float32") for t in (x, y)]
    f = WHOLE[name]
    got, pull = tg.vjp(f, x, y)
    wanted, pull_wide = tg.vjp(f, *wide)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.numpy(), wanted.numpy().astype(got.dtype))
    if name in OF_THE_RESULT:
        return
    ct = tg.asarray(rng.normal(size=got.shape), dtype=dtype)
    g, g_wide = pull(ct)[0], pull_wide(tg.astype(ct, "float32"))[0]
    assert g.dtype == dtype
    np.testing.assert_array_equal(g.numpy(), g_wide.numpy().astype(g.dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_mean_of_many_is_no_infinity(dtype: str) -> None:
    x = tg.full((300_000,), 2.0, dtype=dtype)
    assert tg.mean(x).item() == 2 and tg.std(x).item() == 0
    labels = tg.zeros((70_000,), dtype="int64")
    assert abs(F.cross_entropy(tg.zeros((70_000, 2), dtype=dtype), labels).item() - 0.6931) < 4e-3


@pytest.mark.parametrize("dtype", HALVES)
def test_running_statistics_keep_their_dtype(dtype: str) -> None:
    running = [tg.Variable(np.full(3, v), dtype="float32") for v in (0.0, 1.0)]
    x = tg.asarray(np.random.default_rng(1).normal(size=(5, 3, 4)) + 2, dtype=dtype)
    y = F.batch_norm(x, *running, training=True)
    z = F.batch_norm(x, *running)
    assert y.dtype == z.dtype == dtype and running[0].dtype == "float32"
    np.testing.assert_allclose(running[0].numpy(), 0.1 * x.numpy().astype("float32").mean((0, 2)), rtol=1e-6)


def test_a_small_slope_times_a_large_cotangent() -> None:
    x = tg.asarray([-5.0], dtype="float16")
    _, pull = tg.vjp(tg.gelu, x)
    exact = 65504 * (special.ndtr(-5.0) - 5 * np.exp(-12.5) / np.sqrt(2 * np.pi))
    assert (
        abs(pull(tg.asarray([65504.0], dtype="float16"))[0].item() - exact) <= 2.0**-12
    )  # half a unit of the last place


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tails_keep_their_relative_precision(dtype: str) -> None:
    x = np.array([-12.0, -10, -8, -6, -5], dtype)
    wide = x.astype(np.float64)
    gelu, slope = wide * special.ndtr(wide), special.ndtr(wide) + wide * np.exp(-wide * wide / 2) / np.sqrt(2 * np.pi)
    tolerance = 100 * np.finfo(dtype).eps
    got, pull = tg.vjp(tg.gelu, tg.asarray(x))
    np.testing.assert_allclose(got.numpy(), gelu, rtol=tolerance)
    np.testing.assert_allclose(pull(tg.ones_like(got))[0].numpy(), slope, rtol=tolerance)
    small = np.array([-100.0, -95] if dtype == "float32" else [-740.0, -720], dtype)
    np.testing.assert_allclose(tg.sigmoid(tg.asarray(small)).numpy(), np.exp(small), rtol=1e-6)
    _, pull = tg.vjp(tg.expm1, tg.asarray(small / 8))
    np.testing.assert_allclose(pull(tg.ones(2, dtype=dtype))[0].numpy(), np.exp(small / 8), rtol=1e-6)
