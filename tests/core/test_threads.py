"""The threads that use this package: who is known, and who waits while a value is overwritten."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

import tapegrad as tg
from tapegrad.core.cell import Cell
from tapegrad.core.state import thread
from tapegrad.core.threads import unshared


def alone() -> bool:
    return unshared(lambda: True, lambda: None)


def in_thread(f: Callable[[], object]) -> None:
    t = threading.Thread(target=f)
    t.start()
    t.join(60)
    assert not t.is_alive()


@pytest.mark.parametrize(
    "use", [lambda: Cell(1).get(), lambda: thread.walks, lambda: tg.asarray(1.0) + 1.0], ids=["cell", "state", "tensor"]
)
def test_a_thread_is_known_from_its_first_use_until_its_end(use: Callable[[], object]) -> None:
    said: list[bool] = []
    begin, used, end = (threading.Event() for _ in range(3))

    def work() -> None:
        begin.wait(60)
        use()
        used.set()
        end.wait(60)

    t = threading.Thread(target=work)
    t.start()
    said.append(alone())
    begin.set()
    used.wait(60)
    said.append(alone())
    end.set()
    t.join(60)
    assert [*said, alone()] == [True, False, True]


def test_helpers_for_tiles_are_not_known() -> None:
    before = tg.get_num_threads()
    try:
        tg.set_num_threads(3)
        x = tg.ones((2000, 1000))
        (tg.tanh(x) * x + x).numpy()
        assert threading.active_count() > 1
        assert alone()
    finally:
        tg.set_num_threads(before)


def test_nothing_is_overwritten_where_the_caller_says_no() -> None:
    done: list[int] = []
    assert not unshared(lambda: False, lambda: done.append(1))
    assert not done


def test_a_new_thread_waits_until_all_is_overwritten() -> None:
    cell, values, found = Cell(None), [0, 0], []
    cell.set(values)

    def read() -> None:
        found.extend(cell.get())

    t = threading.Thread(target=read)

    def overwrite() -> None:
        values[0] = 1
        t.start()
        t.join(0.2)
        assert t.is_alive()
        values[1] = 1

    assert unshared(lambda: True, overwrite)
    t.join(60)
    assert found == [1, 1]


def test_an_exception_lets_threads_come_in() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unshared(lambda: True, interrupted)
    in_thread(lambda: Cell(1).get())
    assert alone()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_only_its_thread_is_known() -> None:
    used, end = threading.Event(), threading.Event()

    def work() -> None:
        Cell(1).get()
        used.set()
        end.wait(60)

    t = threading.Thread(target=work)
    t.start()
    used.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if alone() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.set()
    t.join(60)
