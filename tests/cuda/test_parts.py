"""Parts of tensors and variables on CUDA: ``.at``, ``gather_nd``, ``scatter_*``, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import same, values

import tapegrad as tg
from tapegrad.device import CPU, Device
from tapegrad.errors import IndexingError

pytestmark = pytest.mark.sampled(1 / 2)

X = np.random.default_rng(3).uniform(0.5, 2.0, (4, 3)).astype(np.float32)
V = np.random.default_rng(4).uniform(0.5, 2.0, (3, 3)).astype(np.float32)
MASK = X > 1.0
CASES: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: lambda x, v, name=name: getattr(x.at[[0, 2, 0]], name)(v)
        for name in ("add", "subtract", "multiply", "divide", "power", "max", "min")
    },
    "apply": lambda x, v: x.at[[0, 2, 0]].apply(tg.sin) * tg.sum(v),
    "multiply slices": lambda x, v: x.at[1:].multiply(v),
    "max of slices": lambda x, v: x.at[1:].max(v),
    "gather_nd": lambda x, v: tg.gather_nd(x, [[0, 1], [3, -1], [0, 1]]) * v[0],
    "gather_nd by batches": lambda x, v: tg.gather_nd(x[:3], [[0], [2], [-1]], batch_dims=1) * v[0],
    **{
        name: lambda x, v, name=name: getattr(tg, name)(x * v[0], axis=0, where=MASK, initial=0.75)
        for name in ("sum", "prod", "max", "min")
    },
    **{name: lambda x, v, name=name: getattr(tg, name)(x * v[0], where=MASK) for name in ("mean", "var", "std")},
}


@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(name: str, cuda: Device) -> None:
    found = []
    for device in (CPU, cuda):
        with tg.device(device):
            x, v = tg.asarray(X, device=device), tg.asarray(V, device=device)
            y = CASES[name](x, v)
            assert y.device is device
            slopes = tg.grad(lambda x, v: tg.sum(CASES[name](x, v) ** 2), (0, 1))(x, v)
            found.append(values([y, *slopes]))
    same(found[1], found[0], rtol=2e-6, atol=1e-6)


def test_masks_go_where_the_array_is(cuda: Device) -> None:
    x = tg.asarray(X, device=cuda)
    assert tg.sum(x, where=MASK, initial=1.0).device is cuda  # the default device is the CPU
    same(values(tg.mean(x, where=MASK.tolist())), np.mean(X, where=MASK), rtol=1e-6)


def test_variables(cuda: Device) -> None:
    found = []
    for device in (CPU, cuda):
        with tg.device(device):
            v = tg.Variable(tg.asarray(X, device=device))
            v.scatter_add([0, 0, 2], V).scatter_nd_max([[1, 1], [3, 0]], [9.0, 0.0]).scatter_mul(3, 2.0)
            v[1].assign_sub(V[0])
            v[:2, 0].assign(tg.sin(v[2:, 1]))
            found.append(values(v))
    same(found[1], found[0], rtol=2e-6)
    with tg.device(cuda):
        v.scatter_add([7], 1.0)
        with pytest.raises(IndexingError, match="scatter_add: index 7 is out of range for an axis of length 4"):
            v.numpy()
