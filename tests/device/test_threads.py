"""Tiles on threads."""

import os
import threading

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.errors import TapegradError


@pytest.fixture(autouse=True)
def restore():
    before = tg.get_num_threads()
    yield
    tg.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_task_runs_once(n):
    tg.set_num_threads(n)
    done, lock = [], threading.Lock()

    def work(i):
        with lock:
            done.append(i)

    threads.run([work] * n, 100)
    assert sorted(done) == list(range(100))


def test_an_exception_comes_through_and_the_crew_goes_on():
    tg.set_num_threads(3)

    def fails(i):
        raise ZeroDivisionError(i)

    with pytest.raises(ZeroDivisionError):
        threads.run([fails] * 3, 10)
    threads.run([lambda i: None] * 3, 10)


def test_numpys_error_state_of_the_caller_holds_in_every_thread():
    tg.set_num_threads(2)
    x = tg.asarray(np.full(300_000, -1.0, "float32"))
    with np.errstate(invalid="ignore"):
        assert np.isnan(tg.sqrt(x).numpy()).all()
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        tg.sqrt(x).numpy()


def test_the_count_must_be_positive():
    with pytest.raises(TapegradError, match="at least 1"):
        tg.set_num_threads(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_makes_threads_of_its_own():
    tg.set_num_threads(2)
    x = tg.asarray(np.ones(300_000, "float32"))
    tg.sum(x + 1).item()
    child = os.fork()
    if not child:
        os._exit(0 if tg.sum(x + 2).item() == 900_000 else 1)
    assert os.waitpid(child, 0)[1] == 0
