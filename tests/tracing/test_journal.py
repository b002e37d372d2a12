"""A recorded run: the same whoever counts beside it, and reruns, calls and scopes that name what they repeat."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from programs import laws

import tapegrad as tg
from tapegrad.profile.recorder import Session
from tapegrad.tracing.names import CATEGORIES, PHASES
from tapegrad.tracing.run import Run


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


def untimed(run: Run, since: int) -> dict[str, Any]:
    """What a run says of values of its own, without times and numbers."""
    rows = zip(*(run.allocs[name] for name in ("begin_seq", "op", "shape", "bytes", "category", "phase")), strict=True)
    return {
        "ops": [run.text(name) for name in run.ops["name"]],
        "allocs": [(run.text(op), run.text(shape), *rest) for seq, op, shape, *rest in rows if seq >= since],
        "peak": run.peak["bytes"],
    }


@pytest.mark.parametrize("block", [tg.measure, lambda: tg.measure(timeline=True)], ids=["measure", "timeline"])
def test_a_run_is_the_same_whoever_counts_beside_it(block: Callable[[], Any]) -> None:
    for subject in laws.subjects(range(30)):
        plain = recorded(subject.run)
        with block():
            run = recorded(subject.run)
        since = [min(r.ops["seq"]) for r in (plain, run)]
        assert untimed(run, since[1]) == untimed(plain, since[0])


def f(h: tg.Tensor, w: tg.Variable) -> tg.Tensor:
    return tg.cumulative_sum(tg.softmax(h * w))


def test_the_life_of_a_value_is_told_by_phase_reader_and_holder() -> None:
    """Of one that a rule reads, of one that is recomputed for a rule, and of the gradient."""
    x, w = tg.asarray(np.ones(4, np.float32)), tg.Variable(np.ones(4, np.float32), name="w")

    def step() -> Any:
        with tg.GradientTape() as tape:
            y = tg.sum(tg.recompute_grad(f)(x + w, w) * w)
        return tape.gradient(y, w)

    step()  # constants are there
    run = recorded(step)
    a = run.allocs
    told = [(run.text(a["op"][i]), PHASES[a["phase"][i]], CATEGORIES[a["category"][i]], a["next_backward_seq"][i] >= 0,
             run.text(a["op"][a["remat_of"][i]]) if a["remat_of"][i] >= 0 else "", run.text(a["holder"][i]))
            for i in range(len(a["op"]))]  # fmt: skip
    assert ("cumulative_sum", "forward", "temporary", True, "", "vjp of multiply") in told
    assert ("softmax", "recompute", "rematerialized", True, "softmax", "") in told
    assert ("softmax", "forward", "temporary", False, "", "") in told
    assert [row[-1] for row in told if row[0] == "add"][-1] == "gradient of w"
    serves = {(run.text(a["op"][i]), CATEGORIES[c]) for i, c in zip(run.changes["alloc"], run.changes["category"])}
    assert ("cumulative_sum", "activation") in serves and ("add", "gradient") in serves
    there = {run.text(h): CATEGORIES[c] for h, c in zip(a["holder"], a["category"], strict=True)}
    assert there["w"] == "parameter"
    assert all(end < 0 or begin < end for begin, end in zip(a["begin_seq"], a["end_seq"], strict=True))


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


def test_values_that_a_step_leaves_to_the_next_have_the_line_that_made_them() -> None:
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
