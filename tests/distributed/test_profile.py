"""``tapegrad profile`` on several ranks: one run file of all, also of a job in which some fail."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from distributed import ranks

from tapegrad.tracing.communication import collectives, walks
from tapegrad.tracing.file import load
from tapegrad.tracing.run import Run

pytestmark = [
    pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)"),
    pytest.mark.slow,
]

PROGRAM = """
import os, sys, time
import numpy as np
import tapegrad as tg
from tapegrad import distributed as dist

group, fault = dist.init(), sys.argv[1]
v = tg.Variable(np.ones(100_000, np.float32))
own = [tg.asarray(np.ones(1_000_000 * (group.rank % 3 + 1), np.uint8))]
for step in range(3):
    if group.rank == 1:
        time.sleep(0.5)
    with dist.GradientTape() as tape:
        loss = tg.sum(v * v)
    tape.gradient(loss, v)
    if step == 1 and group.rank == 1:
        if fault in ("raises", "root sleeps"):
            raise ValueError("no such mesh")
        if fault == "exits":
            sys.exit(3)
        if fault == "sleeps":
            time.sleep(60)
    if step == 1 and group.rank == 0 and fault == "sleeps":
        sys.exit(4)
    if step == 1 and group.rank == 0 and fault == "root sleeps":
        time.sleep(60)
    if step == 1 and group.rank == 0 and fault == "root raises":
        raise ValueError("no such mesh")
    tg.memory.step()
if group.rank == 0:
    print("done")
"""
BYTES = 400_000
"""Of the variable."""


def profiled(folder: Path, size: int, fault: str, *options: str) -> tuple[CompletedProcess[str], Path]:
    script, path = folder / "program.py", folder / "run.sqlite"
    script.write_text(PROGRAM)
    command = ["-m", "tapegrad", "profile", "-o", str(path), *options, str(script), fault]
    return ranks.start(size, *command, timeout=60), path


def of_kind(run: Run, kind: str) -> Counter[int]:
    return Counter(e.rank for e in collectives(run) if e.kind == kind)


def test_all_ranks_are_in_one_run(tmp_path: Path) -> None:
    done, path = profiled(tmp_path, 3, "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done") and done.stdout.count("Peak ") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["program.py", "run.sqlite"]
    run = load(path)
    assert run.finished and run.meta["ranks"] == 3
    assert run.ranks["rank"] == [0, 1, 2]
    peaks = run.ranks["peak_bytes"]
    rounded = [-(-n * 1_000_000 // 512) * 512 for n in (1, 2, 3)]
    assert [b - peaks[0] for b in peaks] == [n - rounded[0] for n in rounded]
    assert run.meta["rank"] == 2 and run.peak["bytes"] == peaks[2] > peaks[1] > peaks[0]
    assert of_kind(run, "all_reduce") == dict.fromkeys(range(3), 3) and len(walks(run)) == 9
    sums = [e for e in collectives(run) if e.kind == "all_reduce"]
    assert {e.bytes for e in sums} == {BYTES} and {Path(e.file).name for e in sums} == {"program.py"}
    wire = 3 * 2 * BYTES * 2 / 3
    assert all(abs(n - wire) < 0.001 * wire for n in run.ranks["sent_bytes"])
    late = [e for e in collectives(run) if e.kind == "gradient" and e.others > 250_000_000]
    assert Counter(e.rank for e in late) == {0: 3, 2: 3}, late  # all wait for rank 1, which sleeps for twice as long


@pytest.mark.parametrize(("fault", "status", "first"), [
    ("raises", 1, "rank 1: ValueError: no such mesh"), ("exits", 3, "rank 1: exit status 3"),
    ("root raises", 1, "rank 0: ValueError: no such mesh"),
])  # fmt: skip
def test_when_a_rank_fails_all_have_a_report(fault: str, status: int, first: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done, path = profiled(tmp_path, 3, fault)
    assert done.returncode == status, done.stderr
    assert time.monotonic() - began < 20
    run = load(path)
    assert run.meta["outcome"]["message"] == first and not run.finished
    assert f"[rank 0] the job ends with status {status}: {first}" in done.stderr
    assert run.ranks["rank"] == [0, 1, 2] and done.stdout.count("Peak ") == 1
    if "raise" in fault:
        assert f"[{first[:6]}] {first[8:]}" in done.stderr
    assert of_kind(run, "all_reduce") == dict.fromkeys(range(3), 2)
    waiting = [e for e in collectives(run) if e.done < 0]
    assert {e.rank for e in waiting} == {0, 1, 2} - {int(first[5])}  # in the next step


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    done, path = profiled(tmp_path, 2, "sleeps")
    assert done.returncode == 4, done.stderr
    run = load(path)
    assert run.meta["outcome"]["message"] == "rank 0: exit status 4; nothing was heard of rank 1"
    assert run.ranks["rank"] == [0]


def test_a_rank_that_fails_while_rank_0_computes_saves_its_own(tmp_path: Path) -> None:
    done, path = profiled(tmp_path, 2, "root sleeps")
    assert done.returncode == 1, done.stderr
    until = time.monotonic() + 20
    while load(path).meta["outcome"]["kind"] == "running" and time.monotonic() < until:  # its end takes a moment
        time.sleep(0.1)
    assert load(path).meta["outcome"]["kind"] == "killed"
    own = tmp_path / "run.rank1.sqlite"
    assert f"[rank 1] rank 0 does not come; what rank 1 has recorded is in {own}" in done.stderr
    run = load(own)
    assert run.meta["rank"] == 1 and run.meta["outcome"]["message"] == "ValueError: no such mesh"
    assert len(collectives(run)) > 2 and not run.ranks["rank"]


def test_wrong_usage_ends_all_ranks_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_text("mine")
    began = time.monotonic()
    done, path = profiled(tmp_path, 2, "none")
    assert done.returncode == 2 and time.monotonic() - began < 20
    assert "run.sqlite exists; give another -o, or -f to overwrite it" in done.stderr
    assert "done" not in done.stdout and path.read_text() == "mine"


def test_one_rank_alone_is_a_program_alone(tmp_path: Path) -> None:
    done, path = profiled(tmp_path, 1, "none")
    assert done.returncode == 0, done.stderr
    run = load(path)
    assert "ranks" not in run.meta and not run.ranks["rank"] and of_kind(run, "all_reduce") == {0: 3}
