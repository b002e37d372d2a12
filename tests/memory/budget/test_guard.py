"""Guards: what had to wait is done once nobody is inside, and errors leave the lock free."""

from __future__ import annotations

import pytest

from tapegrad.memory.budget.guard import Guard


def test_what_had_to_wait_is_done_by_whoever_leaves_last() -> None:
    done: list[str] = []
    guard = Guard(lambda: done.append("after"))

    def inside() -> str:
        guard.run(done.append, "inner")
        guard.try_now()
        done.append("outer")
        return "found"

    assert guard.run(inside) == "found" and done == ["inner", "outer", "after"]
    guard.try_now()
    assert done[3:] == ["after"] and not guard._lock._is_owned()


def test_an_error_in_what_had_to_wait_leaves_the_lock_free() -> None:
    guard = Guard(lambda: 1 // 0)
    for call in (guard.try_now, lambda: guard.run(list)):
        with pytest.raises(ZeroDivisionError):
            call()
        assert not guard._lock._is_owned()


def test_an_error_inside_does_not_keep_what_has_to_wait() -> None:
    done: list[str] = []
    guard = Guard(lambda: done.append("after"))
    with pytest.raises(ZeroDivisionError):
        guard.run(lambda: 1 // 0)
    assert done == ["after"] and not guard._lock._is_owned()
