"""Gathering and scattering kernels against NumPy, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from tapegrad.errors import IndexingError
from tapegrad.ops.indexing import last_place_p, scatter_add_p, take_p

DTYPES = [np.float32, np.float16, np.int16, np.complex128, np.bool_]


def _values(shape, dtype, seed=0):
    found = np.random.default_rng(seed).normal(size=shape) * 50
    return found.astype(dtype)


def _misaligned(x):
    """A copy of ``x`` that begins one element after an aligned place."""
    room = np.empty(x.size + 1, x.dtype)
    room[1:] = x.reshape(-1)
    return room[1:].reshape(x.shape)


def _take(device, x, indices, axis):
    out = device.empty((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    take_p.cuda(device, x, indices, axis=axis, out=out)
    return out


def _scatter(device, x, indices, axis, n):
    out = device.empty((*x.shape[:axis], n, *x.shape[axis + indices.ndim :]), x.dtype)
    scatter_add_p.cuda(device, x, indices, axis=axis, n=n, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, axis", [((7, 33), 0), ((3, 5, 32), 1), ((40,), 0), ((2, 9, 1), 1), ((3, 4100), 0)])
def test_take(emulated, dtype, shape, axis):
    x = _values(shape, dtype)
    indices = np.random.default_rng(1).integers(0, shape[axis], (4, 3))
    expected = np.take(x, indices, axis=axis)
    for operand in (x, _misaligned(x), np.asfortranarray(x)):
        np.testing.assert_array_equal(_take(emulated, operand, indices, axis), expected)


def test_take_of_nothing_and_at_one_place(emulated):
    assert _take(emulated, np.zeros((3, 0)), np.array([1, 2]), 0).shape == (2, 0)
    assert _take(emulated, np.arange(4.0), np.array(2), 0) == 2
    with pytest.raises(IndexingError, match="no elements"):
        _take(emulated, np.zeros((0, 3)), np.array([1]), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before, width", [(1, 33), (3, 32), (1, 1), (2, 2100)])
def test_scatter_add(emulated, dtype, before, width):
    indices = np.array([[3, 0, 3], [5, 3, 0]])
    x = _values((before, 2, 3, width), dtype)
    expected = np.zeros((before, 7, width), np.float32 if dtype == np.float16 else dtype)
    for k, place in enumerate(indices.reshape(-1)):
        expected[:, place] += x.reshape(before, 6, width)[:, k]
    for operand in (x, _misaligned(x), np.asfortranarray(x)):
        np.testing.assert_array_equal(_scatter(emulated, operand, indices, 1, 7), expected.astype(dtype))


def test_scatter_add_of_nothing(emulated):
    found = _scatter(emulated, np.zeros((0, 3), np.float32), np.zeros(0, np.int64), 0, 5)
    np.testing.assert_array_equal(found, np.zeros((5, 3)))


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_last_place(emulated, count):
    indices = np.random.default_rng(3).integers(0, 300, count)
    out = emulated.empty((301,), np.int64)
    last_place_p.cuda(emulated, indices, n=301, out=out)
    np.testing.assert_array_equal(out, last_place_p.impl(np, indices, n=301))


def test_the_samples_of_the_primitives(emulated):
    for sample in scatter_add_p.samples:
        x, indices = _values(sample.operands[0], np.float64), np.asarray(sample.operands[1])
        axis, n = sample.params["axis"], sample.params["n"]
        expected = np.empty((*x.shape[:axis], n, *x.shape[axis + indices.ndim :]))
        scatter_add_p.impl(np, x, indices, axis=axis, n=n, out=expected)
        np.testing.assert_array_equal(_scatter(emulated, x, indices, axis, n), expected)


def test_watched(watched):
    x, indices = _values((5, 12), np.float32), np.array([4, 0, 4])
    for operand in (x, _misaligned(x)):
        np.testing.assert_array_equal(_take(watched, operand, indices, 0), x[indices])
        expected = np.zeros((6, 12), np.float32)
        np.add.at(expected, indices, x[:3])
        np.testing.assert_array_equal(_scatter(watched, operand[:3], indices, 0, 6), expected)


def test_ml_dtypes(emulated):
    x = _values((4, 24), ml_dtypes.bfloat16)
    indices = np.array([1, 1, 0, 2])
    expected = np.zeros((3, 24), np.float32)
    np.add.at(expected, indices, x.astype(np.float32))
    found = _scatter(emulated, x, indices, 0, 3)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(x.dtype).astype(np.float32))
