"""Indexing follows NumPy for every kind of index; gradients accumulate over repeated ones, bit by bit the same."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ImmutableError, IndexingError, ShapeError
from tapegrad.testing import check_grads

BASIC = [
    0, -1, slice(None), slice(1, None, 2), slice(None, None, -1), slice(5, 0, -2), slice(3, 3), slice(-100, 100), ...,
    None, (), (1, 2), (..., 1), (slice(None), -1), (None, 0, ..., None), (1, 2, 3), (1, 2, 3, ...), (slice(-1, 0, -1),
    1),
    (slice(9, 2),), np.int64(1), (slice(2, None, -1), ..., slice(None, None, -3)),
]  # fmt: skip
ADVANCED = [
    [0, 2, 0], np.array([[0, 1], [2, -1]]), (slice(None), [1, 1]), (..., [3, 0]), ([0, 1], [1, 2]),
    ([0, 1], slice(None), [1, 2]),
    ([[0], [1]], [1, 2]), (0, slice(None), [1, 2]), (0, [1, 2]), (slice(None), 0, [1, 2]), ([1, 2], None, 0),
    (None, [1, 0]),
    (slice(None, None, -1), [0, 2], slice(1, 3)), ([0, 1], [1, 2], [3, 3]), ([], ), (slice(None), []),
    np.zeros((0, 2), int),
    True, False, (True, [0, 1]), (slice(1), False), np.array(1), (np.array(1), [0, 1]), (None, 0, [1, 2], None),
    np.array([2, 0], np.uint8), ([0, 1], ..., 0), ([0], ..., slice(None, None, 2)), ([0, 1], [[0], [1]], slice(None)),
]  # fmt: skip


def masks(shape):
    rng = np.random.default_rng(1)
    yield rng.random(shape) > 0.5
    yield np.zeros(shape, bool)
    yield rng.random(shape[0]) > 0.5
    yield (slice(None), rng.random(shape[1]) > 0.5)
    yield rng.random(shape[:2]) > 0.5
    yield (slice(None), rng.random(shape[1:]) > 0.5)
    yield (0, rng.random(shape[1:]) > 0.5)
    yield (rng.random(shape[:2]) > 0.5, 1)
    yield (np.arange(shape[0]) < 2, [0, 1])
    yield (..., np.arange(shape[2]) > 0, None)


@pytest.fixture(params=[(3, 4, 5), (30, 41, 17)])
def x(request, rng):
    return rng.standard_normal(request.param)


@pytest.mark.parametrize("index", BASIC + ADVANCED, ids=repr)
def test_like_numpy(index, x):
    for view in (x, x[::-1].transpose(0, 2, 1)[:, ::-1]):
        t = tg.asarray(view, copy=False)
        got, wanted = t[index], view[index]
        assert got.shape == wanted.shape
        np.testing.assert_array_equal(got.numpy(), wanted)
        small = view[:3, :4, :5]
        if np.shape(small) == np.shape(view):
            check_grads(lambda x: x[index] ** 2, [small], order=1)


def test_masks_like_numpy(x):
    for mask in masks(x.shape):
        np.testing.assert_array_equal(tg.asarray(x)[mask].numpy(), x[mask])
    for shape, lengths in (((3,), (0,)), ((0, 1), (0, 0)), ((2, 3), (2, 0))):  # a length of 0 fits any axis
        mask = np.zeros(lengths, bool)
        np.testing.assert_array_equal(tg.ones(shape)[mask].numpy(), np.ones(shape, np.float32)[mask], strict=True)
    for mask in masks((3, 4, 5)):
        check_grads(lambda x, mask=mask: x[mask] ** 2, [x[:3, :4, :5]], order=1)


def test_basic_indices_are_views(x):
    t = tg.asarray(x)
    for index in (0, slice(1, None), (..., None), (slice(None, None, -2), 1)):
        assert np.shares_memory(t[index].numpy(), t.numpy())


def test_tensors_and_variables_as_indices(x):
    t, i = tg.asarray(x), np.array([2, 0, 2])
    for index in (tg.asarray(i), tg.Variable(i, trainable=False)):
        np.testing.assert_array_equal(t[index].numpy(), x[i])
        np.testing.assert_array_equal(tg.Variable(x)[:, index].numpy(), x[:, i])
    np.testing.assert_array_equal(t[t > 0].numpy(), x[x > 0])
    np.testing.assert_array_equal(
        t[tg.asarray(1), tg.asarray([True, False, True] + [False] * (x.shape[1] - 3))].numpy(), x[1, [0, 2]]
    )
    assert [row.shape for row in t[:2]] == [x.shape[1:]] * 2


def test_second_order_and_jacobian(rng):
    x = rng.standard_normal((4, 3))
    for index in ((slice(None, None, -2), 1), ([0, 2, 0], slice(1, 3)), ([0, 0], [1, 1])):
        check_grads(lambda x, index=index: tg.sin(x)[index] * tg.sum(x), [x])
        t = tg.asarray(x)
        j = tg.jacobian(lambda x, index=index: x[index] ** 2)(t)
        for row in np.ndindex(x[index].shape):
            g = tg.grad(lambda x, index=index, row=row: (x[index] ** 2)[row])(t)
            np.testing.assert_array_equal(j[row].numpy(), g.numpy())


@pytest.mark.parametrize(
    ("shape", "axis", "count"),
    [((50, 300), 0, 500), ((50, 7), 0, 20000), ((50,), 0, 40000), ((300, 20, 3), 1, 64), ((3, 50, 2), 1, 9000)],
)
def test_repeated_indices_accumulate_in_order(shape, axis, count, rng):
    places = rng.integers(0, shape[axis], count)
    ct = rng.standard_normal((*shape[:axis], count, *shape[axis + 1 :])).astype(np.float32)
    _, pull = tg.vjp(lambda x: tg.take(x, places, axis=axis), tg.zeros(shape))
    got = pull(tg.asarray(ct))
    got = (got[0] if isinstance(got, (tuple, list)) else got).numpy()
    wanted = np.zeros(shape, np.float32)
    for k, i in enumerate(places):  # one by one, in the order of the indices: the bits are fixed
        wanted[(slice(None),) * axis + (i,)] += ct[(slice(None),) * axis + (k,)]
    np.testing.assert_array_equal(got, wanted)


def test_complex_rows_and_one_index_among_many():
    z = tg.asarray(np.array([1 + 2j, 3 - 1j, 0.5j]))
    assert tg.grad(lambda z: tg.imag(tg.sum(z[[1, 1, 2]])))(z).tolist() == [0, 2j, 1j]
    assert tg.grad(lambda z: tg.real(z[1:] * z[0]).sum())(z).tolist() == [3 + 0.5j, 1 - 2j, 1 - 2j]


def test_take(x):
    for axis in (0, 1, -1, None):
        np.testing.assert_array_equal(
            tg.take(x, [[0, 2], [-1, 2]], axis=axis).numpy(), np.take(x, [[0, 2], [-1, 2]], axis)
        )
    assert tg.take(x, 1, axis=0).shape == x.shape[1:]
    assert tg.take(np.ones((0, 3)), [], axis=0).shape == (0, 3)
    with pytest.raises(IndexingError, match="index 5 is out of range for an axis of length 3"):
        tg.take(np.ones((3, 2)), [0, 5], axis=0)


def test_take_along_axis(x):
    for axis in (0, 1, 2, -2):
        order = np.argsort(x, axis=axis)
        np.testing.assert_array_equal(
            tg.take_along_axis(x, order, axis=axis).numpy(), np.take_along_axis(x, order, axis)
        )
    first = np.zeros((1, x.shape[1], 1), int)
    np.testing.assert_array_equal(tg.take_along_axis(x, first - 1, axis=0).numpy(), np.take_along_axis(x, first - 1, 0))
    check_grads(lambda x: tg.take_along_axis(x, np.array([[0, 0, 1]]), axis=1) ** 2, [x[:3, :4, 0]])
    check_grads(lambda x: tg.take_along_axis(x, np.array([[0, 0], [1, 2]]), axis=1) ** 2, [x[:1, :4, 0]])
    with pytest.raises(ShapeError, match="take_along_axis: indices of shape"):
        tg.take_along_axis(x, np.zeros((2, 2), int))


SET = [i for i in BASIC + ADVANCED if not (isinstance(i, tuple) and any(k is None for k in i))]


@pytest.mark.parametrize("index", SET, ids=repr)
def test_at_set_and_add(index, x, rng):
    values = rng.standard_normal(x[index].shape)
    wanted = x.copy()
    wanted[index] = values
    np.testing.assert_array_equal(tg.asarray(x).at[index].set(values).numpy(), wanted)
    wanted = x.copy()
    np.add.at(wanted, index, values)
    np.testing.assert_allclose(tg.asarray(x).at[index].add(values).numpy(), wanted, rtol=1e-12)
    np.testing.assert_array_equal(tg.asarray(x).at[index].set(7).numpy()[index], np.full(values.shape, 7.0))
    if x.size < 100:
        check_grads(lambda x, v: x.at[index].set(v * x[index]) ** 2, [x, values], order=1)
        check_grads(lambda x, v: x.at[index].add(v * x[index]) ** 2, [x, values], order=1)


def test_at_set_where_values_repeat_and_masks(x):
    t = tg.asarray(x)
    assert t.at[[1, 1, 1], 0, 0].set(np.array([4.0, 5.0, 6.0]))[1, 0, 0].item() == 6
    g = tg.grad(lambda v: tg.sum(tg.zeros((3,), dtype="float64").at[[1, 1, 2]].set(v)))(np.ones(3))
    assert g.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(t.at[t < 0].set(0).numpy(), np.where(x < 0, 0, x))
    assert np.isinf(tg.asarray([np.inf, np.nan]).at[1].set(np.inf).numpy()).all()
    assert tg.asarray([1, 2]).at[0].set(7.9).tolist() == [7, 2] and tg.Variable([1.0, 2.0]).at[1].add(1).tolist() == [
        1,
        3,
    ]
    with pytest.raises(ShapeError, match="at.*set"):
        t.at[0].set(np.ones((2, 2, 2)))
    with pytest.raises(ImmutableError):
        t[0] = 1


def test_one_hot_and_nonzero(x):
    assert tg.one_hot([2, 0, 5], 3).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert tg.one_hot(np.array([[1]], np.int8), 2, axis=0, dtype="bool").tolist() == [[[False]], [[True]]]
    for a, b in zip(tg.nonzero(x > 0), np.nonzero(x > 0), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
    for f in (lambda: tg.nonzero(1.0), lambda: tg.one_hot([1.0], 2)):
        with pytest.raises((ShapeError, IndexingError)):
            f()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (3, "index 3 is out of range for axis 0"), (-4, "index -4"), ((0, 0, 0, 0), "4 indices for a tensor of shape"),
        (1.5, "1.5 is no index"), ("a", "'a' is no index"), ((..., ...), "Ellipsis"),
        ([0, 3], "index 3 is out of range"),
        ([-4], "index -4"), ([0.5], "float32 is no index"), (np.ones((2, 4), bool), "mask of shape"),
        (slice("a"), "is no index"), (slice(None, None, 0), "is no index"), (([0, 1], [0, 1, 2]), "do not broadcast"),
        (object(), "is no index"), (np.ones(4, bool), "mask of shape"),
    ],
)  # fmt: skip
def test_errors(index, words):
    t = tg.zeros((3, 4, 5))
    for f in (lambda: t[index], lambda: t.at[index].set(1)):
        with pytest.raises(IndexingError, match=words):
            f()


@pytest.mark.parametrize("mode", ["clip", "wrap"])
def test_take_brings_indices_in(mode):
    x, places = np.arange(12.0).reshape(3, 4), np.array([-6, 9, 2])
    np.testing.assert_array_equal(tg.take(x, places, axis=1, mode=mode).numpy(), np.take(x, places, 1, mode=mode))
    tg.testing.check_grads(lambda x: tg.take(x, places, axis=1, mode=mode), (x,), order=1)
    with pytest.raises(IndexError, match="mode 'bounce'"):
        tg.take(x, places, mode="bounce")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(5000,), (5000, 3), (700, 300)])
def test_equal_indices_of_half_types_are_added_up_in_float32(dtype, shape, rng):
    x = tg.zeros((4, *shape[1:]), dtype=dtype)
    places = np.where(rng.uniform(size=shape[0]) < 0.9, -3, 2)  # a sum of ones in half precision stops at 2048 or 256
    values = tg.ones(shape, dtype=dtype)
    found = x.at[places].add(values).numpy()
    expected = np.zeros(x.shape, "float32")
    np.add.at(expected, places, np.ones(shape, "float32"))
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    _, pull = tg.vjp(lambda x: tg.take(x, np.full(5000, -1), axis=0), x)
    np.testing.assert_array_equal(pull(tg.ones((5000, *shape[1:]), dtype=dtype))[0][-1].numpy(), found.dtype.type(5000))


def test_a_million_equal_indices_are_the_same_sum_each_time(rng):
    x = rng.normal(size=1_000_000).astype("float32")
    first, again = (tg.zeros(3).at[np.ones(x.size, int)].add(x).numpy() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first[1], x.astype("float64").sum(), rtol=1e-3, atol=0.1)
