"""Errors about memory name who holds the bytes."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import account
from tapegrad.errors import BudgetError
from tapegrad.memory.budget.oom import live_set
from tapegrad.memory.ledger.figures import Measure
from tapegrad.memory.ledger.journal import Journal
from tapegrad.memory.ledger.ledger import LEDGER

MIB = np.zeros((256, 1024), "float32")


def test_where_nobody_measures_it_names_what_is_alive_and_how_to_see_lines() -> None:
    x = tg.asarray(MIB)
    lines = live_set().splitlines()
    assert lines[0].startswith("Live: ") and "1.00 MiB" in lines[0] and "with tg.measure()" in lines[-1]
    assert any("1.00 MiB" in line for line in lines[1:-1]) and x.size
    assert account.current is account.NOBODY


def test_where_somebody_measures_it_names_the_lines() -> None:
    with tg.measure():
        x = tg.asarray(MIB) + 1
        text = live_set()
        assert "test_oom.py:" in text and "1.00 MiB" in text and "with tg.measure()" not in text and x.size


@pytest.mark.parametrize("journal", [False, True])
def test_where_a_profile_is_recorded_nobody_is_told_to_measure(journal: bool) -> None:
    """It has the lines, if they are wanted."""
    m, x = Measure(detailed=False), tg.asarray(MIB)
    LEDGER.open(m)
    try:
        LEDGER.write(Journal("none") if journal else None)
        text = live_set()
    finally:
        LEDGER.close(m)
    assert ("with tg.measure()" in text) == (not journal) and "1.00 MiB" in text and x.size


@pytest.mark.parametrize(("less", "named"), [(0, True), (512, False)])
def test_the_line_that_asks_for_gradients_is_named_if_each_has_a_256th_of_the_limit(less: int, named: bool) -> None:
    gc.collect()
    with tg.measure() as m:
        nbytes = 512 * (8 + m.live_bytes // (64 * 512))  # what is alive already is no more than a quarter of the limit
    x, c = (tg.asarray(np.ones((nbytes - less) // 8)) for _ in range(2))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.sum(x * c)
    held = []
    line = sys._getframe().f_lineno + 3
    with pytest.raises(BudgetError) as caught, tg.memory_budget(256 * nbytes):
        while True:
            held.append(tape.gradient(y, x))
    _, live, most, *_ = str(caught.value).splitlines()
    assert live.startswith("Live: ") and (f"{__file__}:{line}" in most) == named
