"""``tapegrad plan --ranks``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapegrad.profile.cli import main
from tapegrad.tracing.file import save
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, Builder
from tests.profile.plan.made import training as without_communication
from tests.profile.plan.ranks.communicating import gradients, steps, training

LINK = "1GB/s,10us"
PROGRAM = """
import tapegrad as tg

w = [tg.Variable(tg.ones((300, 300))) for _ in range(4)]
x = tg.ones((8, 300))
for _ in range(4):
    with tg.distributed.GradientTape(bucket_bytes=1) as tape:
        y = x
        for v in w:
            y = tg.tanh(y @ v)
        loss = tg.distributed.mean(y)
    gradients = tape.gradient(loss, w)
    tg.optim.SGD(0.1).apply(gradients, w)
    tg.distributed.all_reduce(loss)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def plan(*args: str, run: Run | None = None) -> Result:
    save(training() if run is None else run, "run.sqlite")
    return CliRunner().invoke(main, ["plan", "run.sqlite", *args])


def answer(*args: str, run: Run | None = None) -> dict[str, Any]:
    result = plan(*args, "--json", run=run)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_figures_are_the_closed_forms() -> None:
    found = answer("--ranks", "4", "--link", LINK)
    one, four = (6e4 + 2 * 3 / 4 * n * MIB for n in (1, 4))  # ns
    loss = 3 * (1e4 + 4)
    assert one + 5e6 < 7e6  # the first one hides
    assert [line["line"] for line in found["collectives"]] == [12, 14]
    buckets, figure = found["collectives"]
    assert buckets["predicted_ns"] == pytest.approx(one + four, abs=2) and buckets["bytes"] == 5 * MIB
    assert buckets["predicted_exposed_ns"] == pytest.approx(7e6 + four - 8e6, abs=2)
    assert buckets["predicted_hidden_ns"] == pytest.approx(one + 1e6, abs=2)
    assert figure["predicted_exposed_ns"] == figure["predicted_ns"] == pytest.approx(loss, abs=2)
    step = 1e7 + four - 1e6 + loss
    assert found["measured_step_ns"] == found["computation_ns"] == 10_000_000
    assert found["predicted"]["predicted_step_ns"] == pytest.approx(step, abs=2)
    assert found["predicted"]["predicted_efficiency"] == pytest.approx(1e7 / step, abs=1e-4)
    assert [row["ranks"] for row in found["by_ranks"]] == [1, 2, 4] and found["by_ranks"][-1] == found["predicted"]
    assert found["by_ranks"][0]["predicted_step_ns"] == 10_000_000
    assert found["links"] == [{"bytes_per_second": 1e9, "latency_ns": pytest.approx(1e4)}]


def test_text() -> None:
    result = plan("--ranks", "4", "--link", LINK)
    assert result.exit_code == 0 and result.stderr == "", result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Step on 1 rank 10.0 ms; predicted on 4 ranks 15.4 ms, efficiency 65.0 %"
    assert "Predicted: time    hidden   exposed" in lines[2]
    assert lines[4].split() == [
        "model.py:12",
        "all_reduce",
        "2",
        "5.00",
        "MiB",
        "7.98",
        "ms",
        "2.63",
        "ms",
        "5.35",
        "ms",
    ]
    assert lines[5].split() == ["model.py:14", "all_reduce", "1", "4", "B", "0.03", "ms", "0", "ms", "0.03", "ms"]
    assert lines[7].split() == ["all", "3", "5.00", "MiB", "8.01", "ms", "2.63", "ms", "5.38", "ms"]
    assert lines[9].split("  ")[1:] == ["Predicted step", "Predicted exposed", "Predicted efficiency"]
    assert [line.split()[0] for line in lines[10:13]] == ["1", "2", "4"] and lines[12].split()[1:3] == ["15.4", "ms"]
    assumed = " ".join(result.stdout.split("Assumed: ")[1].split())
    assert assumed.startswith("each rank computes what the recorded one did") and "a GPU" not in assumed
    assert "takes it as long as the recorded process" in assumed
    assert all(line == line.rstrip() and len(line) <= 80 for line in lines)
    assert not list(Path().glob("plan*"))


def test_better_buckets_are_named_where_they_are_worth_it() -> None:
    found = answer("--ranks", "64", "--link", "100GB/s,100us")
    assert found["best_bucket_bytes"] == 8 * MIB == found["by_bucket_bytes"][0]["bucket_bytes"]
    text = plan("--ranks", "64", "--link", "100GB/s,100us").stdout
    assert "Best bucket_bytes: predicted 8.00 MiB, step " in text
    assert answer("--ranks", "64", "--link", "1GB/s,0us")["best_bucket_bytes"] is None
    assert "Larger buckets: predicted no faster." in plan("--ranks", "64", "--link", "1GB/s,0us").stdout


def test_nodes() -> None:
    args = ["--ranks", "16", "--link", LINK]
    slow, fast = answer(*args), answer(*args, "--node-link", "100GB/s,1us", "--ranks-per-node", "8")
    assert fast["predicted"] == slow["predicted"] and len(fast["links"]) == 2
    within = {row["ranks"]: row["predicted_exposed_ns"] for row in fast["by_ranks"]}
    outside = {row["ranks"]: row["predicted_exposed_ns"] for row in slow["by_ranks"]}
    assert within[8] < outside[8] and within[16] == outside[16]


def test_one_rank_exposes_nothing() -> None:
    found = answer("--ranks", "1", "--link", LINK)
    assert found["predicted"]["predicted_exposed_ns"] == 0 and found["predicted"]["predicted_efficiency"] == 1.0
    assert "predicted on 1 rank 10.0 ms" in plan("--ranks", "1", "--link", LINK).stdout


def test_ranks_that_wait_in_a_sum_do_not_say_how_long_they_add() -> None:
    run = training()
    run.communication["ranks"] = [2] * run.count("communication")
    found = answer("--ranks", "4", "--link", LINK, run=run)
    assert found["measured_ranks"] == 2 and "takes no time" in found["assumed"]
    assert plan("--ranks", "4", "--link", LINK, run=run).stdout.startswith("Step on 2 ranks 10.0 ms; predicted on 4 ")


def test_a_gpu_is_assumed_to_keep_up() -> None:
    run = training()
    run.meta["device"]["name"] = "cuda:0"
    assert "a GPU has done its work" in answer("--ranks", "2", "--link", LINK, run=run)["assumed"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "4"], "--ranks and --link go together"),
        (["--link", LINK, "--pareto"], "--ranks and --link go together"),
        (["--ranks", "4", "--link", "fast"], "--link: 'fast' is no link: it is bytes or bits a second"),
        (["--ranks", "4", "--link", LINK, "--node-link", "5us", "--ranks-per-node", "2"], "--node-link: '5us' is no"),
        (["--ranks", "4", "--link", LINK, "--node-link", LINK], "--node-link and --ranks-per-node go together"),
        (["--ranks", "4", "--link", LINK, "--ranks-per-node", "2"], "--node-link and --ranks-per-node go together"),
        (["--pareto", "--node-link", LINK, "--ranks-per-node", "2"], "go together, and with --ranks"),
        (["--ranks", "0", "--link", LINK], "0 is not in the range"),
        (["--ranks", "4", "--link", LINK, "--pareto"], "say what to plan for"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    result = plan(*args)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_a_run_without_communication() -> None:
    result = plan("--ranks", "4", "--link", LINK, run=without_communication())
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert "the run has no communication" in result.stderr and "tg.distributed.GradientTape" in result.stderr


def test_hostile_names_do_nothing_to_a_terminal() -> None:
    def fill(b: Builder, number: int, begin: int) -> None:
        gradients(b, number, begin)
        b.collective("gather\x1b[2J", begin + 9500, begin + 9500, file="/a/[b]\x1b]0;title\x07.py", ranks=0, number=77)
        b.collective("scatter", begin + 9600, begin + 9600, ranks=0, number=78)

    result = plan("--ranks", "4", "--link", LINK, run=steps(4, fill))
    assert result.exit_code == 0, result.output
    assert not any(c in result.stdout for c in "\x1b\x07\u202e")


def test_a_program_of_one_process_is_recorded_and_predicted() -> None:
    Path("train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "tapegrad", "profile", "-o", "own.sqlite", "train.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = CliRunner().invoke(main, ["plan", "own.sqlite", "--ranks", "64", "--link", "25GB/s,5us", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    gradients_of, loss = sorted(found["collectives"], key=lambda line: line["line"])
    assert [(c["calls"], c["bytes"], c["line"]) for c in (gradients_of, loss)] == [(4, 4 * 360_000, 12), (1, 4, 14)]
    assert gradients_of["predicted_ns"] == pytest.approx(4 * (126 * 5000 + 126 / 64 * 360_000 / 25), rel=1e-6)
    assert loss["predicted_exposed_ns"] == pytest.approx(63 * (5000 + 4 / 25), rel=1e-6)
    assert found["predicted"]["predicted_step_ns"] > found["computation_ns"] > 0
    sizes = [row["bucket_bytes"] for row in found["by_bucket_bytes"]]
    assert sizes[0] == 1 << 19 and sizes[-1] >= 4 * 1_080_000  # two of them, up to all four
