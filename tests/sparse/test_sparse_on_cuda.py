"""Sparse products and solves on CUDA (a stand-in for CuPy, kernels run on the CPU) are what they are on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from cuda_cases import installed

import tapegrad as tg
from tapegrad.device import CPU, asdevice


@pytest.fixture
def cuda():
    with installed():
        yield asdevice("cuda")


def everything(device, a, b):
    """Products, solves and their gradients there."""
    found = []
    with tg.device(device):
        data, x = tg.asarray(a.data), tg.asarray(b)
        with tg.GradientTape() as tape:
            tape.watch([data, x])
            s = tg.sparse.csr(data, a.indices, a.indptr, a.shape)
            y = s.T @ (s @ x)
            z = tg.sparse.spsolve(s, x)
            w = tg.sparse.spsolve(s.T, x[:, 0])
            v = tg.sparse.gmres(s, x[:, 0], rtol=1e-12)[0]
            loss = sum(tg.sum(t * t) for t in (y, z, w, v, s.todense(), s.diagonal(), s.sum(axis=0)))
        found += [y, z, w, v, *tape.gradient(loss, [data, x])]
        np.testing.assert_allclose(tg.sparse.matmul(s.to_library(), x).numpy(), (s @ x).numpy())
    assert all(t.device is device for t in found)
    return [t.numpy() for t in found]


def test_everything_is_the_same_there(rng, cuda):
    a = scipy.sparse.csr_array(scipy.sparse.random_array((7, 7), density=0.3, rng=rng) + 3 * scipy.sparse.eye_array(7))
    b = rng.normal(size=(7, 3))
    for got, wanted in zip(everything(cuda, a, b), everything(CPU, a, b), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-7)


def test_places_out_of_range_are_told_when_a_value_is_read(cuda):
    with tg.device(cuda):
        s = tg.sparse.csr([1.0, 2.0], [0, 5], [0, 2], (1, 2))
        with pytest.raises(tg.errors.IndexingError, match="column 5"):
            s.data.numpy()
