"""Ctrl-C in the middle of a section of the ledger: its lock is free, sums are right, and nothing stays promised."""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from types import FrameType
from typing import Any

import numpy as np
import pytest
from checks import c64, same
from core.test_locks import Interrupts

import tapegrad as tg
from tapegrad.core import account, locks
from tapegrad.memory.ledger import ledger as ledger_module
from tapegrad.memory.ledger.ledger import LEDGER, Ledger

SMALL, BIG = 100, 20_480  # elements: of 1024 and of 163840 bytes

SECTIONS: dict[str, tuple[str, int, Callable[[Any, Any], Any]]] = {
    "bytes are counted": ("_enter", 1024, lambda small, big: c64(np.ones(SMALL))),
    "bytes of a kernel are counted": ("_enter", 163840, lambda small, big: np.asarray(big * 2.0)),
    "a small value has been computed": ("_note_changes", 1024, lambda small, big: small * 2.0),
}


@pytest.mark.parametrize("within", ["a measure", "a timeline", "a budget"])
@pytest.mark.parametrize("what", SECTIONS)
def test_after_an_interrupt_sums_are_right(what: str, within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, nbytes, work = SECTIONS[what]
    small, big = c64(np.ones(SMALL)), c64(np.linspace(0.0, 1.0, BIG))
    monkeypatch.setattr(ledger_module, "_MOST_EVENTS", 0)
    section, times = getattr(Ledger, name), list[int]()

    def interrupted(*args: Any) -> Any:
        times.append(0)
        if len(times) == 1:
            raise KeyboardInterrupt
        return section(*args)

    work(small, big)  # its constants are there
    gc.collect()
    block = {"a measure": tg.measure(), "a timeline": tg.measure(timeline=True), "a budget": tg.memory_budget("1MiB")}
    with block[within] as m:
        base = m.live_bytes
        with monkeypatch.context() as inside:
            inside.setattr(Ledger, name, interrupted)
            try:
                work(small, big)
            except KeyboardInterrupt:
                gc.collect()
        assert not LEDGER._lock._is_owned() and not LEDGER.promised_bytes  # type: ignore[attr-defined]
        assert m.live_bytes == base
        assert LEDGER.room == 2**20 - base or within != "a budget"
        y = work(small, big)
        assert m.live_bytes == base + nbytes
        if isinstance(y, tg.Tensor):
            same(y, np.full(SMALL, 2.0 if what.startswith("a small") else 1.0))
        del y
        assert m.live_bytes == base and sum(LEDGER.by("category").values()) == base
    assert times or within != "a budget"


def gradient(small: Any) -> Any:
    """A walk whose small values are arrays, until the last one is asked for."""
    with tg.GradientTape() as tape:
        tape.watch(small)
        y = tg.tanh(small) * small
    return tape.gradient(y, small)


def reserved(small: Any, big: Any) -> None:
    """Room is kept for a value that is not made after all."""
    account.current.in_room([small._buffer.node.aval], ["f"], lambda: None)


WORKS: list[Callable[[Any, Any], Any]] = [
    lambda small, big: c64(np.ones(SMALL)),
    lambda small, big: tg.tanh(small) * small,
    lambda small, big: np.asarray(big * 2.0),
    lambda small, big: gradient(small),
    reserved,
]


PLACES = {*locks._sections, Ledger._drain.__code__}


class InSections(Interrupts):
    """At lines of the sections themselves, and where events are added."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return super().__call__(frame, event, arg) if frame.f_code in PLACES else None


@pytest.mark.parametrize("within", ["a measure", "a timeline", "a budget"])
def test_an_interrupt_at_any_line_of_a_section_leaves_sums_right(within: str) -> None:
    small, big = c64(np.linspace(0.0, 1.0, SMALL)), c64(np.linspace(0.0, 1.0, BIG))
    block = {"a measure": tg.measure(), "a timeline": tg.measure(timeline=True), "a budget": tg.memory_budget("1MiB")}
    count = 0
    with block[within] as m:
        for work in WORKS:
            work(small, big)  # its constants are there
            gc.collect()
            base = m.live_bytes
            for where in InSections([ledger_module.__file__]).everywhere(partial(work, small, big), turns=1):
                count += 1
                assert not LEDGER._lock._is_owned() and not LEDGER.promised_bytes, where  # type: ignore[attr-defined]
                assert m.live_bytes == base == sum(LEDGER.by("category").values()), where
                assert LEDGER.room == (2**20 - base if within == "a budget" else inf), where
    assert count > 100


def test_an_interrupt_when_a_value_goes_leaves_the_lock_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter tells nobody of it."""
    drain, swallowed = Ledger._drain, list[Any]()

    def interrupted(ledger: Ledger) -> None:
        monkeypatch.setattr(Ledger, "_drain", drain)
        raise KeyboardInterrupt

    with tg.measure(timeline=True) as m:
        base, y = m.live_bytes, c64(np.ones(SMALL))
        monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
        monkeypatch.setattr(Ledger, "_drain", interrupted)
        del y
        assert len(swallowed) == 1 and not LEDGER._lock._is_owned()  # type: ignore[attr-defined]
        assert m.live_bytes == base


def test_an_error_leaves_the_lock_with_the_section_around_it_also_after_the_ledger_was_held() -> None:
    def fails_inside() -> bool:
        with pytest.raises(AttributeError):
            LEDGER.by("nothing of that name")
        return bool(LEDGER._lock._is_owned())  # type: ignore[attr-defined]

    with tg.measure():
        for _ in range(2):
            with LEDGER.held():
                assert fails_inside()
            assert LEDGER.locked(fails_inside) and not LEDGER._lock._is_owned()  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_the_promises_of_the_thread_that_forked() -> None:
    small = c64(np.linspace(0.0, 1.0, SMALL))
    kept, over = threading.Event(), threading.Event()
    aval, outcome = small._buffer.node.aval, list[int]()

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(0 if (LEDGER.promised_bytes, LEDGER.room) == (1024, limit - LEDGER.live_bytes - 1024) else 1)
        outcome.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with tg.memory_budget("1MiB") as m:
        limit = 2**20
        account.current.in_room([aval], ["f"], lambda: None)  # whatever is imported for it is
        other = threading.Thread(
            target=account.current.in_room, args=([aval] * 3, ["f"] * 3, lambda: (kept.set(), over.wait(20)))
        )
        other.start()
        kept.wait(20)
        assert LEDGER.promised_bytes == 3072
        account.current.in_room([aval], ["f"], fork)
        over.set()
        other.join(20)
        assert not LEDGER.promised_bytes and LEDGER.room == limit - m.live_bytes
    assert outcome == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_counts_on_though_another_thread_was_adding_sums() -> None:
    small, kept, over = c64(np.linspace(0.0, 1.0, SMALL)), threading.Event(), threading.Event()
    small * 2.0  # its constant is there
    with tg.measure() as m:
        base = m.live_bytes
        LEDGER._events.append(lambda: (kept.set(), over.wait(20)))
        other = threading.Thread(target=LEDGER.settle)
        other.start()
        kept.wait(20)
        child = os.fork()
        if not child:
            y = small * 2.0
            os._exit(0 if m.live_bytes == base + y.nbytes + 224 else 1)
        outcome = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        over.set()
        other.join(20)
        assert m.live_bytes == base
    assert outcome == 0


def interrupted(code: Any, at: int, meanwhile: Callable[[], object], f: Callable[[], object]) -> None:
    """``f()``, which an interrupt ends before the instruction ``at`` of ``code``, at once after ``meanwhile()``."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is code:
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lasti == at:
                sys.settrace(None)
                meanwhile()
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            f()
    finally:
        sys.settrace(before)


def instruction(code: Any, name: str, argument: str) -> int:
    """The last instruction of that name and argument."""
    return [i.offset for i in dis.get_instructions(code) if i.opname == name and i.argval == argument][-1]


def test_what_has_been_added_when_an_interrupt_comes_is_not_mistaken_for_what_waits() -> None:
    """The first to come has gone again, and another has come, before anybody notes that all has been added."""
    x = c64(np.ones(BIG))
    gc.collect()
    kept: dict[str, Any] = {}

    def meanwhile() -> None:
        del kept["first"]
        kept["new"] = tg.cumulative_sum(x)

    with tg.measure() as m:
        base = m.live_bytes
        kept["first"], kept["second"] = tg.cumulative_sum(x), tg.cumulative_sum(x)
        code = Ledger._drain.__code__
        interrupted(code, instruction(code, "STORE_ATTR", "_adding"), meanwhile, lambda: m.peak_bytes)
        assert m.live_bytes == base + 2 * 163840
        del kept["new"]
        assert m.live_bytes == base + 163840
        del kept["second"]
        assert m.live_bytes == base


def test_what_is_entered_when_an_interrupt_comes_counts_once_it_is_entered() -> None:
    """It had come while nobody counted."""
    gc.collect()
    x = c64(np.ones(BIG))
    code = Ledger._enter.__code__
    interrupted(code, instruction(code, "LOAD_ATTR", "_events"), lambda: None, lambda: tg.measure().__enter__())
    with tg.measure() as m:
        live = m.live_bytes
        del x
        assert m.live_bytes == live - 163840 and m.peak_bytes == live
