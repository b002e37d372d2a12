"""Gathering and scattering kernels against NumPy, bit for bit."""

import kernel_modules
import ml_dtypes
import numpy as np
import pytest

from tapegrad.errors import IndexingError
from tapegrad.ops.index.indexing import last_place_p, scatter_add_p, take_p

pytestmark = pytest.mark.sampled(1 / 6)

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 33), (9, 4, 8), (40,), (5, 2100), (6, 1)])
def test_put_rows(emulated, dtype, shape):
    """A row of -1 is none."""
    rows = np.array([4, -1, 0, -1, 2])
    table, new = _values(shape, dtype), _values((5, *shape[1:]), dtype, 1)
    expected = table.copy()
    expected[[4, 0, 2]] = new[[0, 2, 4]]
    for target, source in ((table, new), (_misaligned(table), new), (table.copy(), _misaligned(new))):
        target = target.copy() if target is table else target
        kernel_modules.index.put_rows(emulated, target, rows, source)
        np.testing.assert_array_equal(target, expected)
        assert np.array_equal(target[1], table[1])
    strided = np.repeat(new, 2, axis=0)[::2]
    kernel_modules.index.put_rows(emulated, table, rows, strided)
    np.testing.assert_array_equal(table, expected)


def test_put_rows_of_nothing(emulated):
    table = _values((3, 4), np.float32)
    kernel_modules.index.put_rows(emulated, table, np.zeros(0, np.int64), np.zeros((0, 4), np.float32))
    kernel_modules.index.put_rows(emulated, np.zeros((3, 0), np.float32), np.array([1]), np.zeros((1, 0), np.float32))
    np.testing.assert_array_equal(table, _values((3, 4), np.float32))


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
        table = watched.empty((6, 12), np.float32)
        table[...] = 0
        kernel_modules.index.put_rows(watched, table, np.array([5, -1, 0]), operand[:3])
        np.testing.assert_array_equal(table[[5, 0]], x[[0, 2]])


def test_ml_dtypes(emulated):
    x = _values((4, 24), ml_dtypes.bfloat16)
    indices = np.array([1, 1, 0, 2])
    expected = np.zeros((3, 24), np.float32)
    np.add.at(expected, indices, x.astype(np.float32))
    found = _scatter(emulated, x, indices, 0, 3)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(x.dtype).astype(np.float32))


LONG = {
    "all equal": lambda rng, count: np.full(count, 2),
    "half equal": lambda rng, count: np.where(np.arange(count) % 2, 1, rng.integers(0, 5, count)),
    "mixed": lambda rng, count: rng.integers(0, 5, count),
    "two": lambda rng, count: np.arange(count) // 257 % 2 * 4,
}


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (np.float32, 256), (np.float32, 257), (np.float32, 70_000), (ml_dtypes.bfloat16, 70_000), (np.float16, 700),
        (np.int16, 700), (np.bool_, 700), (np.complex64, 700),
    ],
)  # fmt: skip
@pytest.mark.parametrize("case", LONG)
def test_scatter_add_of_many_to_one_place(emulated, case, count, dtype):
    """Whole numbers small enough for any order of addition to be exact."""
    rng = np.random.default_rng(count)
    indices = LONG[case](rng, count)
    x = rng.integers(-1, 2, (2, count, 3)).astype(dtype)
    expected = np.zeros((2, 5, 3), np.complex128 if dtype == np.complex64 else dtype if dtype == np.bool_ else np.int64)
    for b in range(2):
        np.add.at(expected[b], indices, x[b].astype(expected.dtype))
    found = _scatter(emulated, x, indices, 1, 5)
    np.testing.assert_array_equal(found, expected.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scatter_add_of_a_million_equal_rows(emulated, dtype):
    x = np.random.default_rng(2).normal(size=(1_000_000, 1)).astype(dtype)
    indices = np.ones(len(x), np.int64)
    found = _scatter(emulated, x, indices, 0, 3)
    exact = x.astype(np.float64).sum()
    # Sums of sums err less than one long sum; here is their order, by pieces of 256.
    level = x[:, 0].astype(np.float32)
    while len(level) > 256:
        parts = np.zeros((-(-len(level) // 256), 256), np.float32)
        parts.reshape(-1)[: len(level)] = level
        level = np.add.accumulate(parts, axis=1)[:, -1]
    wanted = np.add.accumulate(level)[-1].astype(dtype)
    assert abs(float(wanted) - exact) < max(1e-2, 1e-3 * abs(exact))
    np.testing.assert_array_equal(found, np.array([[0], [wanted], [0]], dtype))
    np.testing.assert_array_equal(_scatter(emulated, x, indices, 0, 3), found)  # and the same bits again


def test_the_longest_chain_of_additions_is_bounded(emulated, monkeypatch):
    """Rounds are few, and in each a thread adds at most 256 rows."""
    launched = []
    launch = emulated.launch

    def counted(function, grid, block, args, shared=0):
        launched.append((args[2] if len(args) == 10 else None, len(args)))
        launch(function, grid, block, args, shared)

    monkeypatch.setattr(emulated, "launch", counted)
    _scatter(emulated, np.ones((1_000_000, 1), np.float32), np.zeros(1_000_000, np.int64), 0, 1)
    longest = [int(np.diff(starts).max()) for starts, count in launched if count == 10]
    assert longest == [1_000_000, 3907, 16]  # what is more than 256 goes on to the next round
    assert len(launched) == 3 + 2 * 2
    launched.clear()
    _scatter(emulated, np.ones((256, 1), np.float32), np.zeros(256, np.int64), 0, 1)
    assert len(launched) == 1
