"""Programs of regions on the CPU: written once for each form, and not too many are kept."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize(
    ("f", "steps"),
    [
        (lambda x: x + 1.0, ["y0 = add(x0, x1)"]),
        (lambda x: tg.exp(x), ["s0 = contiguous(x0)", "y0 = exp(s0)"]),
        (lambda x: tg.exp(x) + x, ["s0 = contiguous(x0)", "s1 = exp(s0)", "y0 = add(s1, x0)"]),
        (lambda x: -x + tg.abs(x), ["s0 = negative(x0)", "s1 = abs(x0)", "y0 = add(s0, s1)"]),
        (lambda x: tg.nn.functional.relu(x) * x, ["s0 = relu(x0)", "y0 = multiply(s0, x0)"]),
    ],
)
def test_what_lies_by_columns_is_laid_out_anew_for_functions_that_would_round_otherwise_alone(
    f: Callable[[Any], Any], steps: list[str]
) -> None:
    text = io.StringIO()
    tg.explain(f(tg.permute_dims(tg.asarray(X.reshape(100, 200)), (1, 0))), file=text)
    found = [line.strip() for line in text.getvalue().splitlines() if re.match(r"\s+[sy]\d+ = ", line)]
    assert found == steps
