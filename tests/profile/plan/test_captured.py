"""Plans of captured steps: those of the program itself, from a run file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tapegrad.errors import BudgetError
from tapegrad.profile.cli import main
from tapegrad.profile.plan.advice import advice
from tapegrad.profile.plan.captured import CapturedStep, captured_step
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.file import save
from tapegrad.tracing.phase import STEPS
from tapegrad.tracing.run import Run
from tests.profile import made_runs
from tests.profile.plan.made import training
from tests.profile.report.test_arenas import recorded, trainer

pytestmark = pytest.mark.sampled(1 / 4)


def replayed(budget: int | None = None, steps: int = 5) -> tuple[Run, Any, Any]:
    x, f = trainer(budget)

    def program() -> None:
        for _ in range(steps):
            f(x)
            STEPS.mark(2)

    return recorded(program)[0], f, x


def answered(run: Run, folder: Path, *args: str) -> Any:
    save(run, folder / "run.sqlite")
    return CliRunner().invoke(main, ["plan", str(folder / "run.sqlite"), *args])


def test_a_plan_is_that_of_the_function() -> None:
    run, f, x = replayed()
    step = captured_step(run)
    assert step is not None and step.name == "train"
    assert [(c.arena_bytes, c.extra) for c in step.pareto()] == [
        (nbytes, pytest.approx(extra)) for nbytes, extra in f.pareto(x)
    ]
    plan = f.plan(x)
    assert step.bound == plan.peak_bytes - plan.arena_bytes
    assert step.planner.plain.layout.nbytes == plan.arena_bytes and len(step.program.steps) == plan.kernels


def test_the_budget_that_is_told_gives_the_peak_that_is_told() -> None:
    run = replayed()[0]  # its input would be alive in the second run, too
    step: Any = captured_step(run)
    least = step.least()
    chosen = step.within(least.peak_bytes)
    again, f, x = replayed(chosen.budget)
    assert again.steps["peak_bytes"][-1] <= chosen.peak_bytes < run.steps["peak_bytes"][-1]
    assert sum(f.plan(x).recomputed.values()) == chosen.again > 0 and f.plan(x).extra == pytest.approx(chosen.extra)
    assert step.within(step.beside + 1024) is None
    assert step.within(step.measured).extra == 0.0
    other: Any = captured_step(again)
    assert (
        other.pareto() and other.planner.plain.layout.nbytes == step.planner.plain.layout.nbytes
    )  # not the fitted one


def test_the_command_answers_for_the_function(tmp_path: Path) -> None:
    run, f, x = replayed()
    least = captured_step(run).least()  # type: ignore[union-attr]
    listed = answered(run, tmp_path, "--pareto")
    assert listed.exit_code == 0 and listed.output.count("budget=") == len(f.pareto(x))
    fits = answered(run, tmp_path, "--budget", "1GiB")
    assert fits.exit_code == 0 and "it fits as it is" in fits.output
    tight = answered(run, tmp_path, "--budget", str(least.peak_bytes))
    assert tight.exit_code == 0 and f"tg.function(train, budget={least.budget})" in tight.output
    told = json.loads(answered(run, tmp_path, "--max-slowdown", "500%", "--json").output)
    assert told["chosen"]["peak_bytes"] == told["smallest_bytes"] == least.peak_bytes
    small = answered(run, tmp_path, "--budget", "10KiB")
    assert (
        small.exit_code == 3 and "the smallest peak is" in small.output and "beside the arena of train" in small.output
    )
    wrong = answered(run, tmp_path, "--pareto", "-o", str(tmp_path / "plan.json"))
    assert wrong.exit_code == 2 and "budget= of tg.function(train)" in wrong.output
    told = advice(run, "run.sqlite")
    assert told.commands == (("less memory for train", "tapegrad plan run.sqlite --pareto"),)
    assert bool(told.cards) == (least.peak_bytes <= 0.9 * captured_step(run).measured)  # type: ignore[union-attr]


def test_eager_steps_are_planned_by_their_calls_and_told_of_functions(tmp_path: Path) -> None:
    run = training()
    assert captured_step(run) is None
    found = answered(run, tmp_path, "--pareto")
    assert found.exit_code == 0 and "predict_peak(step" in found.output


def test_what_is_no_program_is_said_in_one_line(tmp_path: Path) -> None:
    run = made_runs.captured()
    assert CapturedStep(run, 1, 1).planner.plain.layout.nbytes
    with pytest.raises(BudgetError):
        CapturedStep(run, 1, 1).planner.fit(1)
    for table, column, value in (("uses", "task", 3), ("uses", "how", 1), ("uses", "how", 7), ("tasks", "program", 1)):
        wrong = copy.deepcopy(run)
        values = wrong.tables[table][column]
        values[:] = [value] * len(values)
        if table == "tasks":
            wrong.uses["how"][:] = [0] * wrong.count("uses")
        with pytest.raises(RunFileError):
            CapturedStep(wrong, 1, 1)
        assert answered(wrong, tmp_path, "--pareto").exit_code == 2
