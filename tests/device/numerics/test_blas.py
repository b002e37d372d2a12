"""The number of BLAS threads is taken to one and given back, however blocks nest and end."""

from __future__ import annotations

import threading

import pytest

from tapegrad.device.numerics import blas


@pytest.fixture
def count(monkeypatch):
    """A stand-in library: the list of numbers it was set to."""
    numbers = [4]
    monkeypatch.setattr(blas, "_controls", (lambda: numbers[-1], numbers.append))
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
    monkeypatch.setattr(blas, "_controls", None)
    with blas.one_thread():
        pass
