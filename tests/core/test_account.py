"""Who is told of bytes and work: nobody, who counts, or who keeps a budget, which counts as well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import account, state
from tapegrad.core import buffer as _buffer
from tapegrad.core.account import NOBODY, Account, count_with, keep_with
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU


class Counts(Account):
    def __init__(self) -> None:
        self.executor = NOBODY.executor  # type: ignore[misc]
        self.heard: list[Buffer] = []

    def allocated(self, weak: ref[Buffer]) -> None:
        self.heard.append(weak())


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    tg.zeros(1)  # the engine is there
    assert account.current is NOBODY
    yield
    keep_with(None), count_with(None)
    assert account.current is NOBODY


def filled() -> Buffer:
    return Buffer(np.zeros(4), leaf(shaped((4,), np.dtype("float32"), CPU)))


def test_one_hears_of_bytes() -> None:
    ledger, manager, made = Counts(), Counts(), []
    for who in (None, ledger):
        count_with(who)
        made.append(filled())
    keep_with(manager)
    made.append(filled())
    count_with(None)  # who keeps a budget goes on counting
    made.append(filled())
    keep_with(None)
    assert account.current is NOBODY
    made.append(filled())
    assert ledger.heard == made[1:2] and manager.heard == made[2:4]
    assert [b for b in made if any(ref() is b for ref in list(_buffer.uncounted))] == [made[0], made[4]]


def test_the_executor_is_that_of_the_account_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []
    monkeypatch.setattr(state, "install", installed.append)
    ledger, manager = Counts(), Counts()
    ledger.executor, manager.executor = "counted", "budgeted"  # type: ignore[misc, assignment]
    count_with(ledger), keep_with(manager), keep_with(None), count_with(None)
    assert installed == ["counted", "budgeted", "counted", NOBODY.executor]


def test_blocks_of_several_threads_leave_one_account_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread is told of bytes, another one may not choose: the account, its ears and its executor agree."""
    ledger, manager = Counts(), Counts()
    told: list[object] = []
    tell = _buffer.tell_of_bytes

    def slowly(allocated: Any) -> None:
        if not told:
            told.append(None)
            other.start()
            other.join(0.2)
        told.append(allocated)
        tell(allocated)

    monkeypatch.setattr(_buffer, "tell_of_bytes", slowly)
    other = threading.Thread(target=keep_with, args=(manager,))
    count_with(ledger)
    other.join()
    assert account.current is manager and told[-1] == manager.allocated


def test_a_buffer_made_for_an_array_is_told_of_unless_the_array_is_known() -> None:
    """Who counts knows an array that has no buffer yet by a weak reference."""
    counts = Counts()
    count_with(counts)
    new, known = (np.ones(3) for _ in range(2))
    reference = ref(known)
    for array in (new, known):
        out = Buffer(None, leaf(shaped((3,), np.dtype("f8"), CPU)))
        out.array = array
        account.current.owned(out)
    assert [b.array is new for b in counts.heard] == [True] and reference() is known
