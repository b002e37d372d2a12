"""`tapegrad bench`: its workloads, what it says of them, and that wrong gradients do not pass."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tapegrad as tg
from tapegrad.errors import BudgetError
from tapegrad.profile import bench_command, bench_run, bench_workloads
from tapegrad.profile.bench_run import WAYS, Way
from tapegrad.profile.bench_workloads import Workload, Wrap
from tapegrad.profile.cli import main


def chain(quick: bool) -> Workload:
    """Small: a few parts with weights."""
    w = tg.Variable(tg.random.normal((32, 32)) / 6, name="w")
    x = tg.random.normal((512, 32))

    def loss(wrap: Wrap) -> tg.Tensor:
        y = x
        for _ in range(6):
            y = wrap(lambda y: tg.tanh(tg.tanh(y @ w) @ w))(y)
        return tg.mean(y)

    return Workload("chain", "small", [w], loss)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_workloads, "ALL", (chain,))


def bench(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", "--quick", *arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("make", bench_workloads.ALL, ids=lambda make: make.__name__)
def test_the_workloads_fit_into_half_with_the_same_bits(make: Any) -> None:
    tg.random.seed(0)
    work = make(True)
    assert work.name == make.__name__ and work.size
    rounds: list[int] = []
    plain, checkpoint, budget = bench_run.measure(work, 1, rounds.append)
    assert rounds == [1]
    assert (plain.way, checkpoint.way, budget.way) == WAYS
    assert plain.identical and checkpoint.identical and budget.identical
    assert plain.base_bytes < checkpoint.peak_bytes < 0.8 * plain.peak_bytes
    assert budget.error is None and budget.peak_bytes <= budget.budget_bytes < plain.peak_bytes
    assert budget.budget_bytes == plain.base_bytes + (plain.peak_bytes - plain.base_bytes) // 2
    assert plain.reruns == plain.evictions == 0 and checkpoint.reruns > 1 and budget.evictions > 0
    with tg.GradientTape() as tape:
        loss = work.loss(lambda f: f)
    assert all(float(tg.max(tg.abs(g))) > 0 for g in tape.gradient(loss, work.variables))


def test_the_same_seed_gives_the_same_work() -> None:
    def values() -> list[list]:
        tg.random.seed(0)
        return [v.numpy().tolist() for v in bench_workloads.lstm(True).variables]

    assert values() == values()


def test_public_names_only() -> None:
    tree = ast.parse(Path(bench_workloads.__file__).read_text())
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in imports if "tapegrad" in line] == ["import tapegrad as tg", "from tapegrad import nn"]


@pytest.mark.usefixtures("small")
def test_the_table() -> None:
    result = bench()
    lines = result.stdout.splitlines()
    assert lines[0] == f"tapegrad {tg.__version__} on cpu" and lines[-1] == "chain: small"
    assert lines[1].split("  ")[0] == "workload" and lines[1].endswith("gradients")
    assert [line.split()[-1] for line in lines[2:5]] == ["identical"] * 3
    assert "100 %" in lines[2] and " 1.00 " in lines[2] and lines[4].startswith("          budget 50%")
    assert max(map(len, lines)) <= 80 and "\x1b" not in result.output
    assert result.stderr == "chain ...\n"


@pytest.mark.usefixtures("small")
def test_json_and_markdown() -> None:
    found = json.loads(bench("--json", "--device", "cpu").stdout)
    assert found["identical"] is True and found["device"] == "cpu" and found["quick"] is True
    [work] = found["workloads"]
    plain, checkpoint, budget = work["ways"]
    assert [way["way"] for way in work["ways"]] == list(WAYS) and plain["times_plain"] == 1.0
    for way in work["ways"]:
        assert type(way["peak_bytes"]) is type(way["step_ns"]) is type(way["reruns"]) is int
    assert checkpoint["reruns"] == 6 and budget["peak_bytes"] <= budget["budget_bytes"]
    table = bench("--md").stdout.splitlines()
    assert table[0].startswith("| workload | way | peak |") and set(table[1]) == set("| -:")
    assert table[2].startswith("| chain | plain | ") and table[3].startswith("|  | checkpoint | ")
    assert len({line.count("|") for line in table[:5]}) == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arguments", [(), ("--json",), ("--md",)])
def test_different_gradients_are_said_and_exit_with_1(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = bench_run._step

    def slightly_wrong(work: Workload, way: Way) -> list:
        found = honest(work, way)
        return [g * (1 + 2.0**-23) for g in found] if way.way == "checkpoint" else found

    monkeypatch.setattr(bench_run, "_step", slightly_wrong)
    result = bench(*arguments, code=1)
    assert result.stderr.endswith("gradients differ\n")
    assert '"identical": false' in result.stdout if arguments == ("--json",) else "DIFFER" in result.stdout


@pytest.mark.usefixtures("small")
def test_a_budget_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, size: int) -> None:
            raise BudgetError("no room\nat all")

    monkeypatch.setattr(tg, "memory_budget", Full)
    assert "budget 50%  does not fit" in bench().stdout
    assert json.loads(bench("--json").stdout)["workloads"][0]["ways"][2]["error"] == "no room"
    assert "| budget 50% | does not fit |" in bench("--md").stdout


def test_a_ratio_is_that_of_the_medians_beside_it() -> None:
    assert Way("checkpoint", step_ns=[30, 80, 90]).times(Way("plain", step_ns=[20, 40, 60])) == 2.0


@pytest.mark.usefixtures("small")
def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_terminal(self: Any, name: str, rounds: int) -> None:
        self.name, self.rounds, self.moves = name, 2, True

    monkeypatch.setattr(bench_command._Progress, "__init__", on_terminal)
    err = bench().stderr
    assert "\rchain: round 1 of 2" in err and err.endswith("\r") and "\n" not in err


def test_bad_options() -> None:
    for arguments, said in ((["--json", "--md"], "exclude each other"), (["--device", "nope"], "devices are 'cpu'")):
        result = CliRunner().invoke(main, ["bench", *arguments])
        assert result.exit_code == (2 if "--md" in arguments else 1)
        assert said in result.stderr and result.stdout == "" and "Traceback" not in result.stderr
