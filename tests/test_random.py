"""Random numbers: streams, their bits against NumPy's Philox, distributions, gradients, bad input."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from checks import c64, gradients, same, var64

import tapegrad as tg
from tapegrad import errors


def test_streams_repeat_and_move_on() -> None:
    tg.random.seed(5)
    a, b = tg.random.uniform((3,)).numpy(), tg.random.uniform((3,)).numpy()
    tg.random.seed(5)
    assert np.array_equal(tg.random.uniform((3,)).numpy(), a) and np.array_equal(tg.random.uniform((3,)).numpy(), b)
    assert not np.array_equal(a, b)
    g, h = tg.random.Generator(5), tg.random.Generator(6)
    assert np.array_equal(tg.random.uniform((3,), generator=g).numpy(), a)
    assert not np.array_equal(tg.random.uniform((3,), generator=h).numpy(), a)
    state = g.state
    first = tg.random.normal((4,), generator=g).numpy()
    g.state = state
    assert np.array_equal(tg.random.normal((4,), generator=g).numpy(), first)
    g.seed(5)
    assert np.array_equal(tg.random.uniform((3,), generator=g).numpy(), a)
    assert tg.random.Generator().state != tg.random.Generator().state


@pytest.mark.parametrize("count", [1, 3, 4, 5, 33])
def test_bits_are_those_of_numpys_philox(count: int) -> None:
    for key, skip in ((7, 0), (2**100 + 3, 5)):
        g = tg.random.Generator(key)
        g.take(skip)
        words = np.random.Philox(key=key, counter=skip).random_raw(count)
        found = tg.random.uniform((count,), dtype="float64", generator=g).numpy()
        assert np.array_equal(found, (words >> np.uint64(11)) * 2.0**-53)
        g.state = (key, skip)
        halves = np.random.Philox(key=key, counter=skip).random_raw(count).view(np.uint32)[:count]
        found = tg.random.uniform((count,), dtype="float32", generator=g).numpy()
        assert np.array_equal(found, (halves >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24))


def test_draws_do_not_overlap() -> None:
    g = tg.random.Generator(1)
    parts = [tg.random.uniform((n,), dtype="float64", generator=g).numpy() for n in (1, 2, 3, 4, 5, 8)]
    assert np.unique(np.concatenate(parts)).size == 23


def test_threads_draw_different_numbers() -> None:
    g, found = tg.random.Generator(3), []

    def draw() -> None:
        for _ in range(200):
            found.append(g.take(1)[1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found) == list(range(1600))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_distributions(dtype: str) -> None:
    tg.random.seed(1)
    n = 200_000
    u, z = tg.random.uniform((n,), dtype=dtype), tg.random.normal((n,), dtype=dtype)
    assert u.dtype == z.dtype == np.dtype(dtype)
    u, z = u.numpy().astype(float), z.numpy().astype(float)
    assert 0 <= u.min() and u.max() < 1 and np.isfinite(z).all()
    same([u.mean(), u.var(), z.mean(), z.var(), (z**3).mean(), (z**4).mean()], [0.5, 1 / 12, 0, 1, 0, 3], atol=0.05)
    assert np.abs(z).max() > 4  # short floats, too, have tails: they are drawn longer
    b = tg.random.bernoulli((n,), 0.25, dtype=dtype).numpy()
    assert set(np.unique(b)) == {0, 1} and abs(b.mean(dtype=float) - 0.25) < 0.01
    assert not tg.random.bernoulli((n,), 0.0).numpy().any() and tg.random.bernoulli((n,), 1.0).numpy().all()
    p = np.repeat([0.0, 1.0], 50)
    assert np.array_equal(tg.random.bernoulli((100,), p).numpy(), p)


def test_bounds_and_moments_may_be_tensors_and_have_gradients() -> None:
    low, high, mean, std = c64([0.0, 10.0]), var64([1.0, 20.0]), c64([0.0, 100.0]), c64(1.0)
    x = tg.random.uniform((1000, 2), low, high, dtype="float64").numpy()
    assert (x >= low.numpy()).all() and (x <= high.numpy()).all() and x[:, 1].std() > 2
    tg.random.seed(2)
    u = tg.random.uniform((2,), dtype="float64").numpy()
    tg.random.seed(2)
    same(gradients(lambda *_: tg.random.uniform((2,), low, high, dtype="float64"), [low, high]), [1 - u, u])
    tg.random.seed(2)
    z = tg.random.normal((2,), dtype="float64").numpy()
    tg.random.seed(2)
    same(gradients(lambda *_: tg.random.normal((2,), mean, std, dtype="float64"), [mean, std]), [[1.0, 1.0], z.sum()])


def test_permutations() -> None:
    tg.random.seed(4)
    order = tg.random.permutation(50).numpy()
    assert sorted(order) == list(range(50)) and not np.array_equal(order, np.arange(50))
    assert tg.random.permutation(np.int64(3)).shape == (3,) and tg.random.permutation(0).shape == (0,)
    rows = np.arange(12.0).reshape(6, 2)
    for x in (rows, c64(rows), var64(rows), rows.tolist()):
        found = tg.random.permutation(x).numpy()
        assert found.shape == (6, 2) and sorted(found[:, 0]) == rows[:, 0].tolist()
        assert np.array_equal(found[:, 1], found[:, 0] + 1)
    assert tg.random.permutation(tg.asarray([7])).numpy() == [7]
    same(gradients(lambda q: tg.random.permutation(q) * 2.0, [c64(rows)]), [np.full((6, 2), 2.0)])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: tg.random.uniform((-1,)), ValueError),
        (lambda: tg.random.uniform(2.5), TypeError),
        (lambda: tg.random.uniform((2, "3")), TypeError),
        (lambda: tg.random.normal((2,), dtype="int64"), TypeError),
        (lambda: tg.random.normal((2,), dtype="complex64"), TypeError),
        (lambda: tg.random.uniform((2,), dtype="nothing"), TypeError),
        (lambda: tg.random.permutation(-1), ValueError),
        (lambda: tg.random.permutation(1.5), TypeError),
    ],
)
def test_bad_input(call: Any, error: type) -> None:
    state = tg.random.default_generator.state
    with pytest.raises(error) as e:
        call()
    assert isinstance(e.value, errors.TapegradError)
    assert tg.random.default_generator.state == state
