"""Pooling: plain loops, ties, NaN, what is kept, blocks and threads, messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.device.numerics.windows import Window
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.nn import functional as F
from tapegrad.ops.rows.pooling import max_pool
from tapegrad.testing import check_grads

OPTIONS = [
    {"kernel_size": 2}, {"kernel_size": (3, 2), "stride": (2, 1)}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 3}, {"kernel_size": 1}, {"kernel_size": (7, 6)},
]  # fmt: skip


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    count = threads.get_num_threads()
    yield
    threads.set_num_threads(count)


def by_loops(x: np.ndarray, f: Any, fill: float, kernel_size: Any, stride: Any = None, padding: int = 0) -> np.ndarray:
    pair = lambda v: (v, v) if isinstance(v, int) else v
    (kh, kw), (sh, sw) = pair(kernel_size), pair(stride or kernel_size)
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=fill)
    shape = (x.shape[2] - kh) // sh + 1, (x.shape[3] - kw) // sw + 1
    y = np.empty((*x.shape[:2], *shape))
    for i, j in np.ndindex(*shape):
        y[:, :, i, j] = f(x[:, :, i * sh : i * sh + kh, j * sw : j * sw + kw], axis=(2, 3))
    return y


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loops(options, rng):
    x = rng.normal(size=(2, 3, 7, 6))
    np.testing.assert_array_equal(F.max_pool2d(x, **options).numpy(), by_loops(x, np.max, -np.inf, **options))
    np.testing.assert_allclose(F.avg_pool2d(x, **options).numpy(), by_loops(x, np.mean, 0.0, **options), rtol=1e-12)
    ones = by_loops(np.ones_like(x), np.mean, 0.0, **options)
    inside = F.avg_pool2d(x, **options, count_include_pad=False).numpy()
    np.testing.assert_allclose(inside, by_loops(x, np.mean, 0.0, **options) / ones, rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_to_second_order(options, rng):
    x = rng.permutation(np.arange(2.0 * 42)).reshape(1, 2, 7, 6)  # no ties, and far apart
    check_grads(lambda x: F.max_pool2d(tg.sin(x), **options) ** 2, [x], order=2)
    check_grads(lambda x: F.avg_pool2d(x, **options) ** 2, [x / 10], order=2)


@pytest.mark.parametrize("value", [1.0, 0.0, -np.inf])
def test_of_equal_elements_the_first_gets_the_gradient(value):
    x = tg.full((1, 1, 4, 4), value, dtype="float64")
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = F.max_pool2d(x, 2)
    wanted = np.zeros((4, 4))
    wanted[::2, ::2] = 1
    np.testing.assert_array_equal(tape.gradient(y, x).numpy()[0, 0], wanted)


def test_windows_that_overlap_add_up():
    x = tg.asarray(np.array([[[[0.0, 5.0, 1.0], [0.0, 0.0, 0.0]]]]))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = F.max_pool2d(x, 2, stride=1)
    np.testing.assert_array_equal(tape.gradient(y, x).numpy()[0, 0], [[0, 2, 0], [0, 0, 0]])


def test_a_nan_is_the_largest():
    x = np.array([[[[1.0, np.nan, 2.0, 3.0], [np.inf, 0.0, 5.0, -1.0]]]])
    np.testing.assert_array_equal(F.max_pool2d(x, 2).numpy(), [[[[np.nan, 5.0]]]])


def test_one_byte_an_element_is_kept(rng):
    with tg.measure() as m, tg.GradientTape() as tape:
        before = m.live_bytes
        x = tg.asarray(rng.normal(size=(4, 8, 64, 64)))
        tape.watch(x)
        h = x * 2.0
        y = F.max_pool2d(h, 2)
        del h
        kept = m.live_bytes - before - 8 * (x.size + y.size)
    assert y.size <= kept < y.size + 16384  # and neither the operand nor anything else of its size
    assert tape.gradient(y, x) is not None


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_bits_do_not_depend_on_threads(options, rng, monkeypatch):
    monkeypatch.setattr(sys.modules["tapegrad.ops.rows.pooling"], "BLOCK", 100)
    x = tg.asarray(rng.normal(size=(3, 5, 7, 6)).astype("float32"))
    found = set()
    for count in (1, 3):
        threads.set_num_threads(count)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = F.max_pool2d(x, **options) + F.avg_pool2d(x, **options)
            z = tg.sum(y * y)
        found.add(y.numpy().tobytes() + tape.gradient(z, x).numpy().tobytes())
    assert len(found) == 1


def test_many_taps_need_more_than_a_byte(rng):
    x = rng.normal(size=(1, 1, 20, 20))
    assert F.max_pool2d(x, 20).item() == x.max()
    y = tg.asarray(x)
    with tg.GradientTape() as tape:
        tape.watch(y)
        z = F.max_pool2d(y, 20)
    assert np.flatnonzero(tape.gradient(z, y).numpy()) == x.argmax()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.max_pool2d(np.ones((4, 4)), 2), r"max_pool2d: wanted input .*\(4, 4\)"),
        (lambda: F.max_pool2d(np.ones((1, 1, 4, 4)), 5), r"covers \(5, 5\).*input is \(4, 4\)"),
        (lambda: F.max_pool2d(np.ones((1, 1, 4, 4)), 2, padding=2), "hold nothing; pad by at most half"),
        (lambda: F.avg_pool2d(np.ones((1, 1, 4, 4)), 0), "at least 1, for kernel_size, got 0"),
        (lambda: max_pool(np.ones((4, 4)), window=Window((5, 4), (1, 1), (1, 1), ((0, 0),) * 2, (1, 1))), "must end"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_complex_numbers_have_no_largest():
    with pytest.raises(DTypeError, match="complex128"):
        F.max_pool2d(np.ones((1, 1, 2, 2), "complex128"), 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_like_torch(name, options, rng):
    torch = pytest.importorskip("torch")
    a = rng.integers(0, 4, size=(2, 3, 7, 6)).astype("float64")  # full of ties
    theirs = torch.tensor(a, requires_grad=True)
    z = getattr(torch.nn.functional, name)(theirs, **options)
    ours = tg.asarray(a)
    with tg.GradientTape() as tape:
        tape.watch(ours)
        y = getattr(F, name)(ours, **options)
    ct = rng.normal(size=y.shape)
    z.backward(torch.tensor(ct))
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-12)
    mine = tape.gradient(y, ours, output_gradients=tg.asarray(ct))
    np.testing.assert_allclose(mine.numpy(), theirs.grad.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("f", "want"), [(F.max_pool2d, np.max), (F.avg_pool2d, np.mean)])
def test_a_jacobian_runs_all_rows_at_once(f, want, rng, monkeypatch):
    module, calls = sys.modules["tapegrad.ops.rows.pooling"], []
    x = rng.permutation(np.arange(2.0 * 30)).reshape(1, 2, 5, 6)
    original = module.by_planes
    monkeypatch.setattr(module, "by_planes", lambda *args: (calls.append(1), original(*args)))
    found = tg.jacobian(lambda x: f(x, 2))(tg.asarray(x)).numpy()
    assert len(calls) <= 3  # which, take, and one transpose
    rows = [np.sum(found[at] * x) for at in np.ndindex(found.shape[:4])]
    np.testing.assert_allclose(np.reshape(rows, found.shape[:4]), by_loops(x, want, 0.0, 2), rtol=1e-12)
