"""The number of BLAS threads is taken to one and given back, however blocks nest and end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tapegrad.device import threads
from tapegrad.device.numerics import blas


@pytest.fixture
def count(monkeypatch):
    """A stand-in library: the list of numbers it was set to."""
    numbers = [4]
    monkeypatch.setattr(blas, "controls", (lambda: numbers[-1], numbers.append))
    return numbers


def test_one_thread_inside_and_as_before_outside(count):
    with blas.one_thread():
        assert count[-1] == 1
    assert count == [4, 1, 4]


def test_nested_and_failing_blocks(count):
    with pytest.raises(KeyError), blas.one_thread(), blas.one_thread():
        raise KeyError
    assert count == [4, 1, 4]


def test_overlapping_threads_restore_once(count):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with blas.one_thread():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with blas.one_thread():
        leave.set()
        thread.join(10)
        assert count[-1] == 1
    assert count == [4, 1, 4]


def test_another_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(blas, "controls", None)
    with blas.one_thread():
        pass


SHAPES = [
    ((3, 4), (4, 5)), ((1, 3, 4), (1, 4, 5)), ((100, 90), (90, 80)), ((600, 300), (300, 400)), ((300, 400), (400, 600)),
    ((20, 2000), (2000, 900)), ((1, 1, 600, 300), (300, 400)),
]  # fmt: skip
"""Of one product: below what the library does alone, above, in pieces by rows, by columns, of fewer than 16."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_a_bound_product_has_the_bits_of_any_other(left, right, dtype, count):
    draw = lambda *shape: np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)
    x, y, before = draw(*left), draw(*right), threads.get_num_threads()
    out = np.empty((*left[:-1], right[-1]), dtype)
    found, wanted = np.empty_like(out), np.empty_like(out)
    threads.set_num_threads(count)
    try:
        blas.matmul(np, x, y, wanted)
        for turned in (False, True):  # as transposed views, too
            if turned:
                x, y = (np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2) for a in (x, y))
            bound = blas.bound(x, y, found)
            if blas.controls is None:
                assert bound is None
                continue
            f, arrays = bound
            assert blas.assumes_one_thread(f)
            found.fill(np.nan)
            with blas.one_thread():
                f(*arrays)
            blas.matmul(np, x, y, wanted)
            np.testing.assert_array_equal(found, wanted)
    finally:
        threads.set_num_threads(before)


def test_bound_is_one_call_or_none(monkeypatch):
    x, half = np.ones((64, 64), "float32"), np.ones((64, 64), "float16")
    assert blas.bound(half, half, half) is None  # it is made in float32
    assert blas.bound(x, x, x.copy(), tf32=True) is None
    assert blas.bound(x.astype("f8"), x.astype("f8"), x.astype("f8"), tf32=True) is not None
    f, _ = blas.bound(x[:, :1], x[:1], x.copy()) or (None, ())
    assert f is np.multiply  # an outer product
    assert blas.bound(np.stack([x, x]), x, np.stack([x, x])) is None
    monkeypatch.setattr(blas, "controls", None)
    assert blas.bound(x, x, x.copy()) is None
    assert not blas.assumes_one_thread(np.add)
