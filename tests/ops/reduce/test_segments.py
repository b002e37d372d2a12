"""Reductions of groups."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.testing import check_grads

IDS = np.array([3, 0, 3, -1, 1, 3, 7, 0])
START = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf, "mean": 0.0}
NAMES = list(START)


def wanted(name: str, x: np.ndarray, n: int) -> np.ndarray:
    out = np.full((n, *x.shape[1:]), START[name])
    for k in range(n):
        rows = x[IDS == k]
        if len(rows):
            out[k] = getattr(np, name)(rows, axis=0)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 2, 2), (8, 0)])
def test_values(name, shape, rng):
    x = rng.normal(size=shape)
    f = getattr(tg, f"segment_{name}")
    np.testing.assert_allclose(f(x, IDS, 5), wanted(name, x, 5), rtol=1e-13)
    assert f(x, IDS).shape == (8, *shape[1:])  # up to the largest id
    assert f(x.astype("f4"), IDS, 5).dtype == np.float32
    assert f(x[:0], IDS[:0], 2).shape == (2, *shape[1:])
    assert f(x[:0], IDS[:0]).shape == (0, *shape[1:])


def test_integers():
    x = np.arange(8)
    assert tg.segment_sum(x, IDS, 4).tolist() == [8, 4, 0, 7]
    assert tg.segment_max(x, IDS, 4).tolist() == [7, 4, -(2**63), 5]
    assert tg.segment_prod(x, IDS, 4).tolist() == [7, 4, 1, 0]
    assert tg.segment_mean(x, IDS, 2).tolist() == [4.0, 4.0]


def test_ids_of_several_dimensions(rng):
    x = rng.normal(size=(2, 4, 3))
    np.testing.assert_array_equal(tg.segment_sum(x, IDS.reshape(2, 4), 5), tg.segment_sum(x.reshape(8, 3), IDS, 5))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, rng):
    x = rng.permutation(16).reshape(8, 2) / 5 - 1
    check_grads(lambda x: getattr(tg, f"segment_{name}")(x, IDS, 4)[np.array([0, 1, 3])] ** 2, [x])


def test_gradients_at_ties_zeros_and_dropped():
    x = tg.asarray([2.0, 2.0, 1.0, 5.0])
    g = tg.grad(lambda x: tg.sum(tg.segment_max(x, [0, 0, 0, 9], 1)))(x)
    assert g.tolist() == [0.5, 0.5, 0, 0]
    x = tg.asarray([0.0, 3.0, 2.0, 0.0, 0.0])
    g = tg.grad(lambda x: tg.sum(tg.segment_prod(x, [0, 0, 0, 1, 1], 2)))(x)
    assert g.tolist() == [6, 0, 0, 0, 0]


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_index_reduce(reduce, include_self, rng):
    x, y = rng.permutation(24).reshape(4, 6) / 7, rng.permutation(40).reshape(4, 10) / 9 + 0.05
    index = np.array([0, 2, 0, 5, 5, 5, 2, 0, 1, 1])
    f = {"prod": np.prod, "mean": np.mean, "amax": np.max, "amin": np.min}[reduce]
    expected = x.copy()
    for k in range(6):
        rows = [y[:, i] for i in np.flatnonzero(index == k)]
        rows += [x[:, k]] if include_self or not rows else []
        expected[:, k] = f(rows, axis=0)
    got = tg.index_reduce(x, 1, index, y, reduce, include_self=include_self)
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    check_grads(lambda x, y: tg.index_reduce(x, -1, index, y, reduce, include_self=include_self), [x, y])


def test_index_add(rng):
    x, y = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    expected = x.copy()
    np.add.at(expected, [0, 3, 0, 1, 1], 2 * y)
    np.testing.assert_allclose(tg.index_add(x, 0, [0, 3, 0, 1, 1], y, alpha=2), expected)
    check_grads(lambda x, y: tg.index_add(x, 0, [0, 3, 0, 1, 1], y, alpha=2) ** 2, [x, y])


def test_errors():
    with pytest.raises(IndexingError, match="segment_sum: segment ids must be integers"):
        tg.segment_sum([1.0], [0.5])
    with pytest.raises(ShapeError, match="segment_max: ids of shape"):
        tg.segment_max([1.0], [0, 1])
    with pytest.raises(TapegradError, match="reduce='sum'"):
        tg.index_reduce(np.ones(2), 0, [0], np.ones(1), "sum")
    with pytest.raises(IndexingError, match="index_add"):
        tg.index_add(np.ones(2), 0, [5], np.ones(1))
    with pytest.raises(ShapeError, match="do not fit"):
        tg.index_add(np.ones(2), 0, [1], np.ones(3))


def test_segments_and_losses_of_labels_are_predicted():
    x, ids = np.ones((6, 5)), np.array([0, 1, 1, 2, 2, 0])
    for f in (
        lambda x: tg.segment_prod(x, ids, 3),
        lambda x: tg.nn.functional.cross_entropy(x, ids),
        lambda x: tg.linalg.lstsq(x, x[:, 0])[0],
        lambda x: tg.average(x, weights=x),
    ):
        assert tg.memory.predict_peak(tg.vjp, f, x).peak_bytes > x.nbytes


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_means_of_integers_round_down(dtype: str, include_self: bool) -> None:
    x, source = np.array([3, -3, 4], dtype), np.array([-4, -4, 7, -8], dtype)
    index = np.array([0, 1, 2, 2])
    expected = [-1, -4, 1] if include_self else [-4, -4, -1]  # PyTorch 2.13
    for f in (tg.index_reduce, tg.scatter_reduce):
        result = f(x, 0, index, source, "mean", include_self=include_self)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint64", "float16", "float32"])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_small_integers_are_reduced_as_by_numpy(name: str, dtype: str) -> None:
    x = np.array([100, 100, 3, 0, 2], "int64").astype(dtype)
    result = getattr(tg, f"segment_{name}")(x, [0, 0, 1, 1, 2], 3)
    expected = [getattr(np, name)(part) for part in (x[:2], x[2:4], x[4:])]
    assert result.dtype == expected[0].dtype
    np.testing.assert_array_equal(result, expected)


def test_updates_keep_the_dtype() -> None:
    x, source = np.array([100, 3], "int8"), np.array([100, 2], "int8")
    for result, expected in (
        (tg.index_add(x, 0, [0, 0], source), x + np.array([102, 0], "int8")),
        (tg.index_reduce(x, 0, [1, 1], source, "prod"), np.array([100, 600]).astype("int8")),
        (tg.asarray(x).at[tg.asarray([1, 1])].multiply(source), np.array([100, 600]).astype("int8")),
    ):
        assert result.dtype == "int8"
        np.testing.assert_array_equal(result, expected)
