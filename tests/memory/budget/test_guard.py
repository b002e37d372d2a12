"""Guards: what had to wait is handled once nobody is inside, and errors leave the lock free."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from tapegrad.memory.budget.guard import Guard


def test_what_had_to_wait_is_handled_when_nobody_is_inside() -> None:
    done: list[str] = []
    guard = Guard[str](done.append)

    def inside() -> str:
        guard.run(done.append, "inner")
        guard.tell("told")
        done.append("outer")
        return "result"

    assert guard.run(inside) == "result" and done == ["inner", "outer", "told"]
    guard.tell("at once")
    assert done[3:] == ["at once"] and not guard._lock._is_owned()


def elsewhere(f: object, *args: object) -> None:
    other = threading.Thread(target=f, args=args)  # type: ignore[arg-type]
    other.start()
    other.join()


def test_what_another_thread_tells_is_handled_by_who_is_inside() -> None:
    done: list[str] = []
    guard = Guard[str](done.append)
    guard.run(elsewhere, guard.tell, "told")
    assert done == ["told"]


def test_nothing_is_lost_that_comes_between_the_last_look_and_the_release() -> None:
    done: list[str] = []
    guard = Guard[str](done.append)

    class Queue(deque[str]):
        """Another thread tells something just after it was found empty inside."""

        late = ["late"]

        def __len__(self) -> int:
            count = super().__len__()
            if not count and self.late and guard._lock._is_owned():
                elsewhere(guard.tell, self.late.pop())
            return count

    guard._waiting = Queue()
    guard.tell("first")
    assert done == ["first", "late"] and not guard._lock._is_owned()


def test_an_error_while_the_queue_is_handled_leaves_the_lock_free_and_the_rest_waiting() -> None:
    done: list[int] = []

    def handle(divisor: int) -> None:
        done.append(1 // divisor)

    guard = Guard(handle)
    with pytest.raises(ZeroDivisionError):
        guard.tell(0)
    assert not guard._lock._is_owned()
    with pytest.raises(ZeroDivisionError):
        guard.run(guard.tell, 1)
    assert not guard._lock._is_owned() and done == []
    guard.forget()
    guard.tell(1)
    assert done == [1]


def test_an_error_inside_does_not_keep_what_has_to_wait() -> None:
    done: list[str] = []
    guard = Guard[str](done.append)

    def fails() -> None:
        guard.tell("told")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.run(fails)
    assert done == ["told"] and not guard._lock._is_owned()
