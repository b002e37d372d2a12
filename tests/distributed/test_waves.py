"""The example of full-waveform inversion, as a user runs it: one process and several say the same."""

from __future__ import annotations

import pytest
from distributed import ranks

EXAMPLE = ranks.HERE.parent.parent / "bench" / "distributed_waves.py"
SMALL = ("--size", "24", "--steps", "60", "--iterations", "2")


def told(size: int) -> list[str]:
    done = ranks.start(size, str(EXAMPLE), *SMALL)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{size} rank(s)")
    assert len(rest) == 4
    return rest


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
def test_ranks_say_what_one_process_says() -> None:
    one = told(1)
    assert [told(size) for size in (2, 4)] == [one, one]  # the digest of the forward run, misfits to six digits
