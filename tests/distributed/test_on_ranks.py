"""Cases on 1 to 4 ranks of a real MPI; they are in the files ``*_cases.py``."""

from __future__ import annotations

import pytest
from distributed import ranks

MODULES = {
    "collective_cases": [1, 2, 3, 4],
    "data_parallel_cases": [1, 2, 4],
    "grid_cases": [1, 2, 3, 4],
    "krylov_cases": [1, 2],
    "mismatch_cases": [2, 3],
    "profile_cases": [1, 4],
    "random_cases": [3],
    "saving_cases": [4],
    "sharding_cases": [1, 2, 4],
    "training_cases": [3],
}
ALWAYS = {"collective_cases"}


def tier(module: str, size: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a job: on up to two ranks some jobs are in the default tier."""
    if size > 2:
        return [pytest.mark.slow]
    return [] if module in ALWAYS else [pytest.mark.sampled(1 / 4)]


JOBS = [pytest.param(module, size, marks=tier(module, size)) for module, sizes in MODULES.items() for size in sizes]


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
@pytest.mark.parametrize(("module", "size"), JOBS)
def test_cases_pass_on_every_rank(module: str, size: int) -> None:
    results = ranks.report(module, size)
    assert results.keys() == {*ranks.cases(module), "(the end)"}, "the job ended before: " + results["(the end)"]
    assert not any(results.values()), "\n".join(filter(None, results.values()))


def test_all_modules_of_cases_run() -> None:
    assert {path.stem for path in ranks.HERE.glob("*_cases.py")} == MODULES.keys()
