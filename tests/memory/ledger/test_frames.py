"""Places of the program: each instruction is one place, and what is forgotten is found again."""

from __future__ import annotations

import _thread
import dis
import sys
import time
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.memory.ledger import frames
from tapegrad.memory.ledger.frames import FUNCTION, Call, Frames, NamedPlace, Ordinals, named
from tapegrad.memory.ledger.phase import STEPS

X = np.ones(100)


def made(number: int) -> Any:
    """A function of the program's, of its own code, that makes an array in its third line."""
    names: dict[str, Any] = {}
    exec(compile("def f(tg, x):\n\n    return tg.asarray(x)", f"<made {number}>", "exec"), names)
    return names["f"]


def test_a_place_of_a_file_has_the_line_and_columns_of_its_call() -> None:
    code = compile("y = 1\nx = (f(y)\n     + g(\n  y))\n", "<made>", "exec")
    calls = [i.offset for i in dis.get_instructions(code) if i.opname == "CALL"]
    assert [named(code, at, 7) for at in calls] == [
        NamedPlace("<made>", 2, "<module>", 7, 2, 5, 9), NamedPlace("<made>", 3, "<module>", 7, 4, 7, 4),
    ]  # fmt: skip
    assert named(code, len(code.co_code), -1) == NamedPlace("<made>", 1, "<module>", -1, -1, -1, -1)


def test_small_values_of_functions_that_take_turns_have_their_own_lines() -> None:
    """The codes have the same instructions, so only the code tells their places apart."""
    names: list[dict[str, Any]] = [{}, {}]
    for number, into in enumerate(names):
        exec(compile("def f(tg, x):\n" + "\n" * number + "    return tg.sin(x)", "<made>", "exec"), into)
    x = tg.asarray(np.ones(4, np.float32))
    with tg.measure() as m:
        kept = [names[i % 2]["f"](tg, x) for i in range(6)]
    assert {line: n for line, n in m.peak_by_line.items() if line.startswith("<made>")} == {
        "<made>:2": 1536, "<made>:3": 1536,
    }  # fmt: skip
    del kept


def test_calls_are_forgotten_but_for_those_under_way_and_those_that_they_are_in() -> None:
    seen = Frames("none")

    def inner() -> None:
        assert seen.look(sys._getframe())[0] == -1
        under_way = {n for n in range(len(seen.calls)) if seen.calls[n] is not None}
        code = inner.__code__
        names = [call.name for call in seen.calls if call is not None]
        assert names[-3:] == [f.__code__.co_qualname for f in (outer, middle, inner)] and code.co_qualname == names[-1]
        seen.begin(Call(FUNCTION, "over", "f.py", 1, -1, None))
        seen.forget([*under_way, len(seen.calls) - 1])
        assert {n for n in range(len(seen.calls)) if seen.calls[n] is not None} == under_way

    def middle() -> None:
        inner()

    def outer() -> None:
        middle()

    outer()
    chain = [-1]
    for _ in range(3):
        chain.append(seen.begin(Call(FUNCTION, "in another", "f.py", 1, chain[-1], None)))
    seen._call_of[0] = chain[-1]  # of the others no frame is known
    seen.forget(chain[1:])
    assert all(seen.calls[number] is not None for number in chain[1:])
    seen._call_of.clear()  # as when their frames are gone
    seen.forget([])
    assert not any(seen.calls)


@pytest.mark.parametrize("by_step", [False, True])
def test_calls_are_numbered_anew_in_each_step_and_under_each_outermost_tape(by_step: bool) -> None:
    ordinals, numbers = Ordinals(by_step), []
    note = lambda *keys: numbers.append([ordinals.next(key) for key in keys])
    note("f", "g", "f")
    with tg.GradientTape():
        note("f", "f")
        with tg.GradientTape():
            note("f")
        STEPS.count += 1
        note("f", "f")
    with tg.GradientTape():
        note("f", "g")
        note("f")
    anew = [[0, 0, 1], [0, 1], [2], [0, 1], [0, 0], [1]]
    assert numbers == ([[0, 0, 1], [2, 3], [4], [0, 1], [2, 0], [3]] if by_step else anew)


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


def test_where_the_program_has_no_frame_the_place_is_not_known() -> None:
    """A function of the library's is all that a thread runs."""
    x = tg.asarray(X)
    with tg.measure() as m:
        before = m.kernel_runs
        _thread.start_new_thread(tg.cumulative_sum, (x,))
        until = time.monotonic() + 60
        while m.kernel_runs == before and time.monotonic() < until:
            time.sleep(0.001)
    assert m.peak_by_line["(unknown)"] == 1024
