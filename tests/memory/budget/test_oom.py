"""Errors about memory name who holds the bytes."""

from __future__ import annotations

import numpy as np

import tapegrad as tg
from tapegrad.core import account
from tapegrad.memory.budget.oom import live_set

MIB = np.zeros((256, 1024), "float32")


def test_where_nobody_measures_it_names_what_is_alive_and_how_to_see_lines() -> None:
    x = tg.asarray(MIB)
    lines = live_set().splitlines()
    assert lines[0].startswith("Live: ") and "1.0 MiB" in lines[0] and "with tg.measure()" in lines[-1]
    assert any("1.0 MiB" in line for line in lines[1:-1]) and x.size
    assert account.current is account.NOBODY


def test_where_somebody_measures_it_names_the_lines() -> None:
    with tg.measure():
        x = tg.asarray(MIB) + 1
        text = live_set()
        assert "test_oom.py:" in text and "1.0 MiB" in text and "with tg.measure()" not in text and x.size
