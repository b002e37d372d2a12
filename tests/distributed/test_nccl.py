"""The engine on NCCL: cases on 2 ranks of a stand-in for CuPy, each with a GPU of its own, with the CPU's bits.

They run on no real GPU: NCCL wants one for each rank.
"""

from __future__ import annotations

import json

import pytest
from distributed import ranks

MODULES = ["collective_cases", "data_parallel_cases", "grid_cases"]

pytestmark = [
    pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("module", MODULES)
def test_cases_pass_on_two_gpus(module: str) -> None:
    results = ranks.report(module, 2, standin=True)
    assert results.keys() == {*ranks.cases(module), "(the end)"}, "the job ended before: " + results["(the end)"]
    assert not any(results.values()), "\n".join(filter(None, results.values()))


def outcome(program: str, count: int = 2, **more: str) -> list[dict]:
    """What each rank of a program of ``nccl_programs.py`` has printed, by rank."""
    done = ranks.start(count, str(ranks.HERE / "nccl_programs.py"), program, **more)
    lines = [json.JSONDecoder().raw_decode(text)[0] for text in done.stdout.split("FOUND ")[1:]]
    assert len(lines) == count, done.stdout + done.stderr
    return sorted(lines, key=lambda line: line["rank"])


def test_each_rank_takes_a_gpu() -> None:
    found = outcome("engine")
    assert [line["engine"] for line in found] == ["nccl", "nccl"]
    assert [line["device"] for line in found] == ["cuda:0", "cuda:1"]
    assert all(line["kinds"] == ["messages"] for line in found), found  # nothing went through the host


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nccl": False}, "NCCL"),
        ({"devices": 1}, "fewer GPUs than ranks"),
    ],
)
def test_without_nccl_arrays_pass_through_the_host(options: dict[str, object], why: str) -> None:
    found = outcome("engine", TAPEGRAD_TEST_OPTIONS=json.dumps(options))
    assert [line["engine"] for line in found] == ["mpi", "mpi"]
    assert all(not line["kinds"] for line in found)
    assert why in found[0]["warnings"][0]
    assert not found[1]["warnings"]
    if not options.get("nccl", True):
        assert "pip install 'tapegrad[nccl12]'" in found[0]["warnings"][0]


def test_ranks_on_different_kinds_of_devices_are_told() -> None:
    found = outcome("mixed")
    assert all("on a GPU" in line["error"] and "ranks do not do the same" in line["error"] for line in found)


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    found = outcome("absent")
    assert "DistributedTimeoutError" in found[0]["error"]
    assert "rank 1 has not come" in found[0]["error"]
    assert "NCCL was given up" in found[0]["afterwards"]


def test_sums_under_way_on_a_stream_of_their_own() -> None:
    for line in outcome("overlap"):
        assert line["right"]
        assert line["streams"] == 1
        assert line["waits_of_home"] == 0


def test_large_sums_under_way_come_in_one_order() -> None:
    assert all(line["right"] for line in outcome("buckets", 3))
