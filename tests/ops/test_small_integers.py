"""Operations whose results, or constants, do not fit into the narrow integers that they are given."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DomainError, DTypeError, IndexingError

INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
LOGITS = np.linspace(-1.0, 2.0, 12).reshape(4, 3)


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (200, 1), (200, 3)])
def test_sum_to_adds_as_sum_does(dtype: str, shape: tuple[int, ...]) -> None:
    x = np.full((200, 3), 1 if dtype == "bool" else 100, dtype)
    result, expected = tg.sum_to(x, shape), tg.sum(x)
    assert result.dtype == expected.dtype
    assert tg.sum(result) == expected
    assert int(expected) == x.sum()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("depth", [3, 128, 256, 300])
def test_one_hot_reaches_beyond_the_dtype(dtype: str, depth: int) -> None:
    indices = np.array([0, 2, 100, np.iinfo(dtype).max], dtype)
    expected = (indices.astype(object)[:, None] == np.arange(depth)).astype("float32")
    np.testing.assert_array_equal(tg.one_hot(indices, depth), expected)


@pytest.mark.parametrize("ignore_index", [-100, 255, 2])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_losses_take_labels_of_every_width(name: str, dtype: str, ignore_index: int) -> None:
    labels = np.array([0, 2, 1, 2])
    f = getattr(tg.nn.functional, name)
    rows = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True)) if name == "cross_entropy" else LOGITS
    expected = -rows[np.arange(4), labels][labels != ignore_index].mean()
    np.testing.assert_allclose(f(LOGITS, labels.astype(dtype), ignore_index=ignore_index), expected, rtol=1e-13)
    with pytest.raises(IndexingError):
        f(LOGITS, np.array([0, 2, 1, 3], dtype))


def test_margin_losses_take_unsigned_labels() -> None:
    for f in (tg.nn.functional.multi_margin_loss, tg.nn.functional.hinge):
        assert f(LOGITS, np.array([0, 2, 1, 2], "uint8")) == f(LOGITS, np.array([0, 2, 1, 2]))


@pytest.mark.parametrize("around", [{}, {"prepend": 1.0}, {"append": 1.0}, {"prepend": 2.0, "append": np.ones((4, 2))}])
def test_no_differences_are_the_input(around: dict[str, object]) -> None:
    np.testing.assert_array_equal(tg.diff(LOGITS, 0, **around), np.diff(LOGITS, 0, **around))
    np.testing.assert_array_equal(tg.diff(LOGITS, 2, **around), np.diff(LOGITS, 2, **around))


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({"fweights": [1.0, 2.5, 1.0]}, DTypeError),
        ({"fweights": [1, -2, 1]}, DomainError),
        ({"aweights": [0.5, -0.25, 1.0]}, DomainError),
    ],
)
def test_cov_refuses_weights_as_numpy_does(weights: dict[str, list[float]], error: type[Exception]) -> None:
    with pytest.raises((TypeError, ValueError)):
        np.cov(LOGITS.T[:, :3], **weights)
    with pytest.raises(error, match=next(iter(weights))):
        tg.cov(LOGITS.T[:, :3], **weights)


def test_cov_takes_whole_weights() -> None:
    weights = {"fweights": [1.0, 3.0, 2.0], "aweights": [0.5, 0.0, 1.0]}
    expected = np.cov(LOGITS.T[:, :3] ** 2, fweights=[1, 3, 2], aweights=weights["aweights"])
    np.testing.assert_allclose(tg.cov(LOGITS.T[:, :3] ** 2, **weights), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_vander_of_small_integers(dtype: str) -> None:
    x = np.array([1, 5]).astype(dtype)
    expected = np.vander(x, 5)
    actual = tg.vander(x, 5)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype


@pytest.mark.parametrize("op", ["l1_loss", "huber_loss", "mse_loss", "squared_difference", "pairwise_distance"])
def test_small_integers_in_a_list_do_not_wrap_around(op: str) -> None:
    function = getattr(tg.nn.functional, op)
    a, b = np.array([1, 3], "uint8"), np.array([3, 1], "uint8")
    expected = function(a.astype("float64"), b.astype("float64"))
    for left, right in ((a, b), (list(a), list(b)), (tg.asarray(a), list(b))):
        np.testing.assert_array_equal(function(left, right), expected)
    np.testing.assert_array_equal(tg.nn.functional.l1_loss(np.uint8(1), np.uint8(3)), 2.0)


def test_parameters_that_are_integers_stay_integers() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for axis in (np.int64(1), np.array(1)):
        np.testing.assert_allclose(tg.nn.functional.cosine_similarity(x, x, dim=axis), [1, 1], rtol=1e-15)
    assert tg.nn.functional.conv1d(np.ones((1, 1, 5)), np.ones((1, 1, 1)), stride=np.int64(2)).shape == (1, 1, 3)
    for padding in (np.int64(1), (np.int64(1),)):
        assert tg.nn.functional.conv1d(np.ones((1, 1, 5)), np.ones((1, 1, 1)), padding=padding).shape == (1, 1, 7)
    assert tg.nn.functional.max_pool2d(np.ones((1, 1, 4, 4)), np.int64(2)).shape == (1, 1, 2, 2)
    assert tg.nn.Dense(np.int64(2))(x).shape == (2, 2)
    np.testing.assert_array_equal(tg.checkpointed_loop(lambda x: x * 2, x, np.int64(2)), x * 4)


def test_functions_of_scipy_compute_integers_in_float64() -> None:
    assert tg.integrate.simpson(np.full(1001, 200, "uint8")) == 200_000
    np.testing.assert_allclose(tg.special.gamma(np.array([12], "uint8")), 39_916_800)
    np.testing.assert_allclose(tg.special.i1(np.array([20], "int8")), 42454973.4, rtol=1e-6)
    spectrum = np.random.default_rng(0).integers(0, 255, (4, 6))
    for ours, theirs in zip(tg.signal.istft(spectrum), tg.signal.istft(spectrum.astype("float64")), strict=True):
        np.testing.assert_array_equal(ours, theirs)
