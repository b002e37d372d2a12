"""A replay overwrites a variable in place where it can: other threads see an old value or a new one, never half."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

SIZE = 3_000_000


def counter() -> tuple[tg.Variable, Callable[[], Any]]:
    """A variable, and a captured step that adds one to it, which has been replayed."""
    v, one = tg.Variable(np.zeros(SIZE)), tg.asarray(np.ones(SIZE))
    step = tg.function(lambda x: v.assign_add(x))
    for _ in range(4):
        step(one)
    assert step.stats.replays
    return v, lambda: step(one)


def test_threads_that_begin_at_any_time_read_whole_values() -> None:
    (v, step), wrong, threads = counter(), list[Any](), list[threading.Thread]()

    def read() -> None:
        for _ in range(3):
            a = v.numpy(copy=True)
            if len(np.unique(a)) != 1:
                wrong.append(a)

    for _ in range(15):
        threads.append(threading.Thread(target=read))
        threads[-1].start()
        step(), step()
    for t in threads:
        t.join(60)
    assert not wrong and v.numpy()[0] == 34.0


def test_an_array_in_the_users_hands_is_not_overwritten() -> None:
    v, step = counter()
    a = v.numpy()
    step()
    assert (a[0], a[-1], v.numpy()[0]) == (4.0, 4.0, 5.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_though_its_parent_had_threads() -> None:
    (v, step), used, end = counter(), threading.Event(), threading.Event()

    def work() -> None:
        v.numpy()
        used.set()
        end.wait(60)

    other = threading.Thread(target=work)
    other.start()
    try:
        used.wait(60)
        step()
        child = os.fork()
        if not child:
            step()
            os._exit(0 if v.numpy()[-1] == 6.0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        end.set()
        other.join(60)
    assert v.numpy()[0] == 5.0
