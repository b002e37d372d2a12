"""Programs of regions on the CPU: written once for each form, and not too many are kept."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.engine.cpu import emit

X = np.linspace(0.0, 1.0, 20_000)
PROGRAMS = {
    "a sum": (lambda x: x + 1.0, X + 1.0),
    "a product": (lambda x: x * 2.0, X * 2.0),
    "two steps": (lambda x: -x * 2.0, -X * 2.0),
    "of two operands": (lambda x: x - x[::-1], X - X[::-1]),
}


def test_programs_that_are_too_many_are_forgotten_and_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "_MOST", 2)
    monkeypatch.setattr(emit, "_programs", {})
    for _ in range(2):
        for name, (f, wanted) in PROGRAMS.items():
            assert np.array_equal(f(tg.asarray(X)).numpy(), wanted), name
            known = dict(emit._programs)
            assert 1 <= len(known) <= 2
            f(tg.asarray(X)).numpy()
            assert emit._programs == known, "of the same form"
