"""One run of several: made-up events on made-up clocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest

from tapegrad.profile.ranks.clocks import Clock, Reading
from tapegrad.profile.ranks.merging import Part, first_failed, highest, merged, part_of
from tapegrad.tracing.communication import collectives, walks
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, Builder
from tests.tracing.reading import reread

AHEAD = {0: 0, 1: 7_000_000, 2: -400_000_000}
"""Of each rank's clock, in ns."""
BEGAN = {0: 10_000, 1: 12_000, 2: 9_000}
"""When each began to record, by rank 0's clock, in us."""
CLOCKS = {rank: Clock(Reading(0, ahead)) for rank, ahead in AHEAD.items()}
FINISHED = {"kind": "finished", "code": 0, "message": ""}
FAILED = {"kind": "exception", "code": 1, "message": "ValueError: boom"}


class Rank(Builder):
    """A rank's run, whose moments are given in us by rank 0's clock."""

    def __init__(self, rank: int, peak: int = MIB, outcome: Mapping[str, object] = FINISHED) -> None:
        super().__init__(rank=rank, ranks=3, outcome=dict(outcome))
        self.rank = rank
        self.begin_step()
        self.text(f"a string that rank {rank} alone has")
        self.alloc(peak, "activation", "exp")
        self.end_step()

    def took_part(self, entered: int, done: int, waited: int | None = None, **more: object) -> None:
        began = BEGAN[self.rank]
        waited = done - entered if waited is None else waited
        self.collective("all_reduce", entered - began, done - began, waited, rank=self.rank, ranks=3, **more)

    def part(self, ended: int = 20_000, sent: int = 0) -> Part:
        ahead = AHEAD[self.rank]
        return part_of(self.rank, self.finish(), BEGAN[self.rank] * 1000 + ahead, ended * 1000 + ahead, sent)


def one_run(ranks: Sequence[Rank], main: int = 0, clocks: Mapping[int, Clock] = CLOCKS) -> Run:
    parts = [r.part(sent=100 * r.rank) for r in ranks]
    before = copy.deepcopy(parts[main].run)
    run = merged(ranks[main].run, parts, clocks, 3)
    assert parts[main].run == before
    return reread(run)


def test_waiting_and_transferring_are_told_apart() -> None:
    ranks = [Rank(r) for r in range(3)]
    for r, entered in zip(ranks, (13_000, 15_000, 13_500)):
        r.took_part(entered, 15_400 + r.rank, number=4)
    run = one_run(ranks)
    events = collectives(run)
    assert [e.rank for e in events] == [0, 1, 2]
    assert [e.entered // 1000 for e in events] == [3_000, 5_000, 3_500]  # since rank 0 began
    assert [e.needed for e in events] == [e.entered for e in events]
    assert [e.others // 1000 for e in events] == [2_000, 0, 1_500]
    assert [e.transfer // 1000 for e in events] == [400, 401, 402]
    assert [e.exposed // 1000 for e in events] == [2_400, 401, 1_902]
    assert [e.hidden for e in events] == [0, 0, 0]


def test_what_the_program_did_not_wait_for_is_hidden() -> None:
    ranks = [Rank(r) for r in range(3)]
    for r in ranks:
        r.took_part(13_000 + r.rank, 14_000, 250, under_way=True)
    for e in collectives(one_run(ranks)):
        assert (e.exposed, e.hidden) == (250_000, (1_000 - e.rank - 250) * 1000)
        assert e.others + e.transfer == e.exposed + e.hidden


def test_times_are_since_the_start_of_the_rank_with_the_highest_peak() -> None:
    ranks = [Rank(0), Rank(1, peak=3 * MIB), Rank(2, peak=3 * MIB)]
    for r in ranks:
        r.took_part(13_000, 14_000)
    parts = [r.part() for r in ranks]
    assert highest(parts).rank == 1
    run = one_run(ranks, main=1)
    assert run.meta["rank"] == 1 and run.meta["ranks"] == 3 and run.peak["bytes"] == 3 * MIB
    assert {e.entered for e in collectives(run)} == {1_000_000}
    assert run.ranks["peak_bytes"] == [MIB, 3 * MIB, 3 * MIB] and run.ranks["sent_bytes"] == [0, 100, 200]
    assert run.ranks["begin_ns"] == [0, 0, 0]  # what was before it began counts as then
    assert {ns // 1000 for ns in run.ranks["end_ns"]} == {8_000}
    assert run.tables["allocs"] == ranks[1].run.tables["allocs"]


def test_only_the_same_number_of_the_same_group_is_one_collective() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    ranks[0].took_part(13_000, 14_000, number=1)
    ranks[1].took_part(13_300, 14_000, number=1)
    ranks[2].took_part(13_600, 14_000, number=1, group="world/1:1")
    ranks[0].took_part(16_000, 17_000, number=2)
    ranks[2].took_part(16_200, 17_000, number=2)
    assert [e.others // 1000 for e in collectives(one_run(ranks))] == [300, 200, 0, 0, 0]


def test_what_was_done_before_the_last_rank_came_did_not_wait_for_it() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    for r, (entered, done) in zip(ranks, ((13_000, 13_100), (13_050, 14_900), (14_800, 14_900))):
        r.took_part(entered, done, group="0-1")
    events = collectives(one_run(ranks))
    assert [(e.others // 1000, e.transfer // 1000) for e in events] == [(100, 0), (1_750, 100), (0, 100)]


def test_what_was_never_done_took_no_time() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    ranks[0].took_part(13_000, 13_000, 0)
    ranks[0].run.communication["done_ns"][0] = -1
    ranks[0].run.communication["begun_ns"][0] = -1
    (event,) = collectives(one_run(ranks))
    assert (event.begun, event.done) == (-1, -1)
    assert event.others == event.transfer == event.exposed == event.hidden == 0


def test_walks_and_lines_are_each_ranks_own() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    for r in ranks:
        for i in range(r.rank + 1):
            walk = r.walk(13_000 + i - BEGAN[r.rank], 14_000 + i - BEGAN[r.rank], r.rank)
            r.took_part(13_500 + i, 13_900, walk=walk, number=i + 1, file=f"rank_{r.rank}.py", line=i + 1)
    run = one_run(ranks)
    found = walks(run)
    assert [w.rank for w in found] == [0, 1, 1, 2, 2, 2]
    for e in collectives(run):
        assert found[e.walk].rank == e.rank and found[e.walk].begin == 3_000_000 + 1000 * (e.number - 1)
        assert (e.file, e.line, e.detail) == (f"rank_{e.rank}.py", e.number, f"float32 ({MIB // 4},)")


def test_the_first_failure_is_that_of_the_job() -> None:
    ranks = [Rank(0, outcome=FAILED | {"message": "DistributedError: rank 2 is not there"}), Rank(1),
             Rank(2, outcome=FAILED)]  # fmt: skip
    parts = [r.part(ended) for r, ended in zip(ranks, (17_000, 18_000, 16_000))]
    failed = first_failed(parts, CLOCKS)
    assert failed is not None and failed.rank == 2
    run = merged(ranks[0].run, parts, CLOCKS, 3)
    assert run.meta["outcome"] == FAILED | {"message": "rank 2: ValueError: boom"} and not run.finished


@pytest.mark.parametrize("come", [[0], [0, 2]])
def test_who_has_told_nothing_is_named(come: list[int]) -> None:
    ranks = [Rank(r, outcome={"kind": "exit", "code": 3, "message": ""}) for r in come]
    run = merged(ranks[0].run, [r.part() for r in ranks], CLOCKS, 3)
    who = "ranks 1, 2" if come == [0] else "rank 1"
    assert run.meta["outcome"]["message"] == f"rank 0: exit status 3; nothing was heard of {who}"
    assert run.ranks["rank"] == come
