"""Collectives that are noted on several ranks while a profile is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed.collectives.under_way import finish, help_on, start
from tapegrad.profile.recorder import Session
from tapegrad.tracing.communication import Collective, collectives, walks
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import last_categories

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
    sizes = ["sizes of all_gather"] if group.size > 1 else []
    assert [e[2] for e in world[0]] == [*sizes, "all_gather", "shift", "barrier"]
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
    assert abs(session.collectives.sent_bytes - wire) <= 0.001 * wire


def case_a_sum_that_is_done_before_it_is_asked_for(group: dist.Group) -> None:
    x = tg.asarray(np.ones(50_000, np.float32))
    bucket = rounded(x.nbytes)[0]

    def program() -> None:
        with tg.measure() as m:
            sums = [start(x, group)]
            both = m.live_bytes - before
            until = time.monotonic() + 10
            while sums[0].room is not None and time.monotonic() < until:
                help_on(group)
            one = m.live_bytes - before
            time.sleep(LATE)
            finish(sums.pop(), group)
        part = mine(group, 50_000)
        room = rounded(*[4 * part] * group.size)[0] if group.size > 1 else 0
        assert (both, one) == (bucket + room, bucket), (both, one)

    group.barrier()
    with tg.measure() as m:
        before = m.live_bytes
    run, _ = recorded(group, program)
    (event,) = of_kind(run, "all_reduce")
    assert event.under_way
    if group.size > 1:  # alone nobody helps it on, for nothing has to come
        assert event.exposed < LATE / 2 * 1e9 and event.done - event.entered < LATE / 2 * 1e9, event


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


# What collectives take for themselves --------------------------------------------------------------------------------


def taken(group: dist.Group, program: Callable[[], object]) -> list[int]:
    """The sizes of what was counted as communication."""
    run, _ = recorded(group, program)
    communication = CATEGORIES.index("communication")
    found = [
        n for n, category in zip(run.allocs["bytes"], last_categories(run), strict=True) if category == communication
    ]
    assert {run.text(run.allocs["op"][i]) for i, c in enumerate(last_categories(run)) if c == communication} <= OPS
    return sorted(found)


OPS = {
    "all_reduce", "all_reduce_extreme", "all_reduce_start", "reduce", "all_gather", "reduce_scatter", "gather",
    "scatter", "all_to_all", "shift", "send", "concat",
}  # fmt: skip


def rounded(*arrays: int) -> list[int]:
    """Of one room, of which arrays of so many bytes are taken."""
    total = sum(-(-n // 16) * 16 for n in arrays)
    return [-(-total // 512) * 512] if total else []


def mine(group: dist.Group, size: int) -> int:
    return size // group.size + (group.rank < size % group.size)


def case_sums_take_their_parts(group: dist.Group) -> None:
    n, part = group.size, mine(group, 10_001)
    for dtype, wide in (("float32", []), ("float16", [4 * part] * 2), ("bfloat16", [4 * part] * 2), ("int8", [])):
        x = tg.asarray(np.zeros(10_001), dtype=dtype)
        found = taken(group, lambda x=x: dist.all_reduce(x))
        assert found == (rounded(*[part * x.dtype.itemsize] * n, *wide) if n > 1 else []), (dtype, found)
    small = tg.asarray(np.zeros((3, 5), np.float32))
    assert taken(group, lambda: dist.all_reduce(small)) == (rounded(*[60] * (n + 1)) if n > 1 else [])
    assert taken(group, lambda: dist.all_reduce(small, "max")) == (rounded(*[60] * (n + 1)) if n > 1 else [])
    at_root = rounded(*[60] * n) if group.rank == n - 1 else []
    assert taken(group, lambda: dist.reduce(small, n - 1)) == at_root


def case_blocks_take_room_only_where_they_are_strewn(group: dist.Group) -> None:
    n = group.size
    x = tg.asarray(np.zeros((6, 4 * n), np.float64))
    assert taken(group, lambda: dist.broadcast(x)) == []
    assert taken(group, lambda: dist.all_gather(x, sizes=[6] * n)) == []
    assert taken(group, lambda: dist.all_gather(x, axis=1, sizes=[4 * n] * n)) == rounded(*[x.nbytes] * n)
    assert taken(group, lambda: dist.reduce_scatter(x, axis=1)) == rounded(*[192] * n, *[192] * n)
    assert taken(group, lambda: dist.shift(x)) == []
    assert taken(group, lambda: dist.shift(x[:, 1:3])) == rounded(96)
    at_root = group.rank == 0
    assert taken(group, lambda: dist.scatter(x, axis=1, sizes=[4] * n)) == (rounded(*[192] * n) if at_root else [])
    strewn = rounded(*[x.nbytes] * n) if at_root else []
    assert taken(group, lambda: dist.gather(x, axis=1, sizes=[4 * n] * n)) == strewn
    assert taken(group, lambda: dist.all_to_all(x, 1, 0)) == rounded(*[192] * n)


def case_a_message_is_kept_until_it_has_gone(group: dist.Group) -> None:
    x = tg.asarray(np.ones(1000, np.float32))

    def program() -> None:
        dist.send(x, (group.rank + 1) % group.size)
        dist.recv((1000,), group.rank - 1)
        dist.send(tg.asarray(np.ones(1)), group.rank)  # what has gone is dropped with the next message
        dist.recv((1,), group.rank, "float64")

    group.barrier()
    assert taken(group, program) == [512, 4096]
    with tg.measure() as m:
        group.barrier()
        dist.send(tg.asarray(np.ones(1)), group.rank)
        dist.recv((1,), group.rank, "float64")
    assert m.live_by_category["communication"] == 512


def case_a_bucket_takes_its_sum_and_its_parts(group: dist.Group) -> None:
    n, size = group.size, 6000
    v, w = tg.Variable(np.ones(4000, np.float32)), tg.Variable(np.ones(2000, np.float32))

    def program() -> None:
        with dist.GradientTape() as tape:
            loss = tg.sum(v * v) + tg.sum(w * 2.0)
        tape.gradient(loss, [v, w])

    part = mine(group, size)
    bucket = rounded(4 * size)  # once packed, and once as it is summed
    room = rounded(*[4 * part] * n) if n > 1 else []
    assert taken(group, program) == sorted(2 * bucket + room)


def case_nothing_is_left_when_it_is_done(group: dist.Group) -> None:
    v = tg.Variable(np.ones(5000, np.float32))
    with tg.measure() as m:
        with dist.GradientTape() as tape:
            loss = tg.sum(v * v)
        grad = tape.gradient(loss, v)
        dist.reduce_scatter(grad)
        before = m.live_bytes
        del grad
    assert before - m.live_bytes == 20480 and m.live_by_category.get("communication", 0) == 0
    with tg.measure() as m:
        dist.all_gather(tg.asarray(np.ones((3, 1000), np.float32)), axis=1, sizes=[1000] * group.size)
    assert m.peak_by_category.get("communication", 0) == rounded(*[12_000] * group.size)[0]


def case_a_dry_run_knows_what_collectives_take(group: dist.Group) -> None:
    v = tg.Variable(np.ones(50_000, np.float32))

    def step() -> None:
        with dist.GradientTape() as tape:
            loss = tg.sum(dist.all_gather(tg.reshape(v, (50, 1000)), axis=1, sizes=[1000] * group.size) ** 2.0)
        v.assign(v - 0.1 * tape.gradient(loss, v))

    step()  # ranks tell each other what dry runs ask for
    predicted = tg.memory.predict_peak(step)
    with tg.measure() as m:
        step()
    told = group.exchange_objects((predicted.peak_bytes, m.peak_bytes))
    assert all(p >= peak >= 0.95 * p for p, peak in told), told
