"""Collectives that are noted on several ranks while a profile is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.profile.recorder import Session
from tapegrad.profile.runs import Run
from tapegrad.profile.runs.communication import Collective, collectives, walks

LATE = 0.3
"""Seconds."""


def recorded(group: dist.Group, program: Callable[[], object]) -> tuple[Run, Session]:
    session = Session()
    session.start()
    program()
    session.stop()
    meta: dict[str, Any] = {"rank": group.rank, "ranks": group.size}
    return session.run(meta), session


def of_kind(run: Run, kind: str) -> list[Collective]:
    return [e for e in collectives(run) if e.kind == kind]


def case_a_rank_that_is_early_waits(group: dist.Group) -> None:
    group.barrier()

    def program() -> None:
        if group.rank == 0:
            time.sleep(LATE)
        dist.all_reduce(tg.asarray(np.ones(10_000, np.float32)))

    run, session = recorded(group, program)
    (event,) = of_kind(run, "all_reduce")
    assert (event.rank, event.group, event.ranks, event.bytes) == (group.rank, "world", group.size, 40_000)
    assert event.entered <= event.begun <= event.done
    early = group.rank > 0
    assert (event.waited > LATE / 2 * 1e9) == early, event
    mine = np.diff(np.linspace(0, 10_000, group.size + 1).astype(int))  # cut as evenly as may be
    least, most = 4 * (10_000 - max(mine)) * 2, 4 * (10_000 - min(mine)) * 2 + 4 * group.size
    assert least - 4 * group.size <= session.collectives.sent_bytes <= most, session.collectives.sent_bytes


def case_all_ranks_have_the_same_numbers(group: dist.Group) -> None:
    half = group.split(group.rank % 2)
    x = tg.asarray(np.ones(7))

    def program() -> None:
        dist.all_gather(x)
        dist.all_reduce(x, group=half)
        dist.shift(x)
        group.barrier()

    run, _ = recorded(group, program)
    told = group.exchange_objects([(e.group, e.number, e.kind, e.detail) for e in collectives(run)])
    world = [[e for e in one if e[0] == "world"] for one in told]
    assert all(one == world[0] for one in world)
    assert [e[2] for e in world[0]] == ["sizes of all_gather", "all_gather", "shift", "barrier"]
    names = {e[0] for one in told for e in one} - {"world"}
    assert len(names) == min(2, group.size)
    (mine,) = (e for e in collectives(run) if e.group == half.name)
    assert mine.ranks == half.size and mine.kind == "all_reduce"


def case_sums_under_way_leave_the_program_alone(group: dist.Group) -> None:
    vs = [tg.Variable(np.ones(50_000, np.float32), name=f"v{i}") for i in range(3)]

    def program() -> None:
        with dist.GradientTape(bucket_bytes=200_000) as tape:
            loss = sum(tg.sum(v * v) for v in vs)
        tape.gradient(loss, vs)

    run, session = recorded(group, program)
    sums, (walk,) = of_kind(run, "all_reduce"), walks(run)
    assert len(sums) == 3 and all(e.under_way and e.walk == 0 for e in sums)
    assert all(walk.begin <= e.entered <= e.done <= walk.end for e in sums)
    assert all(e.exposed + e.hidden == e.done - e.entered == e.others + e.transfer for e in sums)
    wire = 2 * sum(e.bytes for e in sums) * (group.size - 1) / group.size
    assert abs(session.collectives.sent_bytes - wire) < 0.001 * wire


def case_a_message_has_one_name_on_both_sides(group: dist.Group) -> None:
    if group.size < 2:
        return
    v = tg.Variable(np.arange(4, dtype=np.float32))

    def program() -> None:
        with tg.GradientTape() as tape:
            if group.rank == 0:
                dist.send(v * 1.0, 1)
                loss = tg.sum(v)
            elif group.rank == 1:
                loss = tg.sum(dist.recv((4,), 0) * v)
            else:  # each rank has a part in the walk
                dist.send(v * 1.0, group.rank)
                loss = tg.sum(dist.recv((4,), group.rank))
        tape.gradient(loss, v)

    run, _ = recorded(group, program)
    told = group.exchange_objects([(e.group, e.number, e.kind, e.ranks) for e in collectives(run) if "-" in e.group])
    there, here = told[:2]
    assert [(e[2], e[3]) for e in there] == [("send", 2), ("recv", 2)]
    assert [(e[2], e[3]) for e in here] == [("recv", 2), ("send", 2)]
    assert [e[:2] for e in there] == [e[:2] for e in here] and there[0][:2] != there[1][:2]
    assert all({e[0] for e in one} == {f"{r}-{r}", f"{r}-{r}'"} for r, one in enumerate(told) if r > 1)
