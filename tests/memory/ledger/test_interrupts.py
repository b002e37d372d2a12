"""Ctrl-C in the middle of a section of the ledger: its lock is free, sums are right, and nothing stays promised."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg
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
