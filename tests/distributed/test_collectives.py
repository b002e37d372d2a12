"""Collectives on 1 to 4 ranks of a real MPI; the cases are in ``collective_cases.py``."""

from __future__ import annotations

import pytest
from distributed import ranks

NAMES = [*ranks.cases("collective_cases"), "(the end)"]


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(name: str, size: int) -> None:
    found = ranks.report("collective_cases", size)
    assert name in found, "the job ended before: " + found["(the end)"]
    assert not found[name], found[name]
