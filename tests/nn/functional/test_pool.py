"""Pooling in 1 to 3 dimensions against plain loops: rounding up, bins, indices, unpooling, ties, empty batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(17)
SIZES = {1: (9,), 2: (7, 8), 3: (5, 6, 4)}


def image(dims: int) -> np.ndarray:
    size = (2, 3, *SIZES[dims])
    return rng.permutation(math.prod(size)).reshape(size) / 7.0


def windows(n: int, k: int, s: int, p: int, up: bool) -> list[range]:
    """The window of each position along an axis, padding included."""
    count = (math.ceil if up else math.floor)((n + 2 * p - k) / s) + 1
    if up and (count - 1) * s >= n + p:
        count -= 1
    return [range(i * s - p, i * s - p + k) for i in range(count)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("k", "s", "p"), [(2, 2, 0), (3, 2, 1), (2, 3, 1), (3, 3, 0), (3, 1, 1)])
@pytest.mark.parametrize("up", [False, True])
def test_windows(dims: int, k: int, s: int, p: int, up: bool) -> None:
    x = image(dims)
    along = [windows(n, k, s, p, up) for n in SIZES[dims]]
    shape = tuple(map(len, along))
    largest, places, sums, inside, padded = (np.zeros((2, 3, *shape)) for _ in range(5))
    for at in np.ndindex(*shape):
        taps = list(itertools.product(*(along[a][i] for a, i in enumerate(at))))
        real = [t for t in taps if all(0 <= v < n for v, n in zip(t, SIZES[dims]))]
        values = np.stack([x[(..., *t)] for t in real], axis=-1)
        best = values.argmax(-1)
        largest[(..., *at)], sums[(..., *at)] = values.max(-1), values.sum(-1)
        places[(..., *at)] = np.array([np.ravel_multi_index(t, SIZES[dims]) for t in real])[best]
        inside[(..., *at)] = len(real)
        padded[(..., *at)] = sum(all(v < n + p for v, n in zip(t, SIZES[dims])) for t in taps)
    options = {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": up}
    got, at = getattr(F, f"max_pool{dims}d")(x, **options, return_indices=True)
    np.testing.assert_array_equal(got.numpy(), largest)
    np.testing.assert_array_equal(at.numpy(), places)
    assert at.dtype == np.int64
    mean = getattr(F, f"avg_pool{dims}d")
    np.testing.assert_allclose(mean(x, **options).numpy(), sums / padded, rtol=1e-12)
    np.testing.assert_allclose(mean(x, **options, count_include_pad=False).numpy(), sums / inside, rtol=1e-12)
    if dims > 1:
        np.testing.assert_allclose(mean(x, **options, divisor_override=5).numpy(), sums / 5, rtol=1e-12)
    np.testing.assert_array_equal(getattr(F, f"max_pool{dims}d")(x[0], **options).numpy(), largest[0])


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("out", [1, 2, 3, 5, 11])
def test_bins(dims: int, out: int) -> None:
    x = image(dims)
    means, largest, places = (np.zeros((2, 3, *(out,) * dims)) for _ in range(3))
    for at in np.ndindex(*(out,) * dims):
        part = tuple(slice(i * n // out, -(-(i + 1) * n // out)) for i, n in zip(at, SIZES[dims]))
        values = x[(..., *part)].reshape(2, 3, -1)
        means[(..., *at)], largest[(..., *at)] = values.mean(-1), values.max(-1)
        flat = np.arange(math.prod(SIZES[dims])).reshape(SIZES[dims])[part].ravel()
        places[(..., *at)] = flat[values.argmax(-1)]
    np.testing.assert_allclose(getattr(F, f"adaptive_avg_pool{dims}d")(x, out).numpy(), means, rtol=1e-12)
    got, at = getattr(F, f"adaptive_max_pool{dims}d")(x, out, return_indices=True)
    np.testing.assert_array_equal(got.numpy(), largest)
    np.testing.assert_array_equal(at.numpy(), places)


@pytest.mark.parametrize("name", ["max_pool2d", "adaptive_max_pool2d"])
def test_of_equal_elements_the_first_gets_the_gradient(name: str) -> None:
    x = tg.full((1, 1, 4, 4), 2.0, dtype="float64")
    with tg.GradientTape() as tape:
        tape.watch(x)
        y, at = getattr(F, name)(x, 2, return_indices=True)
    assert at.tolist() == [[[[0, 2], [8, 10]]]]
    wanted = np.zeros((4, 4))
    wanted[::2, ::2] = 1
    np.testing.assert_array_equal(tape.gradient(y, x).numpy()[0, 0], wanted)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unpooling_puts_maxima_back(dims: int) -> None:
    x = image(dims)[..., : SIZES[dims][-1] // 2 * 2]
    y, at = getattr(F, f"max_pool{dims}d")(x, 2, return_indices=True)
    back = getattr(F, f"max_unpool{dims}d")(y, at, 2, output_size=x.shape).numpy()
    want = np.zeros_like(x).reshape(6, -1)
    np.put_along_axis(want, at.numpy().reshape(6, -1), y.numpy().reshape(6, -1), axis=1)
    np.testing.assert_array_equal(back, want.reshape(x.shape))


def test_unpooling_of_indices_out_of_the_plane_or_given_twice() -> None:
    y, f = np.array([[[1.0, 2.0]]]), F.max_unpool1d
    with pytest.raises(IndexingError, match=r"max_unpool1d: wanted indices in \[0, 4\), got 4"):
        f(y, np.array([[[0, 4]]]), 2).numpy()
    x = tg.asarray(y)
    with tg.GradientTape() as tape:
        tape.watch(x)
        z = f(x, np.array([[[3, 3]]]), 2)
    assert z.tolist() == [[[0.0, 0.0, 0.0, 2.0]]]
    assert tape.gradient(z, x).tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_power_means(p: float) -> None:
    x = np.abs(image(2)) + 0.5
    want = (x[..., :6, :].reshape(2, 3, 2, 3, 2, 4) ** p).sum((3, 5)) ** (1 / p)
    np.testing.assert_allclose(F.lp_pool2d(x, p, (3, 4)).numpy(), want, rtol=1e-12)
    zeros = tg.zeros((1, 1, 4), dtype="float64")
    with tg.GradientTape() as tape:
        tape.watch(zeros)
        y = F.lp_pool1d(zeros, p, 2)
    assert y.tolist() == [[[0.0, 0.0]]] and not tape.gradient(y, zeros).numpy().any()


@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_windows_are_inside_and_cover_both_ends(dims: int) -> None:
    tg.random.seed(1)
    x = np.broadcast_to(np.arange(math.prod(SIZES[dims]), dtype="float64").reshape(SIZES[dims]), (4, 5, *SIZES[dims]))
    y, at = getattr(F, f"fractional_max_pool{dims}d")(x, 2, output_size=3, return_indices=True)
    np.testing.assert_array_equal(y.numpy(), at.numpy())  # each value is its place
    last = y.numpy()[(..., *(-1,) * dims)]
    assert (last == math.prod(SIZES[dims]) - 1).all()
    assert len(np.unique(y.numpy().reshape(20, -1), axis=0)) > 1
    one = getattr(F, f"fractional_max_pool{dims}d")(x[0], 2, output_ratio=0.5)
    assert one.shape == (5, *(n // 2 for n in SIZES[dims]))


def test_no_images() -> None:
    for dims in (1, 2, 3):
        x = np.zeros((0, 3, *SIZES[dims]))
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            assert getattr(F, f"{name}{dims}d")(x, 2).shape[:2] == (0, 3)
        empty = getattr(F, f"max_unpool{dims}d")(x, np.zeros(x.shape, "int64"), 2)
        assert empty.shape == (0, 3, *(2 * n for n in SIZES[dims]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.adaptive_avg_pool2d(np.ones((4, 4)), 2), "adaptive_avg_pool2d: wanted input"),
        (lambda: F.adaptive_max_pool1d(np.ones((1, 1, 4)), (2, 2)), "1 of them or None, for output_size"),
        (lambda: F.adaptive_avg_pool1d(np.ones((1, 1, 0)), 2), "no elements to pool"),
        (lambda: F.max_unpool2d(np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 3), int), 2), "wanted indices of the shape"),
        (lambda: F.max_unpool1d(np.ones((1, 1, 2)), np.ones((1, 1, 2), int), 2, output_size=(9,)), "within a stride"),
        (lambda: F.fractional_max_pool2d(np.ones((1, 1, 4, 4)), 2), "either output_size or output_ratio"),
        (lambda: F.fractional_max_pool2d(np.ones((1, 1, 4, 4)), 3, output_size=3), "do not fit"),
        (lambda: F.avg_pool2d(np.ones((1, 1, 4, 4)), 2, divisor_override=0), "divisor_override"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises((ShapeError, TapegradError), match=message):
        call()


@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_windows_of_no_examples(dims: int) -> None:
    pool = getattr(F, f"fractional_max_pool{dims}d")
    y, at = pool(np.zeros((0, 2, *SIZES[dims])), 2, output_size=3, return_indices=True)
    assert y.shape == at.shape == (0, 2) + (3,) * dims
    assert tg.grad(lambda x: tg.sum(pool(x, 2, output_size=3)))(np.zeros((0, 2, *SIZES[dims]))).shape == (
        0,
        2,
        *SIZES[dims],
    )
