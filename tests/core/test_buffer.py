"""Buffers: who hears of bytes, and what an error leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import buffer as _buffer
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer, in_room
from tapegrad.core.node import leaf
from tapegrad.device import CPU

F32 = np.dtype("float32")


def node() -> Any:
    return leaf(shaped((4,), F32, CPU))


def test_bytes_that_were_there_before_anybody_counted_are_known() -> None:
    """Made at once, or by evaluation; a view has none, and what is gone is gone."""
    base, pending = Buffer(np.zeros(4), node()), Buffer(None, node(), (Buffer(np.zeros(4), node()),), (1, 1))

    def known() -> set[int]:
        return {id(b) for ref in list(_buffer.uncounted) if (b := ref()) is not None}

    view = Buffer(base.array[1:], node(), (base,))
    assert id(base) in known() and not {id(view), id(pending)} & known()
    pending.fill(np.zeros(4))
    assert id(pending) in known()
    count = len(_buffer.uncounted)
    del pending
    assert len(_buffer.uncounted) == count - 1


class Refuses:
    """Counts no bytes."""

    def allocated(self, buffer: Buffer) -> None:
        raise MemoryError


def test_bytes_that_nobody_counts_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Buffer(np.zeros(4), node())
    pending = Buffer(None, node(), (base,), (1, 1), ((4,), (0,)))
    monkeypatch.setattr(_buffer, "accountant", Refuses())
    with pytest.raises(MemoryError):
        pending.fill(np.zeros(4))
    assert pending.array is None
    assert (pending.keeps, pending.span, pending.loop) == ((base,), (1, 1), ((4,), (0,)))


def test_the_root_of_a_view_of_a_view_owns_the_bytes() -> None:
    base = Buffer(np.zeros(4), node())
    view = Buffer(base.array[1:], node(), (base,))
    assert Buffer(view.array[1:], node(), (view,)).root() is base and base.root() is base


class Keeps:
    """A keeper that has room for one value."""

    def __init__(self, interrupts: int = 0) -> None:
        self.calls: list[Any] = []
        self.interrupts = interrupts

    def promised(self) -> int:
        return 5

    def reserve(self, avals: Any, names: Any) -> None:
        self.calls.append(("reserve", avals, names))
        if len(avals) > 1:
            raise tg.errors.BudgetError("no room")

    def filled(self, buffer: Buffer, keeps: tuple[Buffer, ...]) -> None:
        self.calls.append((buffer, keeps))

    def settled(self, promised: int) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.calls.append(promised)


def test_room_that_is_not_taken_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, aval = Keeps(), shaped((4,), F32, CPU)
    monkeypatch.setattr(_buffer, "keeper", keeper)
    assert in_room([aval], ["f"], lambda x: x + 1, 2) == 3
    assert keeper.calls == [("reserve", [aval], ["f"]), 5]
    with pytest.raises(tg.errors.BudgetError):
        in_room([aval, aval], ["f"], lambda: pytest.fail("there is no room"))
    with pytest.raises(ZeroDivisionError):
        in_room([aval], ["f"], lambda: 1 // 0)
    assert keeper.calls[-1] == 5


def test_room_is_given_back_though_an_interrupt_comes_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeps(interrupts=1)
    monkeypatch.setattr(_buffer, "keeper", keeper)
    with pytest.raises(KeyboardInterrupt):
        in_room([], ["f"], lambda: 3)
    assert keeper.calls[-1] == 5


def test_who_keeps_memory_hears_of_bytes_and_of_what_they_were_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, base = Keeps(), Buffer(np.zeros(4), node())
    pending = Buffer(None, node(), (base,), (1, 1))
    monkeypatch.setattr(_buffer, "keeper", keeper)
    pending.fill(np.zeros(4))
    assert keeper.calls == [(pending, (base,))]
