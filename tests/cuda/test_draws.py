"""Random numbers drawn inside generated kernels: the CPU's bits, drawn again where they are needed, never kept."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cuda_cases import numbers, same_bits

import tapegrad as tg
from tapegrad.core.buffer import Buffer
from tapegrad.device import CPU
from tapegrad.tensor import from_array

pytestmark = pytest.mark.sampled(1 / 2)

F = tg.nn.functional


@pytest.mark.parametrize("shape", [(1,), (5,), (4096,), (4099, 3), (10000,)])
def test_drawn_bits_are_those_of_the_cpu(shape, cuda):
    for seed, skip in ((3, 0), (2**100 + 7, 2**40)):
        found = []
        for d in (cuda, CPU):
            with tg.device(d):
                g = tg.random.Generator(seed)
                g.take(skip)
                uniform, bernoulli, normal = tg.random.uniform, tg.random.bernoulli, tg.random.normal
                exact = [uniform(shape, dtype=dtype, generator=g) for dtype in ("float32", "float64", "float16")]
                exact += [uniform(shape, -2, 3, generator=g), bernoulli(shape, 0.3, generator=g)]
                exact += [bernoulli(shape, 0.3, "bool", g, bits=16)]
                found.append([*exact, *(normal(shape, dtype=dtype, generator=g) for dtype in ("float32", "float64"))])
        for got, wanted in zip(found[0][:-2], found[1]):
            same_bits(got, wanted)
        for got, wanted, eps in zip(found[0][-2:], found[1][-2:], (1e-5, 1e-13)):
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=eps, atol=eps)


def test_strided_and_reduced_draws(cuda, on):
    base = numbers((70, 90), "float32")
    found = []
    for d in (cuda, CPU):
        with tg.device(d):
            tg.random.seed(1)
            x = on(d, base, lambda x: x.T)
            found.append([F.dropout(x, 0.25) + 1, tg.sum(F.dropout(x, 0.5), axis=0), tg.sum(F.dropout(x, 0.5), axis=1)])
    for got, wanted in zip(*found):
        same_bits(got, wanted)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_of_a_dropout_is_drawn_again_and_never_kept(p, cuda, on):
    n = 20000
    with tg.device(cuda), tg.measure() as m:
        gc.collect()
        before = m.live_bytes
        x = on(cuda, np.ones(n, "float32"))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = F.dropout(x, p)
            z = tg.sum(tg.matmul(y.reshape(100, 200), tg.ones((200, 1))))
        y.numpy()
        gc.collect()
        filled = [b.node for b in gc.get_objects() if type(b) is Buffer and b.array is not None]
        alive = {node.prim.name for node in filled if node.aval.size >= n}
        assert alive <= {"leaf", "where", "reshape"}, alive
        assert m.live_bytes - before < 2.1 * 4 * n
        g = tape.gradient(z, x)
    kept = y.numpy() != 0
    assert abs(kept.mean() - (1 - p)) < 0.02
    same_bits(g, np.where(kept, np.float32(1 / (1 - p)), np.float32(0)))
    assert not any("random" in name for name in m.peak_by_primitive)


def test_draws_lie_where_their_parameters_lie(cuda):
    mean = from_array(cuda.array(np.full(3, 0.5)), cuda)
    with tg.device("cpu"):
        for found in (
            tg.random.normal((2, 3), mean), tg.random.uniform((2, 3), 0.0, mean), tg.random.bernoulli((2, 3), mean),
            tg.random.permutation(mean), tg.random.choice(mean, 2),
        ):  # fmt: skip
            assert found.device is cuda


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 13, 4093, 4099])
def test_every_number_of_a_block_is_used_whatever_the_length(cuda, n, dtype):
    found = []
    for device in ("cpu", cuda):
        tg.random.seed(n)
        with tg.device(device):
            skipped = tg.random.uniform((3,), dtype=dtype)
            found.append((tg.full((n,), 2.0, dtype=dtype) * tg.random.uniform((n,), dtype=dtype), skipped))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())
