"""Jobs of which a rank is killed while it saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import ranks

import tapegrad as tg

pytestmark = [
    pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)"),
    pytest.mark.slow,
]


KILLED = """
import os, signal, sys
import tapegrad as tg
from distributed.saved_values import part_of
import numpy as np
folder, rank, call, after = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "after"
group = tg.distributed.init()
x = np.arange(100.0)
tg.distributed.save(folder + "/step-1", {"x": part_of(x, group.rank, group.size), "step": 1})
real = getattr(os, call)

def killed(*args):
    if after:
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)

if group.rank == rank:
    setattr(os, call, killed)
tg.distributed.save(folder + "/step-2", {"x": part_of(x, group.rank, group.size), "step": 2})
print("saved")
"""


@pytest.mark.parametrize(
    ("rank", "call", "when", "there"),
    [
        (1, "fsync", "before", False),
        (0, "fsync", "before", False),
        (0, "rename", "before", False),
        (0, "rename", "after", True),
    ],
)
def test_a_rank_that_is_killed_leaves_the_last_good_folder(
    tmp_path: Path, rank: int, call: str, when: str, there: bool
) -> None:
    done = ranks.start(2, "-c", KILLED, str(tmp_path), str(rank), call, when)
    assert done.returncode != 0 and "saved" not in done.stdout, done.stdout + done.stderr
    steps = ["step-1", "step-2"] if there else ["step-1"]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == steps
    for step in steps:
        loaded = tg.distributed.load(tmp_path / step)
        assert loaded["step"] == int(step[-1]) and loaded["x"].shape == (100,)
    tg.distributed.save(tmp_path / "step-2", {"x": 1}, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]  # and what was half done is gone
