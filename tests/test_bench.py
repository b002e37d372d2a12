"""The scripts of bench/ that run without a device and without peers: they do what they say, and keep no figures."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shim.host import why_no_compiler

BENCH = Path(__file__).resolve().parents[1] / "bench"
SCRIPTS = sorted(path.stem for path in BENCH.glob("gpu_*.py") if "__main__" in path.read_text())
SCRIPTS.remove("gpu_counts")  # which never asks for a device (see test_gpu_counts)

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


def run(*words: object) -> str:
    """What a script prints.  An environment of its own: neither the caller's device nor a peer decides the outcome."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD_DEVICE", "PYTEST", "PYTHONPATH"))}
    command = [sys.executable, *map(str, words)]
    found = subprocess.run(command, cwd=BENCH.parent, env=clean, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def results() -> set[str]:
    return {path.name for path in (BENCH / "results").glob("*")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gpu_script_runs_dry_and_keeps_nothing(name):
    before = results()
    said = run(BENCH / f"{name}.py", "--dry-run")
    if name == "gpu_kernels":  # which prints no figures
        assert "declared kernels have run" in said
    else:
        assert "measured: False" in said and "no figures of a GPU" in said
    assert results() == before


def test_rates_of_convolutions_are_measured_with_cudnn_and_without():
    said = run(BENCH / "gpu_rates.py", "--dry-run", "--only", "convolution 3x3, float32")
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [sorted(row["seconds"]) for row in rows] == [["own kernels", "tapegrad"]] * 2, said


PLANTED = """
import os, sys
sys.path.insert(0, "bench")
import common, gpu_common
options = gpu_common.parser("", seconds=60, rounds=1).parse_args(["--dry-run"])
run = gpu_common.begin(options)

class Case:
    def __init__(self, name):
        self.name = name

def measure(case):
    if case.name == "raises":
        raise ValueError("planted")
    if case.name == "disagrees":
        common.must_agree("a peer", "a result", [1.0], [2.0], 1e-3)
    if case.name == "killed":
        os.kill(os.getpid(), 9)
    return {"case": case.name, "seconds": {"tapegrad": 1.0}}

names = ["first", "raises", "second", "disagrees", "third", "killed", "fourth"]
gpu_common.end(gpu_common.each(run, "planted", map(Case, names), measure))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed")
def test_a_case_that_fails_or_is_killed_costs_no_other_figure(tmp_path):
    """Each row is written when its case is done; a script that is started anew goes on after a case that killed it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD_DEVICE", "PYTEST", "PYTHONPATH"))}
    clean["TAPEGRAD_RESULTS"] = str(tmp_path)
    codes = [
        subprocess.run([sys.executable, "-c", PLANTED], cwd=BENCH.parent, env=clean, capture_output=True, timeout=120)
        for _ in range(2)
    ]
    assert codes[0].returncode == -9 and codes[1].returncode == 1
    assert b"failed: raises, disagrees, killed" in codes[1].stderr
    rows = [json.loads(line) for line in (tmp_path / "planted.jsonl").read_text().splitlines()]
    ended = {row["case"]: row for row in rows if not row.get("begun")}
    assert [name for name, row in ended.items() if "seconds" in row] == ["first", "second", "third", "fourth"]
    assert "ValueError: planted" in ended["raises"]["error"] and "differs by" in ended["disagrees"]["error"]
    assert all(row["measured"] is False for row in ended.values())


def test_fusion_counts(tmp_path):
    said = run(BENCH / "fusion.py", "--quick", "--detail", "--json", tmp_path / "counts.json")
    assert "lower bound" in said and "arrays saved" in said and "gelu', expand bias'" in said
    found = json.loads((tmp_path / "counts.json").read_text())
    for name, count in found["counts"].items():
        assert count["kernels"] == len(count["detail"]), name
        assert count["bytes"] == sum(read + written for _, read, written in count["detail"]), name


def test_budgets_are_kept():
    said = run(BENCH / "budget.py", "--scale", "quick", "--rounds", "1", "--workloads", "mlp,resnet", "--fractions",
               "0.5,0.01", "--threads", "1")  # fmt: skip
    assert "4 budgets: peaks within them and monotone, gradients equal to the bit" in said
    assert said.count("0.01: infeasible, least 0.") == 4, said  # a line while it runs and one in the table


def test_what_a_broken_budget_is_told(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    budget = importlib.import_module("budget")
    row = lambda nbytes, peak, **what: budget.Row(**{
        **dict.fromkeys(budget.Row.__dataclass_fields__, 0), "workload": "w", "budget": nbytes, "peak": peak,
        "within": True, "equal": True, "least": None, **what,
    })  # fmt: skip
    assert budget.failures([row(3, 3), row(2, 2), row(1, 1, least=True)]) == []
    assert "a peak of 9 bytes" in budget.failures([row(3, 9, within=False)])[0]
    assert "other gradients" in budget.failures([row(3, 3, equal=False)])[0]
    assert "smaller budget" in budget.failures([row(3, 3, least=False)])[0]
    assert "2 bytes peak at 2, 3 at 1" in budget.failures([row(3, 1), row(2, 2)])[0]


def test_the_runbook_ends_within_nine_minutes_and_within_four_if_it_is_fast():
    """By the limits of its parts; compute-sanitizer runs three tools."""
    text = (BENCH / "gpu.sh").read_text()
    assert all(f"bench/{name}.py" in text for name in SCRIPTS)
    for part, minutes in ((text, 9), (text[: text.index("if [ $fast = no ]")], 4)):
        parts = re.findall(r'^ *part ("[^"]+"|\w+) (\d+) ', part, re.MULTILINE)
        assert sum(int(seconds) * (3 if name == '"$tool"' else 1) for name, seconds in parts) <= minutes * 60


@pytest.mark.skipif(sys.platform == "win32", reason="a bash script")
def test_the_runbook_is_sound_bash():
    subprocess.run(["bash", "-n", str(BENCH / "gpu.sh")], check=True)
