"""``tapegrad run`` on two ranks: what the program sees, and how a rank that fails ends all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from distributed import ranks

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
from tapegrad.distributed.group import launcher
name = launcher()
if sys.argv[1] == "early" and name and os.environ[name] == "1":
    raise ImportError("no such module")
from tapegrad import distributed as D
group = D.init(check="step")
assert __name__ == "__main__" and sys.argv[2:] == ["--batch", "64"]
sys.stderr.write("one\\ntw")
if sys.argv[1] == "exit" and group.rank == 1:
    sys.exit(3)
total = D.all_reduce(1.0 + group.rank).item()
sys.stdout.write(f"sum {total}\\n")  # in one piece: mpiexec mixes the pieces of several ranks
if sys.argv[1] == "exit":
    D.all_reduce(1.0)
"""
on_ranks = pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")


def started(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = folder / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return ranks.start(2, "-m", "tapegrad", "run", str(program), how, "--batch", "64", timeout=60)


@on_ranks
def test_lines_of_stderr_carry_the_rank(tmp_path: Path) -> None:
    done = started(tmp_path, "fine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sum", "3.0"] * 2
    for line in ("[rank 0] one", "[rank 0] tw", "[rank 1] one", "[rank 1] tw"):
        assert line in done.stderr.splitlines()


@on_ranks
def test_an_exit_status_ends_all_ranks(tmp_path: Path) -> None:
    done = started(tmp_path, "exit")
    assert done.returncode == 3, done.stderr
    for line in ("[rank 1] tw", "[rank 1] the program ends with status 3, and so all ranks do"):
        assert line in done.stderr.splitlines(), done.stderr  # lines of the other rank may come between


@on_ranks
def test_an_exception_before_init_ends_all_ranks(tmp_path: Path) -> None:
    done = started(tmp_path, "early")
    assert done.returncode == 1 and "[rank 1] ImportError: no such module" in done.stderr, done.stderr
    assert "tapegrad/profile" not in done.stderr


def test_a_process_alone(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    line = [sys.executable, "-m", "tapegrad", "run", str(program), "fine", "--batch", "64"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=ranks.environment())
    assert done.returncode == 0 and done.stdout == "sum 1.0\n" and done.stderr == "one\ntw", done.stderr
