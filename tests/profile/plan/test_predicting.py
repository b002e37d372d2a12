"""Predicted peaks are those that are measured when the plan runs, and gradients do not change by a bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tapegrad.profile.plan.advice import Advice, advice
from tapegrad.profile.plan.lives import peak
from tapegrad.profile.plan.problem import Problem, representative
from tapegrad.profile.plan.step import Step
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, empty, many
from tests.profile.plan import programs
from tests.profile.plan.made import training


@functools.cache
def plain(program: str) -> tuple[Run, Any]:
    return programs.run(program)


def chosen(problem: Problem, name: str, which: slice) -> list[int]:
    return [i for i, c in enumerate(problem.candidates) if c.key[1] == name][which]


ALL, FIRST, LAST, OTHERS = slice(None), slice(1), slice(-1, None), slice(None, None, 2)


@pytest.mark.parametrize(
    ("program", "name", "which"),
    [
        ("transformer", "Attending", ALL),
        ("transformer", "Attending", OTHERS),
        ("transformer", "Attending", LAST),
        ("transformer", "Attending.attend", FIRST),
        ("transformer", "MultiHeadAttention", OTHERS),
        ("transformer", "Dense", ALL),
        ("transformer", "Dense", FIRST),
        ("transformer", "Dense", LAST),
        ("convolutions", "Convolved", ALL),
        ("convolutions", "Convolved", FIRST),
        ("convolutions", "BatchNormalization", OTHERS),
        ("functions", "attend", ALL),
        ("functions", "attend", LAST),
        ("residual", "gated", OTHERS),
        ("residual", "gated", slice(2)),
        ("residual", "gated", slice(1, 3)),
        ("residual", "gated", slice(3)),
        ("residual", "gated", LAST),
        ("accumulated", "Attending", ALL),
        ("accumulated", "Attending", LAST),
    ],
)
def test_the_predicted_peak_is_the_measured_one(program: str, name: str, which: slice) -> None:
    run, gradients = plain(program)
    problem = Problem(run)
    calls = chosen(problem, name, which)
    assert calls
    predicted = problem.outcome(calls)
    assert predicted.peak_bytes < problem.outcome(()).peak_bytes or which in (FIRST, LAST)
    measured, same = programs.run(program, problem.actions(calls))
    assert same == gradients
    found = measured.steps["peak_bytes"][problem.step.number]  # type: ignore[union-attr]
    # what is recomputed is made from small constants, too, which stay meanwhile
    assert abs(predicted.peak_bytes - found) <= 2048, (predicted, found)
    assert measured.steps["restored"][1] > 0 and measured.steps["reruns"][1] == 0


def test_where_kernels_are_cut_otherwise_the_prediction_is_on_the_safe_side() -> None:
    run, gradients = plain("residual")
    problem = Problem(run)
    calls = chosen(problem, "gated", ALL)
    measured, same = programs.run("residual", problem.actions(calls))
    assert same == gradients
    assert 1 <= problem.outcome(calls).peak_bytes / measured.steps["peak_bytes"][1] < 1.06


def test_without_a_plan_the_step_is_what_was_measured() -> None:
    for program in ("transformer", "convolutions", "functions", "accumulated"):
        run, _ = plain(program)
        step = Step(run, 1)
        assert peak(step.lives.values())[0] == run.steps["peak_bytes"][1]
        assert Problem(run).outcome(()).peak_bytes == run.steps["peak_bytes"][1]


def test_offloaded_calls_hold_what_checkpointed_ones_do() -> None:
    run, gradients = plain("transformer")
    problem = Problem(run, bandwidth=1 << 50)
    calls = chosen(problem, "Attending", ALL)
    actions = problem.actions(calls)
    assert {a.do for a in actions} == {"offload"}
    measured, same = programs.run("transformer", actions)
    assert same == gradients
    assert measured.steps["offloads"][1] > 0
    # what has been moved comes back one by one: at most so much
    assert 0.85 < measured.steps["peak_bytes"][1] / problem.outcome(calls).peak_bytes <= 1


def test_a_slow_memory_is_not_offloaded_to() -> None:
    problem = Problem(plain("transformer")[0], bandwidth=1)
    assert {c.do for c in problem.candidates} == {"checkpoint"}


def test_the_training_step_itself_is_no_candidate() -> None:
    names = {c.key[1] for c in Problem(plain("transformer")[0]).candidates}
    assert {"Attending", "Attending.attend", "MultiHeadAttention", "Dense"} <= names
    assert not {"step", "transformer", "run"} & names


def test_calls_that_keep_nothing_are_no_candidates() -> None:
    assert [c for c in Problem(plain("elementwise")[0]).candidates if c.key[1] != "transformer.<locals>.loss"] == []


def test_calls_know_what_they_are_within() -> None:
    problem = Problem(plain("transformer")[0])
    for c in problem.candidates:
        if c.key[1] == "MultiHeadAttention":
            assert {"Attending", "Attending.attend"} <= {problem.candidates[j].key[1] for j in c.within}


def test_figures_of_a_run_made_by_hand() -> None:
    run = training()
    problem = Problem(run)
    assert representative(run) == 2
    assert len(problem.candidates) == 4
    assert problem.outcome(()).peak_bytes == run.peak["bytes"]
    # three values of a block, of which the last is its result if anything reads it, go from its end until its rerun
    assert [c.kept_bytes for c in problem.candidates] == [2 * MIB] * 3 + [3 * MIB]
    assert problem.outcome([0, 1, 2]).peak_bytes == run.peak["bytes"] - 3 * 2 * MIB
    assert problem.outcome([0]).step_ns == problem.step_ns + problem.candidates[0].ns


def test_values_that_come_and_go_in_a_call_do_so_again() -> None:
    run = training(steps=2, blocks=1)
    step = Step(run, 1)
    (site,) = step.sites.values()
    changed, _, kept_bytes, _ = step.change_of(site)
    again = [life for those in changed.values() for life in those[1:]]
    assert kept_bytes == 3 * MIB and all(life.begin[:2] == (site.back_begin, -1) for life in again)
    # 3 values and 3 temporaries, each once more
    assert sorted(life.bytes for life in again) == [MIB // 2] * 3 + [MIB] * 3
    assert all(life.begin < life.end for life in again)


def test_runs_without_training_have_nothing_to_plan() -> None:
    for run in (empty(), many(200)):
        problem = Problem(run)
        assert problem.candidates == [] and problem.outcome(()).peak_bytes == run.peak["bytes"]
        assert advice(run) == Advice()
