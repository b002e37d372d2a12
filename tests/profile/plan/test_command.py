"""``tapegrad plan``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tapegrad.profile.cli import main
from tapegrad.profile.plan.advice import advice
from tapegrad.profile.plan.file import load
from tapegrad.profile.plan.problem import Problem, held_bytes
from tapegrad.profile.plan.text import verified
from tapegrad.sizes import format_bytes
from tapegrad.tracing.file import save
from tapegrad.tracing.names import CATEGORIES, KINDS
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, empty
from tests.profile.plan.made import training
from tests.profile.plan.test_predicting import plain


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def plan(*args: str, run: Run | None = None) -> Result:
    save(training() if run is None else run, "run.sqlite")
    return CliRunner().invoke(main, ["plan", "run.sqlite", *args])


def test_a_budget_is_planned_for(here: Path) -> None:
    result = plan("--budget", "12MiB")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    out = result.stdout
    assert out.startswith("Budget 12.00 MiB · measured now 16.00 MiB")
    assert "smallest reachable 10.00 MiB" in out
    assert "★ checkpoint Block, 2 of 4 calls (0-1)   model.py:40" in out
    assert "predicted peak  12.00 MiB   -4.00 MiB" in out
    assert "2 calls run again" in out and "the peak stays at  step 2, backward, Block() model.py:42" in out
    assert "Block x2" in out and "Wrote plan.json" in out
    assert "tapegrad profile --plan plan.json train.py --batch 64" in out
    assert 'tg.memory.use_plan("plan.json")' in out
    assert all(len(line) <= 80 for line in out.splitlines()[1:])
    found = load("plan.json")
    assert found.predicted.peak_bytes == 12 * MIB and found.measured_bytes == 16 * MIB
    assert [(a.name, a.ordinals) for a in found.actions] == [("Block", (0, 1))]
    assert found.asked["budget_bytes"] == 12 * MIB and found.solver == "milp"
    assert [p.peak_bytes for p in found.pareto] == [(16 - 2 * i) * MIB for i in range(4)]


def test_a_plan_is_not_overwritten_unasked(here: Path) -> None:
    (here / "plan.json").write_text("mine")
    result = plan("--budget", "12MiB")
    assert result.exit_code == 2 and "plan.json exists" in result.stderr
    assert (here / "plan.json").read_text() == "mine"
    assert plan("--budget", "12MiB", "-f").exit_code == 0
    assert plan("--budget", "12MiB", "-o", "other.json").exit_code == 0
    assert load("plan.json").actions == load("other.json").actions


def test_a_budget_that_cannot_be_kept_is_answered_with_the_smallest(here: Path) -> None:
    held = held_bytes(training())
    result = plan("--budget", str(held - 1))
    assert result.exit_code == 3 and result.stdout == ""
    assert held < 10 * MIB
    assert f"no peak is below {format_bytes(held)} ({held} bytes): so much is alive" in result.stderr
    assert not (here / "plan.json").exists()


def test_a_budget_below_what_calls_reach_is_one_for_the_whole_program(here: Path) -> None:
    held = held_bytes(training())
    assert plan("--budget", str(10 * MIB)).exit_code == 0 and load("plan.json").memory_budget is None
    for nbytes in (10 * MIB - 1, held):
        result = plan("--budget", str(nbytes), "-f")
        assert result.exit_code == 0, result.stderr
        assert f"under tg.memory_budget({nbytes})" in result.stdout
        assert "Checkpointing calls does not reach it." in result.stdout
        assert load("plan.json").memory_budget == nbytes and load("plan.json").smallest_bytes == held


def test_the_smaller_of_both_minima_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapegrad.profile.plan.problem.held_bytes", lambda run: 11 * MIB)
    result = plan("--budget", "9MiB")
    assert result.exit_code == 3 and "no peak is below 10.00 MiB" in result.stderr
    assert "everything that helps is checkpointed then" in result.stderr


@pytest.mark.parametrize(("kind", "code", "complete"), [
    ("finished", 0, True), ("exit", 0, True), ("exit", 1, False), ("oom", 1, False), ("x\x1b[2J", 0, False),
])  # fmt: skip
def test_a_run_that_did_not_end_well_is_incomplete(here: Path, kind: str, code: int, complete: bool) -> None:
    run = training()
    run.meta["outcome"] = {"kind": kind, "code": code, "message": ""}
    for args in (["--pareto"], ["--batch", "32"]):
        result = plan(*args, run=run)
        assert result.exit_code == 0 and "\x1b" not in result.stderr
        assert ("the run is incomplete" in result.stderr) == (not complete)
    assert plan("--budget", "12MiB", run=training()).exit_code == 0
    assert bool(verified(run, load("plan.json"))) == complete


def test_offloaded_calls_are_called_so(here: Path) -> None:
    result = plan("--budget", "12MiB", "--bandwidth", "1TiB")
    assert result.exit_code == 0 and "offload Block, 2 of 4 calls" in result.stdout
    assert "2 calls offloaded)" in result.stdout and "run again" not in result.stdout
    assert "Block x2 offloaded" in result.stdout and "Calls" in result.stdout and "Checkpointed" not in result.stdout


def test_advice_names_the_run_and_the_last_resort(here: Path) -> None:
    assert advice(training(), "my run.sqlite").commands[-1][1] == "tapegrad plan 'my run.sqlite' --pareto"
    assert advice(training()).commands[-1][1] == "tapegrad plan RUN --pareto"
    run = training()
    run.calls["kind"] = [KINDS.index("scope")] * run.count("calls")  # no calls to choose from
    ((what, command),) = advice(run).commands
    assert "try a budget" in what and command == f"tapegrad profile --budget {run.peak['bytes'] // 2} PROGRAM"
    run.allocs["category"] = [CATEGORIES.index("user")] * run.count("allocs")  # which no budget evicts
    assert advice(run).commands == ()


def test_what_fits_needs_no_plan(here: Path) -> None:
    result = plan("--budget", "1GiB")
    assert result.exit_code == 0 and "it fits as it is" in result.stdout
    assert load("plan.json").actions == []


def test_a_share_of_the_device(here: Path) -> None:
    run = training()
    run.meta["device"]["total_bytes"] = 16 * MIB
    assert plan("--budget", "75%", run=run).exit_code == 0
    assert load("plan.json").asked["budget_bytes"] == 12 * MIB
    run.meta["device"]["total_bytes"] = None
    result = plan("--budget", "75%", "-f", run=run)
    assert result.exit_code == 2 and "does not say how large the device is" in result.stderr


def test_a_slowdown_bounds_the_time(here: Path) -> None:
    result = plan("--max-slowdown", "20%")
    assert result.exit_code == 0 and result.stdout.startswith("At most 20 % slower")
    found = load("plan.json")
    assert found.predicted.step_ns is not None
    assert found.predicted.step_ns <= 1.2 * found.measured_ns and found.predicted.peak_bytes < found.measured_bytes
    assert plan("--max-slowdown", "0%", "-f").exit_code == 0
    assert load("plan.json").actions == []
    result = plan("--max-slowdown", "0%", "-f")
    assert "★ nothing helps within that time" in result.stdout and "\n\n\n" not in result.stdout


def test_json_is_the_plan(here: Path) -> None:
    result = plan("--budget", "12MiB", "--json")
    assert result.exit_code == 0 and not (here / "plan.json").exists()
    found = json.loads(result.stdout)
    assert found["format"] == "tapegrad.plan" and found["predicted"]["peak_bytes"] == 12 * MIB
    assert plan("--budget", "12MiB", "--json", "-o", "p.json").exit_code == 0
    assert json.loads((here / "p.json").read_text()) == found


def test_the_list_alone(here: Path) -> None:
    result = plan("--pareto")
    assert result.exit_code == 0 and not (here / "plan.json").exists()
    assert "Block x3" in result.stdout and "it fits" not in result.stdout and "Wrote" not in result.stdout
    assert "\n\n\n" not in result.stdout and "★" not in result.stdout and "○" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "say what to plan for"),
        (["--budget", "1GiB", "--pareto"], "say what to plan for"),
        (["--budget", "lots"], "a size is a positive whole number"),
        (["--max-slowdown", "10"], "such as 10%"),
        (["--max-slowdown", "25"], "such as 25%"),
        (["--max-slowdown", "-10%"], "such as 10%"),
        (["--budget", "1GiB", "--bandwidth", "fast"], "--bandwidth: a size"),
        (["--budget", "1GiB", "--batch-now", "3"], "go with --batch"),
    ],
)
def test_wrong_usage(here: Path, args: list[str], message: str) -> None:
    result = plan(*args)
    assert result.exit_code == 2 and message in result.stderr


def test_a_run_that_cannot_be_read(here: Path) -> None:
    (here / "bad.sqlite").write_bytes(b"\x1f\x8bxx")
    for name in ("bad.sqlite", "none.sqlite"):
        result = CliRunner().invoke(main, ["plan", name, "--pareto"])
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1


def test_programs_without_calls_get_a_budget(here: Path) -> None:
    run, _ = plain("elementwise")
    peak = run.peak["bytes"]
    if Problem(run).candidates:
        pytest.skip("the program's function keeps values after all")
    result = plan("--budget", str(peak - 1), run=run)
    assert result.exit_code == 0, result.output
    assert f"under tg.memory_budget({peak - 1})" in result.stdout and "not known" in result.stdout
    found = load("plan.json")
    assert found.memory_budget == peak - 1 and found.predicted.step_ns is None
    result = plan("--budget", "1KiB", "-f", run=run)
    assert result.exit_code == 3 and "is not reachable" in result.stderr
    assert plan("--pareto", run=empty()).exit_code == 3


def test_another_batch(here: Path) -> None:
    result = plan("--batch", "32")
    assert result.exit_code == 0, result.output
    assert "Batch 16 now: peak 16.00 MiB" in result.stdout
    assert "Batch 32: predicted peak 31.00 MiB (+15.00 MiB), step at most " in result.stdout
    assert all(line == line.rstrip() and len(line) <= 80 for line in result.stdout.splitlines())
    assert "the largest batch is" in result.stdout and "Assumed: values with a first dimension of 16" in result.stdout
    result = plan("--batch", "32", "--budget", "20MiB")
    assert result.exit_code == 3 and "Does not fit 20.00 MiB; the largest batch is 20" in result.stdout
    result = plan("--batch", "8", "--json")
    assert json.loads(result.stdout)["peak_bytes"] == (16 * MIB + MIB) // 2
    save(training(batch=32), "other.sqlite")
    assert "step at" not in plan("--batch", "64", "--and", "other.sqlite").stdout
    result = plan("--batch", "64", "--and", "other.sqlite", "--json")
    assert result.exit_code == 0 and "a + b * batch" in json.loads(result.stdout)["assumed"]
    result = plan("--batch", "64", "--batch-now", "5")
    assert result.exit_code == 1 and "first dimension of 5" in result.stderr


def test_hostile_names_do_nothing_to_a_terminal(here: Path) -> None:
    run = training(name="B\x1b[31m[red]x[/red]\u202e", file="/a/[b]\x1b]0;title\x07.py")
    run.meta["argv"] = ["train.py", "; rm -rf ~ \x1b[2J"]
    result = plan("--budget", "12MiB", run=run)
    assert result.exit_code == 0
    assert not any(c in result.stdout for c in "\x1b\x07\u202e")
    assert "[red]x[/red]" in result.stdout and "'; rm -rf ~ " in result.stdout
    assert load("plan.json").actions[0].name == "B\x1b[31m[red]x[/red]\u202e"


def test_command_lines_that_name_a_solver_still_work(here: Path) -> None:
    for solver in ("milp", "greedy", "auto"):
        assert plan("--budget", "12MiB", "--solver", solver, "-f").exit_code == 0
        assert load("plan.json").predicted.peak_bytes == 12 * MIB
