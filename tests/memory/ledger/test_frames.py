"""Places of the program: each instruction is one place, and what is forgotten is found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.memory.ledger import frames

X = np.ones(100)


def made(number: int) -> Any:
    """A function of the program's, of its own code, that makes an array in its third line."""
    names: dict[str, Any] = {}
    exec(compile("def f(tg, x):\n\n    return tg.asarray(x)", f"<made {number}>", "exec"), names)
    return names["f"]


def test_codes_that_are_too_many_are_forgotten_and_their_places_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MOST_KNOWN", 3)
    programs, kept = [made(number) for number in range(7)], []
    with tg.measure() as m:
        for _ in range(2):
            for f in programs:
                kept.append(f(tg, X))
                assert len(frames.known) <= 3
        lines = {f"<made {number}>:3": 2 * 1024 for number in range(7)}
        assert {line: n for line, n in m.peak_by_line.items() if line in lines} == lines
    assert not frames.known, "no code of the program's is held"
