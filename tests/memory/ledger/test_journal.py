"""Parts of a journal: which steps stay whole, and what is left of the others."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.buffer import uncounted
from tapegrad.memory.ledger.figures import Replayed
from tapegrad.memory.ledger.journal import OOM, STEP, USER, Journal, Part, Parts
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import optimizing
from tapegrad.profile.recorder import Session
from tapegrad.profile.runs import CATEGORIES, PHASES, Run


def steps(keep: int, count: int, events: int = 10) -> Parts:
    """So many steps with so many events each, one higher than the one before."""
    parts = Parts(keep, lambda calls: None)
    for step in range(count):
        parts.now.ops += [(i, i, "add", 0, -1, -1) for i in range(events)]
        parts.close(count - step, 0)
    return parts


@pytest.mark.parametrize(("keep", "whole"), [(80, 8), (79, 7), (71, 7), (70, 7), (69, 6), (60, 6), (0, 4)])
def test_as_many_events_are_kept_as_are_wanted_but_never_less_than_the_first_and_the_last_steps(
    keep: int, whole: int
) -> None:
    """The part that is open is one of the last two; dropped ones beside each other become one."""
    parts = steps(keep, 8)
    assert sum(part.whole for part in parts.all[:-1]) == whole
    assert parts.events == 80 and parts.dropped == 80 - 10 * whole == 80 - sum(map(len, parts.all))
    assert len(parts.all) == whole + 1 + (whole < 8)
    assert [part.whole for part in parts.all[:3]] == [True] * 3 and all(part.whole for part in parts.all[-2:])


def test_of_a_dropped_part_stays_what_came_before_it_or_is_there_after_it() -> None:
    part = Part()
    part.rows = {2: (0,) * 10, 3: (1,) * 10}  # type: ignore[dict-item]
    part.ends = {1: (5, 5, "", -1, -1), 2: (6, 6, "", -1, -1)}
    part.changes = [(3, 1, "gradient"), (4, 2, "gradient"), (5, 3, "gradient")]
    part.ops, part.replays = [(0, 0, "add", 0, -1, -1)], [(0, 0, 0, 0)]
    assert len(part) == 2 + 2 + 3 + 1 + 1 and part.whole
    part.reduce()
    assert list(part.rows) == [3] and list(part.ends) == [1] and [c[1] for c in part.changes] == [1, 3]
    assert len(part) == 4 and not part.ops and not part.replays and not part.whole


def test_what_stays_of_dropped_parts_counts() -> None:
    """Of the ten events of a step three outlive it."""
    parts, sizes = Parts(60, lambda calls: None), []
    for step in range(9):
        parts.now.rows |= {10 * step + i: (0,) * 10 for i in range(3)}  # type: ignore[misc]
        parts.now.ops += [(step, step, "add", 0, -1, -1)] * 7
        parts.close(9 - step, 0)
        sizes.append([len(part) for part in parts.all[:-1]])
        assert parts.dropped == parts.events - sum(sizes[-1]) and parts.events == 10 * step + 10
    assert sizes[:6] == [[10] * count for count in range(1, 7)]
    assert sizes[6:] == [[10, 10, 10, 6, 10, 10], [10, 10, 10, 9, 10, 10], [10, 10, 10, 15, 10]]


def test_of_parts_that_are_as_high_the_first_is_kept_and_calls_of_those_dropped_are_forgotten() -> None:
    forgotten: list[range] = []
    parts = Parts(0, forgotten.append)  # type: ignore[arg-type]
    for step, peak in enumerate((1, 1, 1, 1, 5, 5, 1, 1)):
        parts.now.ops.append((step, step, "add", 0, -1, -1))
        parts.close(peak, 10 * step + 10)
    assert [(part.whole, part.peak, part.calls) for part in parts.all] == [
        *((True, 1, range(start, start + 10)) for start in (0, 10, 20)), (False, 1, range(30, 40)),
        (True, 5, range(40, 50)), (False, 5, range(50, 60)), (True, 1, range(70, 80)), (True, 0, range(80, 80)),
    ]  # fmt: skip
    assert forgotten == [range(30, 40), range(50, 60), range(60, 70)]


def test_the_end_of_a_step_closes_its_part_and_other_marks_do_not() -> None:
    journal = Journal()
    for kind in (USER, STEP, OOM):
        journal.mark(kind, "here", 7)
    assert [(seq, *rest) for seq, _, *rest in journal.marks] == [
        (n, k, "here") for n, k in enumerate((USER, STEP, OOM))
    ]
    assert [part.peak for part in journal.parts.all] == [7, 0]


def test_a_row_is_known_for_three_parts() -> None:
    parts = Parts(100, lambda calls: None)
    row = (0, 0, 512, "user", "exp", 0, -1, -1, 0, -1)
    parts.now.rows[7] = row
    for after in range(4):
        assert parts.row(7) == (row if after < 3 else None) and parts.row(8) is None
        parts.close(0, 0)


def test_a_replay_is_noted_with_its_arena_and_its_program_once() -> None:
    journal = Journal()
    for number, told in ((7, "a"), (8, "b"), (7, "c")):
        report = Replayed(1, 0, Counter(), 0, {}, number, lambda: None, lambda told=told: told)  # type: ignore
        journal.replayed(report, None)
    assert [(seq, *rest) for seq, _, *rest in journal.parts.now.replays] == [(0, 0, -1), (1, 1, -1), (2, 0, -1)]
    assert journal.programs == ["a", "b"]


# A whole run


def f(h: tg.Tensor, w: tg.Variable) -> tg.Tensor:
    return tg.cumulative_sum(tg.softmax(h * w))


def step(x: tg.Tensor, w: tg.Variable) -> Any:
    with tg.GradientTape() as tape:
        h = tg.recompute_grad(f)(x + w, w)
        with tg.memory.scope("second"):
            y = tg.sum(f(h, w) * h)
    return tape.gradient(y, w)


def told(run: Run) -> list[str]:
    """All but times, of what begins with the call of ``step``: operations, allocations, changes and calls, in order.

    Numbers are those of the event, from the beginning of that call on, and of the calls, from it on.
    """
    o, a, h, c = run.ops, run.allocs, run.changes, run.calls
    first = [run.text(name) for name in c["name"]].index("step")
    began = c["begin_seq"][first]
    since = lambda seq: str(seq - began) if seq >= began else "-"

    def line(stack: int) -> str:
        _, number, function = run.frame_of(stack)
        mine = globals().get(function)
        return function if mine is None else f"{function}+{number - mine.__code__.co_firstlineno}"

    def alloc(i: int) -> str:
        return f"{run.text(a['op'][i])}@{since(a['begin_seq'][i])}"

    rows = []
    for i, seq in enumerate(o["seq"]):
        rows.append((seq, "op", run.text(o["name"][i]), PHASES[o["phase"][i]], line(o["stack"][i]),
                     f"in {o['call'][i] - first}"))  # fmt: skip
    for i, seq in enumerate(a["begin_seq"]):
        if seq >= began:
            again = f"again {alloc(a['remat_of'][i])}" if a["remat_of"][i] >= 0 else ""
            rows.append((seq, "to", since(a["end_seq"][i]), run.text(a["op"][i]), PHASES[a["phase"][i]],
                         line(a["stack"][i]), f"in {a['call'][i] - first}", CATEGORIES[a["category"][i]], "read",
                         since(a["last_forward_seq"][i]), since(a["next_backward_seq"][i]), run.text(a["holder"][i]),
                         again))  # fmt: skip
    for i, seq in enumerate(h["seq"]):
        if seq >= began:
            rows.append((seq, alloc(h["alloc"][i]), "serves as", CATEGORIES[h["category"][i]]))
    for i, seq in enumerate(c["begin_seq"]):
        if seq >= began:
            again = f"again {c['first'][i] - first}" if c["first"][i] >= 0 else ""
            rows.append((seq, "to", since(c["end_seq"][i]), "call", f"{i - first}", run.text(c["name"][i]),
                         PHASES[c["phase"][i]], f"in {c['parent'][i] - first}", f"number {c['ordinal'][i]}",
                         f"at {line(c['site'][i])}" if c["site"][i] != -1 else "", again))  # fmt: skip
    return [" ".join([str(seq - began), *filter(None, rest)]) for seq, *rest in sorted(rows)]


RUN = """
0 to 62 call 0 step forward in -1 number 0 at test_a_small_run_is_written_down_event_by_event.<locals>.<lambda>
1 op add forward step+2 in 0
2 to 80 add forward step+2 in 0 temporary read 5 59 vjp of multiply
3 to 12 call 1 recompute_grad(f) forward in 0 number 0
4 to 12 call 2 f forward in 1 number 0
5 op multiply forward f+1 in 2
6 to 9 multiply forward f+1 in 2 temporary read 7 -
7 op softmax forward f+1 in 2
8 to 13 softmax forward f+1 in 2 temporary read 11 -
10 op identity forward f+1 in 2
11 op cumulative_sum forward f+1 in 2
12 to 87 cumulative_sum forward f+1 in 2 temporary read 27 36 vjp of multiply
14 add@2 serves as activation
15 to 31 call 3 second forward in 0 number 0
16 to 26 call 4 f forward in 3 number 1 at step+4
17 op multiply forward f+1 in 4
18 to 23 multiply forward f+1 in 4 temporary read 20 -
19 cumulative_sum@12 serves as activation
20 op softmax forward f+1 in 4
21 to 46 softmax forward f+1 in 4 temporary read 25 44 vjp of softmax
22 softmax@21 serves as activation
24 op identity forward f+1 in 4
25 op cumulative_sum forward f+1 in 4
26 to 40 cumulative_sum forward f+1 in 4 temporary read 27 38 vjp of multiply
27 op multiply forward step+4 in 3
28 to 32 multiply forward step+4 in 3 temporary read 30 -
29 cumulative_sum@26 serves as activation
30 op sum forward step+4 in 3
31 to 88 sum forward step+4 in 3 temporary read - -
33 to 86 leaf other step+5 in 0 input read - 34
34 op reshape backward step+4 in 3
35 op broadcast_to backward step+4 in 3
36 op multiply backward step+4 in 3
37 to 43 multiply backward step+4 in 3 temporary read - 41
38 op multiply backward step+4 in 3
39 to 54 multiply backward step+4 in 3 temporary read - 52
41 op cumulative_sum backward f+1 in 4
42 to 47 cumulative_sum backward f+1 in 4 temporary read - 44
44 op softmax_vjp backward f+1 in 4
45 to 56 softmax_vjp backward f+1 in 4 temporary read - 48
48 op multiply backward f+1 in 4
49 to 55 multiply backward f+1 in 4 temporary read - 52
50 op multiply backward f+1 in 4
51 to 77 multiply backward f+1 in 4 temporary read - 74
52 op add backward f+1 in 4
53 to 79 add backward f+1 in 4 temporary read - 64
57 to 62 call 5 recompute_grad(f) recompute in 0 number 0 again 1
58 to 62 call 6 f recompute in 5 number 0 again 2
59 op multiply recompute f+1 in 6
60 to 63 multiply recompute f+1 in 6 rematerialized read - 61 again multiply@6
61 op softmax recompute f+1 in 6
62 to 68 softmax recompute f+1 in 6 rematerialized read - 66 again softmax@8
64 op cumulative_sum backward f+1 in 6
65 to 69 cumulative_sum backward f+1 in 6 temporary read - 66
66 op softmax_vjp backward f+1 in 6
67 to 78 softmax_vjp backward f+1 in 6 temporary read - 70
70 op multiply backward f+1 in 6
71 to 84 multiply backward f+1 in 6 temporary read - 81
72 op multiply backward f+1 in 6
73 to 76 multiply backward f+1 in 6 temporary read - 74
74 op add backward f+1 in 6
75 to 83 add backward f+1 in 6 temporary read - 81
81 op add backward step+2 in 0
82 to 89 add backward step+2 in 0 temporary read - - gradient of w
85 add@82 serves as gradient
"""


def recorded(program: Callable[[], Any], **options: Any) -> Run:
    """The run of a program, before and during which no garbage is collected."""
    gc.collect()
    gc.disable()
    session = Session(**options)
    session.start()
    try:
        program()
    finally:
        session.stop()
        gc.enable()
    return session.run({"tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"}})


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="other versions may let values go some events later")
@pytest.mark.parametrize("block", [nullcontext, tg.measure, lambda: tg.memory_budget("1GiB")])
def test_a_small_run_is_written_down_event_by_event(block: Callable[[], Any]) -> None:
    """The same whoever counts, or keeps memory, beside the profile."""
    x, w = tg.asarray(np.ones(4, np.float32)), tg.Variable(np.ones(4, np.float32), name="w")
    step(x, w)  # constants are there
    with block():
        run = recorded(lambda: step(x, w))
    assert told(run) == RUN.strip().splitlines()
    assert len(set(run.calls["first"])) == 3 and min(run.calls["first"]) == -1  # only calls of a rerun repeat one
    there = {run.text(h): CATEGORIES[c] for h, c in zip(run.allocs["holder"], run.allocs["category"], strict=True)}
    assert there["w"] == "parameter"


def test_what_an_optimizer_does_is_no_operation_of_the_program() -> None:
    """Who compares pools before each operation is asked before that as well."""
    x, asked = tg.asarray(np.ones(4, np.float32)), list[int]()

    def program() -> None:
        assert LEDGER.journal is not None
        LEDGER.journal.before_op = lambda: asked.append(1)
        tg.sin(x)
        with optimizing():
            tg.exp(x)
        tg.cos(x)

    run = recorded(program)
    assert [run.text(name) for name in run.ops["name"]] == ["sin", "cos"]
    assert [run.text(op) for op in run.allocs["op"]].count("exp") == 1  # its bytes count
    assert len(asked) == 3


def test_the_end_of_the_first_value_is_noted_too() -> None:
    gc.collect()
    uncounted.clear()
    LEDGER.forget(0)
    kept = [tg.asarray(np.ones(4, np.float32)) for _ in range(2)]
    a = recorded(kept.clear).allocs
    assert len(a["end_seq"]) == 2 and min(a["end_seq"]) > max(a["begin_seq"])


def in_a_function(layer: Any, x: tg.Tensor) -> tg.Tensor:
    return tg.recompute_grad(lambda x: layer(x) * 2.0)(x)


def by_itself(layer: Any, x: tg.Tensor) -> tg.Tensor:
    return tg.recompute_grad(layer)(x)


@pytest.mark.parametrize("called", [in_a_function, by_itself])
def test_what_a_rerun_of_a_layer_makes_has_the_line_of_the_first_run(called: Any) -> None:
    tg.random.seed(0)
    layer, x = tg.nn.Dense(8, activation="gelu"), tg.asarray(np.ones((4, 8), np.float32))

    def program() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = called(layer, x)
            loss = tg.sum(y * y)
        tape.gradient(loss, layer.trainable_variables)

    program()
    whole = recorded(program, stacks="full").allocs
    assert [o >= 0 for o, p in zip(whole["remat_of"], whole["phase"]) if PHASES[p] == "recompute"] == [True] * 2
    a = recorded(program).allocs
    again = [i for i, p in enumerate(a["phase"]) if PHASES[p] == "recompute"]
    assert len(again) > 1 and all(a["remat_of"][i] >= 0 for i in again)
    assert [a["stack"][i] for i in again] == [a["stack"][a["remat_of"][i]] for i in again]


def test_a_rerun_that_makes_ever_more_other_nodes_still_names_what_it_repeats() -> None:
    """More in all than are looked at around a place: what is found tells where to look for the next."""
    x, functions, runs = tg.asarray(np.ones(1000, np.float32)), (tg.sin, tg.tanh, tg.exp, tg.cos, tg.sinh) * 2, [0]

    def f(y: tg.Tensor) -> tg.Tensor:
        runs[0] += 1
        if runs[0] == 2:
            tg.cumulative_sum(x[:3]).numpy()
        for function in functions:
            for _ in range(10 if runs[0] == 2 else 0):
                x[:3]
            y = function(y)
        return y

    def program() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.recompute_grad(f)(x))
        tape.gradient(y, x)

    a = recorded(program).allocs
    old = [o for o, p, size in zip(a["remat_of"], a["phase"], a["bytes"]) if PHASES[p] == "recompute" and size == 4096]
    assert runs == [2] and len(old) == 10 and min(old) >= 0 and len(set(old)) == 10
    other = [o for o, p, size in zip(a["remat_of"], a["phase"], a["bytes"]) if PHASES[p] == "recompute" and size == 512]
    assert other == [-1], "what repeats nothing"


def test_calls_are_numbered_anew_under_each_tape_and_those_of_reruns_in_each_step() -> None:
    x, w = tg.asarray(np.ones(4, np.float32)), tg.Variable(np.ones(4, np.float32))

    def program() -> None:
        tapes = []
        for _ in range(2):
            with tg.GradientTape() as tape:
                tapes.append((tape, tg.recompute_grad(f)(x, w), tg.recompute_grad(f)(x, w)))
        for tape, *ys in tapes:
            tape.gradient(ys, w)

    run = recorded(program)
    c = run.calls
    found = [(PHASES[p], n) for p, name, n in zip(c["phase"], c["name"], c["ordinal"]) if run.text(name) == "f"]
    assert found == [(phase, n) for phase in ("forward", "recompute") for n in (0, 1, 0, 1)]


def test_what_holds_a_value_is_who_told_of_its_most_telling_category_last() -> None:
    x = tg.asarray(np.ones(4, np.float32))
    told = (
        ("activation", "a"),
        ("gradient", "b"),
        ("gradient", "c"),
        ("activation", "d"),
        ("optimizer", "e"),
        ("input", "f"),
    )
    found = []

    def program() -> None:
        y = tg.exp(x)
        for category, name in told:
            LEDGER.labelled(y._buffer, category, name)
            entry = LEDGER._entries.of(y._buffer)
            assert entry is not None
            found.append((entry.category, entry.holder))

    recorded(program)
    assert found == [("activation", "a"), ("gradient", "b"), *[("gradient", "c")] * 2, *[("optimizer", "e")] * 2]


@pytest.mark.parametrize("f", [tg.exp, partial(tg.exp)])
def test_a_rerun_of_a_function_of_ours_repeats_the_call_that_made_its_values(f: Any) -> None:
    scope = {"tg": tg, "x": tg.asarray(np.ones(100, np.float32)), "f": f}
    text = "with tg.GradientTape() as t:\n    t.watch(x)\n    y = tg.recompute_grad(f)(x)\nt.gradient(y, x)"
    code = compile(text, "<a script>", "exec")
    exec(code, dict(scope))
    run = recorded(lambda: exec(code, dict(scope)))
    c = run.calls
    assert [(PHASES[p], parent, first) for p, parent, first in zip(c["phase"], c["parent"], c["first"])] == [
        ("forward", -1, -1), ("recompute", -1, 0),
    ]  # fmt: skip
    where = ("", 0) if isinstance(f, partial) else (f.__code__.co_filename, f.__code__.co_firstlineno)
    assert [(run.text(file), line) for file, line in zip(c["file"], c["line"], strict=True)] == [where] * 2


def test_a_scope_may_be_entered_by_an_exit_stack() -> None:
    x = tg.asarray(np.ones(4, np.float32))

    def program() -> None:
        with ExitStack() as stack:
            stack.enter_context(tg.memory.scope("inside"))
            tg.exp(x)
        tg.sin(x)

    run = recorded(program)
    names = [run.text(run.calls["name"][call]).rpartition(".")[2] for call in run.ops["call"]]
    assert names == ["inside", "program"]


@pytest.mark.parametrize(("made", "last"), [("tg.exp(x)", "allocs"), ("tg.exp(x); x[1:]", "ops")])
def test_the_first_call_of_a_script_goes_on_until_the_last_that_it_does(made: str, last: str) -> None:
    scope = {"tg": tg, "x": tg.asarray(np.ones(100, np.float32))}
    code = compile(f"def g(x):\n    y = {made}\n    return y\nz = g(x)", "<a script>", "exec")
    run = recorded(lambda: exec(code, scope))
    assert run.calls["end_seq"] == [{"allocs": run.allocs["begin_seq"], "ops": run.ops["seq"]}[last][-1]]


def test_what_a_step_leaves_to_the_next_has_the_line_that_made_it() -> None:
    """A value that waits for its bytes, and a gradient."""
    x = tg.asarray(np.ones(40_000, np.float32))

    def program() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
            z = tg.sum(tg.sin(x))
        tg.memory.step()
        y.numpy()
        tape.gradient(z, x).numpy()

    run = recorded(program)
    first = program.__code__.co_firstlineno
    lines = [(run.text(op), run.frame_of(stack)[1] - first) for op, stack in zip(run.allocs["op"], run.allocs["stack"])
             if op >= 0 and stack >= 0]  # fmt: skip
    assert ("exp", 3) in lines and ("sum", 4) in lines
    backward = [run.frame_of(stack)[1] - first for stack, p in zip(run.ops["stack"], run.ops["phase"]) if p == 1]
    assert backward and set(backward) == {4}
