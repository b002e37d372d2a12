"""Windows as columns: against plain loops, and their transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.device.numerics.windows import Window
from tapegrad.errors import ShapeError
from tapegrad.nn import functional as F
from tapegrad.ops.shape.patches import fold_windows, unfold_windows

WINDOWS = [
    Window((7,), (3,), (2,), ((1, 2),), (1,)), Window((5, 6), (2, 3), (1, 2), ((0, 1), (2, 0)), (2, 1)),
    Window((3, 4, 3), (2, 1, 2), (1, 2, 1), ((0, 0), (1, 0), (1, 1)), (1, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{len(w.size)}d")
def test_loops_and_the_transpose(window, rng):
    x = rng.normal(size=(2, 3, *window.size))
    y = unfold_windows(x, window=window).numpy()
    padded = np.pad(x, ((0, 0), (0, 0), *window.padding))
    for number, tap in enumerate(np.ndindex(*window.kernel)):
        part = tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(tap, window.dilation, window.positions, window.strides)
        )
        np.testing.assert_array_equal(y[:, :, number], padded[(..., *part)])
    v = rng.normal(size=y.shape)
    back = fold_windows(v, window=window).numpy()
    np.testing.assert_allclose(np.sum(back * x), np.sum(v * y), rtol=1e-11)


def test_bits_do_not_depend_on_threads(rng):
    x, found = rng.normal(size=(5, 16, 64, 64)).astype("float32"), set()
    window, count = Window((64, 64), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), threads.get_num_threads()
    try:
        for n in (1, 3):
            threads.set_num_threads(n)
            y = unfold_windows(x, window=window)
            found.add(y.numpy().tobytes() + fold_windows(y, window=window).numpy().tobytes())
    finally:
        threads.set_num_threads(count)
    assert len(found) == 1


def test_unfold_and_fold_of_images(rng):
    x = rng.normal(size=(2, 3, 5, 6))
    columns = F.unfold(x, (2, 3), padding=1, stride=2)
    w = rng.normal(size=(4, 3, 2, 3))
    y = np.einsum("ok,nkl->nol", w.reshape(4, -1), columns.numpy())
    want = F.conv2d(x, w, padding=1, stride=2).numpy()
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=1e-11)
    ones = F.fold(tg.ones_like(columns), (5, 6), (2, 3), padding=1, stride=2).numpy()
    counts = F.avg_pool2d(np.ones((5, 6))[None], (2, 3), (2, 2), 1).numpy().sum() * 6
    assert math.isclose(ones[0, 0].sum(), counts)
    np.testing.assert_array_equal(F.unfold(x[0], 2).numpy(), F.unfold(x, 2).numpy()[0])


def test_whole_numbers_stay_what_they_are():
    x = np.arange(12).reshape(1, 3, 4)
    assert F.unfold(x, 2).dtype == np.int64
    assert F.fold(F.unfold(x, 2), (3, 4), 2).tolist() == [[[0, 2, 4, 3], [8, 20, 24, 14], [8, 18, 20, 11]]]


def test_what_does_not_fit_is_named():
    for call, message in (
        (lambda: F.unfold(np.ones((3, 4)), 2), r"unfold: wanted input \(n, c, h, w\)"),
        (lambda: F.unfold(np.ones((1, 3, 4)), 5), "unfold: a kernel of size"),
        (lambda: F.fold(np.ones((1, 4, 5)), (3, 4), 2), r"fold: wanted input \(n, c \* 4, 6\)"),
        (lambda: F.fold(np.ones((1, 3, 6)), (3, 4), 2), r"fold: wanted input \(n, c \* 4, 6\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()
