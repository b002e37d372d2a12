"""Room: what a limit leaves beside live and promised bytes, whatever waits to be summed when it is worked out."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, ValuesView
from functools import partial
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import account
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer, uncounted
from tapegrad.core.node import leaf
from tapegrad.device import CPU
from tapegrad.errors import BudgetError
from tapegrad.memory.ledger import ledger as ledger_module
from tapegrad.memory.ledger.entries import Entry
from tapegrad.memory.ledger.ledger import LEDGER

LIMIT = 2**20
X = tg.asarray(np.ones(100, np.float32))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of another test may be freed while bytes are counted."""
    tg.sin(X)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(m: Any) -> bool:
    """Whether there is as much room as the live bytes leave."""
    LEDGER.settle()
    return bool(LEDGER.room == LIMIT - m.live_bytes - LEDGER.promised_bytes)


def test_what_waits_to_be_summed_is_in_no_room() -> None:
    with tg.memory_budget(LIMIT) as m:
        y, gone = tg.sin(X), tg.sin(X)
        del gone
        LEDGER.limit(LIMIT)
        assert left(m)
        del y
        LEDGER.limit(LIMIT)
        assert left(m)


def test_what_comes_while_room_is_worked_out_is_in_none() -> None:
    made: list[tg.Tensor] = []

    class Promises(dict[int, int]):
        def values(self) -> ValuesView[int]:  # type: ignore[override]
            if not made:
                made.append(tg.sin(X))
            return super().values()

    with tg.memory_budget(LIMIT) as m:
        promises = LEDGER.promises_apart(Promises())
        LEDGER.limit(LIMIT)
        assert len(made) == 1 and left(m)
        LEDGER.promises_apart(promises)


def walk() -> Callable[[], Any]:
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = tg.sin(X)
    return partial(tape.gradient, y, X)


@pytest.mark.parametrize("prepare", [lambda: partial(tg.sin, X), walk])
def test_a_small_value_is_in_none_though_that_is_worked_out_while_it_is_counted(
    prepare: Callable[[], Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread does that, when the value has taken its room and nobody has been told of it yet."""

    def entry(*args: Any) -> Entry:
        if sys._getframe(1).f_code.co_name in ("evaluated", "pulled"):  # without the lock
            monkeypatch.undo()
            LEDGER.limit(LIMIT)
        return Entry(*args)

    prepare()()
    with tg.memory_budget(LIMIT) as m:
        work = prepare()
        monkeypatch.setattr(ledger_module, "Entry", entry)
        y = work()
        assert ledger_module.Entry is Entry and left(m)
        del y, work
        assert left(m)


def test_what_is_promised_is_in_none() -> None:
    def make() -> None:
        LEDGER.limit(LIMIT)
        assert LEDGER.promised_bytes == 512 == LEDGER.taken() - m.live_bytes and left(m)
        LEDGER.settle_promise(200)
        assert LEDGER.promised_bytes == LEDGER.promised() == 200 and left(m)
        LEDGER.settle_promise(300)
        assert LEDGER.promised_bytes == 200 and left(m)

    with tg.memory_budget(LIMIT) as m:
        account.current.in_room([X._buffer.node.aval], ["f"], make)
        assert not LEDGER.promised_bytes and left(m)


@pytest.mark.parametrize(("values", "others"), [(1, 0), (2, 0), (1, 512)])
def test_what_is_made_takes_what_was_promised_for_it_first(values: int, others: int) -> None:
    def make() -> tg.Tensor:
        made = tg.asarray(np.zeros((512 + others) // 8))
        assert LEDGER.promised_bytes == 512 * values - 512 and left(m)
        return made

    with tg.memory_budget(LIMIT) as m:
        y = account.current.in_room([X._buffer.node.aval] * values, ["f"] * values, make)
        assert not LEDGER.promised_bytes and left(m)
        del y
        assert left(m)


def test_what_another_thread_has_made_while_counting_began_takes_room() -> None:
    """Nobody was told of it."""
    own = Buffer(None, leaf(shaped((100,), np.dtype("float64"), CPU)))
    own.array = np.zeros(100)
    with tg.measure() as m:
        base = m.live_bytes
    with tg.memory_budget(base + 1536) as b:
        uncounted.add(weakref.ref(own))
        with pytest.raises(BudgetError):
            tg.asarray(np.zeros(200, np.float32))
        assert b.live_bytes == base + 1024
        x = tg.asarray(np.zeros(100, np.float32))
        assert b.live_bytes == b.peak_bytes == base + 1536
    del x


def test_what_is_forgotten_takes_none() -> None:
    with tg.memory_budget(LIMIT) as m:
        x = tg.asarray(np.zeros(100, np.float32))
        live = m.live_bytes
        assert LEDGER.forget(x._buffer.node.index) == [x._buffer]
        assert m.live_bytes == live - 512 and left(m)
        del x
        assert m.live_bytes == live - 512 and left(m)
