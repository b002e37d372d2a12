"""What lies in the arenas of captured programs: a replay notes one event, and the report tells what was there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad.profile.recorder import Session
from tapegrad.profile.report.arenas import Arena, arenas
from tapegrad.profile.report.outputs import View
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tests.profile import made_runs
from tests.profile.made_runs import MIB
from tests.profile.report.test_text import printed

META: dict[str, Any] = made_runs.empty().meta


def data(*shape: int, seed: int = 0) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def recorded(program: Callable[[], object]) -> tuple[Run, Session]:
    session = Session()
    session.start()
    try:
        program()
    finally:
        session.stop()
    return session.run(META), session


def trainer(budget: int | None = None) -> tuple[tg.Tensor, Any]:
    ws = [tg.Variable(data(96, 96, seed=i) * 0.1) for i in range(8)]

    def train(x):
        with tg.GradientTape() as tape:
            h = x
            for w in ws:
                h = tg.tanh(h @ w)
            loss = tg.mean(tg.square(h))
        for w, g in zip(ws, tape.gradient(loss, ws), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    return data(128, 96), tg.function(train, budget=budget)


def test_figures_of_a_run_made_by_hand() -> None:
    (arena,) = arenas(made_runs.captured())
    assert (arena.program, arena.replays, arena.bytes, arena.tasks) == ("train", 2, 7 * MIB, 4)
    assert (arena.peak_bytes, arena.at, arena.phase, arena.op) == (6 * MIB, 2, "backward", "tanh, add")
    assert [(g.key, g.bytes, g.count) for g in arena.categories] == [
        ("activation", 3 * MIB, 2), ("rematerialized", 3 * MIB, 1)
    ]  # fmt: skip
    assert [(g.key, g.bytes, g.op) for g in arena.lines] == [
        ("train.py:12", 3 * MIB, "tanh, add"), ("train.py:11", 2 * MIB, "matmul"), ("train.py:10", MIB, "tanh, add")
    ]  # fmt: skip
    assert sum(change for *_, change in arena.curve) == 0


def test_a_replay_is_one_event_and_its_arena_is_told_by_category_and_line() -> None:
    x, f = trainer()
    run, session = recorded(lambda: [f(x) for _ in range(6)])
    assert f.stats.replays == 4
    # the second call is replayed, too; each replay is one event, whatever the program's size
    assert run.count("replays") == 5 and run.count("programs") == 2
    (arena,) = arenas(run)
    assert arena.program == "train"
    assert arena.replays == 5 and 0 < arena.peak_bytes <= arena.bytes
    for groups in (arena.categories, arena.lines):
        assert sum(g.bytes for g in groups) == arena.peak_bytes
    assert {g.key for g in arena.categories} <= set(CATEGORIES)
    assert arena.categories[0].key == "activation"
    mine = [g for g in arena.lines if re.fullmatch(r".*test_arenas\.py:\d+", g.key)]
    assert mine and "tanh" in mine[0].op
    alloc = run.replays["alloc"][-1]
    assert run.text(run.allocs["holder"][alloc]) == "the arena of a captured function"
    assert arena.bytes <= run.allocs["bytes"][alloc] < arena.bytes + 1024


def test_what_a_budget_makes_again_is_seen() -> None:
    x, f = trainer()
    f(x)
    budget = f.plan(x).peak_bytes - f.plan(x).arena_bytes + f.pareto(x)[0][0]
    x, f = trainer(budget)
    run, _ = recorded(lambda: [f(x) for _ in range(4)])
    arena, _ = arenas(run)  # that of the replay which an eager run verifies, and the one from then on
    assert arena.bytes + 8 * 96 * 96 * 4 <= budget
    plain = run.programs["plain"][run.replays["program"][0]]
    works = lambda program: sum(p == program for p in run.tasks["program"])
    assert works(plain) < works(run.replays["program"][0])
    made_again = [i for i, c in enumerate(run.slots["category"]) if CATEGORIES[c] == "rematerialized"]
    assert made_again


def test_forward_and_backward_of_a_call_on_a_tape_have_arenas_of_their_own() -> None:
    w = tg.Variable(data(96, 96))
    f = tg.function(lambda x: tg.sum(tg.tanh(tg.tanh(x @ w) @ w)))

    def step() -> object:
        with tg.GradientTape() as tape:
            loss = f(x)
        return tape.gradient(loss, w)

    x = data(64, 96)
    run, _ = recorded(lambda: [step() for _ in range(3)])
    names = {a.program.rpartition(", ")[2] for a in arenas(run)}
    assert names == {"forward", "backward"}


def test_an_eager_run_has_none_and_a_function_that_died_is_told() -> None:
    x, _ = trainer()
    run, _ = recorded(lambda: tg.sum(tg.tanh(x)))
    assert arenas(run) == [] and "Arena" not in printed(run)

    def short() -> None:
        x, f = trainer()
        for _ in range(3):
            f(x)

    assert len(arenas(recorded(short)[0])) == 1


def test_without_a_profile_replays_note_nothing() -> None:
    x, f = trainer()
    with tg.measure():
        for _ in range(4):
            f(x)
    run, session = recorded(lambda: None)
    assert not run.count("programs") and not run.count("replays")


def test_the_tables_are_in_the_summary_and_in_the_json() -> None:
    run = made_runs.captured()
    out = printed(run)
    assert "Arena of train: 7.00 MiB, 2 replays" in out
    assert "most of it, 6.00 MiB, is in use at task 3 of 4, tanh, add, train.py:12, backward" in out
    assert re.search(r"^rematerialized  3\.00 MiB  50\.0 %       1$", out, re.M)
    assert re.search(r"^train\.py:12 +tanh, add  3\.00 MiB  50\.0 %       1$", out, re.M)
    view = json.loads(json.dumps(View("peak", 0, "category", "bytes", 0, True).to_json(run)))
    assert Arena(**view["arenas"][0]).peak_bytes == 6 * MIB
