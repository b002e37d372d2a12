"""What it costs a small recorded operation to be counted: instructions of Python, beside those that it takes anyway."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tapegrad as tg


def chain(length: int) -> Callable[[], Any]:
    """Forward run and gradient of so many operations on 4 elements (those of bench/overhead.py)."""
    x, w = (tg.asarray(np.full(4, value, np.float32)) for value in (0.5, 0.9))

    def call() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(length // 2):
                y = tg.tanh(y) * w
        return tape.gradient(y, x)

    return call


def instructions(f: Callable[[], Any]) -> int:
    """How many instructions of Python code ``f`` takes."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        f()
    finally:
        sys.settrace(before)
    return count


def for_each(block: Callable[[], Any]) -> float:
    """Instructions for one more operation within ``block``, its figures read at the end of each call."""
    short, long = chain(20), chain(60)
    gc.collect()
    gc.disable()
    try:
        with block() as m:
            peak = lambda: m and m.peak_bytes
            for _ in range(3):
                long(), short(), peak()
            few, many = (instructions(lambda call=call: (call(), peak())) for call in (short, long))
    finally:
        gc.enable()
    return (many - few) / 40


FEWER = 1.0 if sys.version_info < (3, 12) else 1.1
"""From CPython 3.12 on a plain operation takes fewer instructions: two of them are often one."""


@pytest.mark.parametrize(
    ("block", "most"), [(tg.measure, 2.0), (lambda: tg.memory_budget("4GiB"), 2.6)], ids=["measure", "budget"]
)
def test_counting_takes_few_instructions(block: Callable[[], Any], most: float) -> None:
    """By time it is less: the arithmetic is the same."""
    assert 1.0 < for_each(block) / for_each(nullcontext) <= most * FEWER
