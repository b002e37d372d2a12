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
SCRIPTS.remove("gpu_common")  # which measures nothing

needs_bash = pytest.mark.skipif(sys.platform == "win32", reason="a bash script")
pytestmark = [pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler())), pytest.mark.slow]


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
    assert "measured: False" in said and "no figures of a GPU" in said and ", 0 failed" in said
    assert results() == before


def test_rates_of_convolutions_are_measured_with_cudnn_and_without():
    said = run(BENCH / "gpu_rates.py", "--dry-run", "--only", "convolution 3x3, float32")
    both = re.findall("^convolution.*: tapegrad, function, own kernels: not measured$", said, re.MULTILINE)
    assert len(both) == 2, said


PLANTED = """
import os, signal, sys, time
sys.path.insert(0, {bench!r})
import gpu_cases, gpu_common, gpu_speed

def case(name, forward, **others):
    forwards = {{"tapegrad": forward, "cupy": lambda cp, x: x + 1, **others}}
    return gpu_cases.Case(name, 8, lambda: [__import__("numpy").ones(4, "float32")], forwards)

def stale(tg, x):
    from tapegrad.device import asdevice
    asdevice("cuda").xp.cuda.runtime.deviceSynchronize = None  # every later wait fails
    raise RuntimeError("illegal address")

CASES = [
    case("first", lambda tg, x: x + 1),
    case("raises", lambda tg, x: 1 / 0),
    case("disagrees", lambda tg, x: x + 2),
    case("other shapes", lambda tg, x: tg.stack([x, x])),
    case("exits", lambda tg, x: sys.exit(0)),
    case("hangs", lambda tg, x: time.sleep(1000)),
    case("killed", lambda tg, x: os.kill(os.getpid(), signal.SIGKILL)),
    case("breaks CUDA", stale),
    case("last", lambda tg, x: x + 1),
]

def work(run, report):
    report.case("copy", lambda: {{"rate": gpu_speed.copy_bandwidth(run, 64)}})
    for one in CASES:
        report.case(one.name, lambda one=one: gpu_speed.of_copy(report, one, gpu_speed.compare(run, one)))

gpu_common.CASE_SECONDS = 4
gpu_common.conduct(gpu_common.parser("", seconds=100, rounds=1).parse_args(), "planted", work)
"""


def test_a_case_that_fails_costs_the_others_nothing(tmp_path):
    script, out = tmp_path / "planted.py", tmp_path / "results"
    script.write_text(PLANTED.format(bench=str(BENCH)))
    command = [sys.executable, script, "--dry-run", "--out", out]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD", "PYTEST", "PYTHONPATH"))}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row["case"]: row for row in map(json.loads, (out / "planted.jsonl").read_text().splitlines())}
    assert list(rows) == ["copy", "first", "raises", "disagrees", "other shapes", "exits", "hangs", "killed",
                          "breaks CUDA", "last"]  # fmt: skip
    for name in ("first", "last"):
        assert set(rows[name]["seconds"]) == set(rows[name]["of_copy"]) == {"tapegrad", "function", "cupy"}
        assert "error" not in rows[name]
    assert "ZeroDivisionError" in rows["raises"]["error"] and set(rows["raises"]["seconds"]) == {"cupy"}
    assert "differs by" in rows["disagrees"]["differs"]["cupy"] and "cupy" not in rows["disagrees"]["seconds"]
    assert "other shapes" in rows["other shapes"]["differs"]["cupy"]
    assert "SystemExit" in rows["exits"]["error"]
    assert "stopped after" in rows["hangs"]["error"] and "SIGKILL" in rows["killed"]["error"]
    assert "illegal address" in rows["breaks CUDA"]["error"]
    facts = json.loads((out / "facts.json").read_text())
    assert facts["measured"] is False and {"device", "driver", "versions", "commit"} <= set(facts)
    said = run(BENCH / "gpu_common.py", out)
    assert "cuDNN of tapegrad: " in said and all(f"{name}: " in said for name in rows)
    assert "not measured" in said and " us" not in said


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


def runbook(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD", "PYTEST", "PYTHONPATH"))}
    command = ["bash", BENCH / "gpu.sh", *words]
    env = {**clean, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@needs_bash
@pytest.mark.parametrize("sanitizer", [False, True])
def test_the_runbook_ends_in_nine_minutes_and_the_fast_one_in_four(tmp_path, sanitizer):
    if sanitizer:
        (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
        (tmp_path / "compute-sanitizer").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    plan, fast = (
        [line.split() for line in runbook("--plan", *words, PATH=path).stdout.splitlines()]
        for words in ((), ("--fast",))
    )
    assert [name for name, _ in fast] == ["facts", "smoke", "step", "rates", "speed"]
    assert plan[:5] == fast and [name for name, _ in plan[-3:]] == ["step-compiled", "rates-compiled", "speed-compiled"]
    assert {name for name, _ in plan} >= {"tests", *(("memcheck", "racecheck", "synccheck") if sanitizer else ())}
    assert sum(int(seconds) for _, seconds in fast) <= 4 * 60 and sum(int(seconds) for _, seconds in plan) <= 9 * 60


@needs_bash
def test_the_runbook_leaves_facts_and_a_file_for_each_part(tmp_path):
    done = runbook("--dry-run", "--out", tmp_path, "facts", "step", "speed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"facts.json", "gpu-step.jsonl", "gpu-speed.jsonl"}
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["measured"] is False and {"device", "driver", "versions", "commit"} <= set(facts)
    results = done.stdout.partition("=== results")[2]
    assert "gpu-step:" in results and "gpu-speed:" in results and len(results) < 10_000


@needs_bash
def test_the_gpu_tests_run_without_packages_that_only_other_tests_import(tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.modules |= dict.fromkeys(('rich', 'jsonschema', 'IPython', 'matplotlib', 'torch', 'jax', 'autograd'))\n"
    )
    done = runbook("--dry-run", "tests", PYTHON=str(tmp_path / "python"))
    assert done.returncode == 0, done.stdout + done.stderr
    selected, collected = map(int, re.search(r"(\d+)/(\d+) tests collected", done.stdout).groups())
    assert 190 < selected and collected < 300, "tests/gpu alone"
