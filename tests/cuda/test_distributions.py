"""Special functions, densities and draws on CUDA: the CPU's numbers, also where the host computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import CPU

pytestmark = pytest.mark.sampled(1 / 2)


def both(f: Any, cuda: Any) -> None:
    """``f(device)`` gives a list of tensors; those of both devices agree, and lie where they should."""
    found = []
    for d in (CPU, cuda):
        with tg.device(d):
            tensors = f(d)
            assert all(t.device is d for t in tensors)
            found.append([t.numpy() for t in tensors])
    for on_cpu, there in zip(*found, strict=True):
        assert on_cpu.dtype == there.dtype
        np.testing.assert_allclose(there, on_cpu, rtol=1e-10)


def test_functions_and_their_gradients(cuda):
    def g(d):
        a = tg.asarray(np.array([0.3, 2.0, 5.0]), device=d)
        s = tg.special
        f = lambda v: tg.sum(
            s.gammainc(v, 2.0) * s.iv(1, v) * s.owens_t(v, 1.0) + s.betainc(v, 0.5, 0.3) + s.log_ndtr(-v)
            + tg.stats.t.cdf(0.3, v) + s.zeta(2.5, v) + s.polygamma(1, v) + s.hyp1f1(2.0, 1.5, v)
        )  # fmt: skip
        return [f(a), tg.grad(f)(a), s.zeta(a + 1.5), *s.sici(a), *s.fresnel(a)]

    both(g, cuda)


def test_draws_and_their_gradients(cuda):
    def f(d):
        r = tg.random
        r.seed(3)
        a = tg.asarray(np.array([0.3, 2.0, 50.0]), device=d)
        with tg.GradientTape() as tape:
            tape.watch(a)
            y = r.gamma((4, 3), a, dtype="float64") * r.beta((4, 3), a, 2.0, "float64")
            y = y + r.standard_t((3,), a, "float64")
        return [
            y, tape.gradient(y, a), r.multivariate_normal(a, 2 * tg.eye(3, dtype="float64"), (2,), "float64"),
            r.poisson((5,), 20.0), r.binomial((4, 3), 50, a / 60), r.integers((9,), 10), r.geometric((5,), 0.2),
            r.choice(9, (3,), replace=False), r.categorical(tg.log(tg.asarray([0.2, 0.8])), shape=(7,)),
        ]  # fmt: skip

    both(f, cuda)
