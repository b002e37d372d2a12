"""Steps on more ranks: what hides behind computation, by hand and by a simulation; other sizes of buckets."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from tapegrad.distributed.buckets import buckets
from tapegrad.profile.plan.ranks.collectives import Collective, seconds
from tapegrad.profile.plan.ranks.network import Link, Network
from tapegrad.profile.plan.ranks.predicting import bucket_sizes, doublings, predict, regrouped
from tapegrad.profile.plan.ranks.timeline import Step, passages
from tests.profile.plan.ranks.simulation import Process, Simulation, ordered

LINK = Link(1e9, 1e-4)
MIB = 1 << 20


def flat(ranks: int, link: Link = LINK) -> Network:
    return Network(ranks, (link,))


def bucket(nbytes: int, ready: float, wanted: float, walk: int = 0, common: str = "float32") -> Collective:
    return Collective("all_reduce", nbytes, ready, wanted, "train.py", 7, walk=walk, common=common)


def blocking(nbytes: int, ready: float, kind: str = "all_reduce") -> Collective:
    return Collective(kind, nbytes, ready, ready, "train.py", 5)


def test_of_two_buckets_one_hides() -> None:
    step = Step(0.100, [bucket(1, 0.010, 0.090), bucket(2, 0.080, 0.090)])
    first, second = passages(step.collectives, lambda c: 0.030)
    assert (first.begin, first.done, first.exposed) == pytest.approx((0.010, 0.040, 0.0))
    assert (second.begin, second.done, second.exposed) == pytest.approx((0.080, 0.110, 0.020))


def test_buckets_queue_and_what_is_waited_for_is_shared_by_those_on_their_way() -> None:
    found = passages([bucket(1, 0.05, 0.09), bucket(2, 0.08, 0.09)], lambda c: 0.10)
    assert [(p.begin, p.done, p.exposed) for p in found] == [
        pytest.approx((0.05, 0.15, 0.06)), pytest.approx((0.15, 0.25, 0.10))
    ]  # fmt: skip


def test_a_blocking_one_waits_for_what_is_on_its_way_and_delays_all_that_follows() -> None:
    found = passages([bucket(1, 0.0, 1.0), blocking(1, 0.4), bucket(1, 0.5, 1.0)], lambda c: 0.6)
    assert [(p.begin, p.done, p.exposed) for p in found] == [
        pytest.approx((0.0, 0.6, 0.2)), pytest.approx((0.6, 1.2, 0.6)), pytest.approx((1.3, 1.9, 0.1))
    ]  # fmt: skip


def test_limits() -> None:
    step = Step(0.1, [bucket(MIB, 0.02, 0.09), blocking(MIB, 0.03), bucket(MIB, 0.08, 0.09)])
    for found in (predict(step, flat(1)), predict(step, flat(64, Link(inf, 0.0)))):
        assert found.exposed == 0.0 and found.seconds == 0.1 and found.efficiency == 1.0
        assert all(line.seconds == line.hidden == line.exposed == 0.0 for line in found.lines)
    alone = predict(Step(0.0, [blocking(MIB, 0.0)]), flat(4))
    assert alone.seconds == alone.exposed == pytest.approx(2 * 3 * 1e-4 + 2 * 3 / 4 * MIB / 1e9)
    assert alone.efficiency == 0.0
    assert predict(Step(0.0, []), flat(4)).efficiency == 1.0


def test_lines_sum_up() -> None:
    step = Step(1.0, [blocking(MIB, 0.1, "all_gather"), bucket(MIB, 0.2, 0.9), bucket(2 * MIB, 0.3, 0.9)])
    found = predict(step, flat(8))
    assert [(line.kind, line.calls, line.nbytes) for line in found.lines] == [
        ("all_gather", 1, MIB), ("all_reduce", 2, 3 * MIB)
    ]  # fmt: skip
    gather, gradients = found.lines
    assert gather.hidden == 0.0 and gather.exposed == gather.seconds == pytest.approx(7 * LINK.seconds(MIB))
    assert gradients.exposed == 0.0 and gradients.hidden == pytest.approx(2 * 14e-4 + 2 * 7 / 8 * 3 * MIB / 1e9)
    assert found.seconds == pytest.approx(1.0 + gather.exposed) and found.efficiency == pytest.approx(1 / found.seconds)


def simulated(step: Step, ranks: int) -> float:
    """The step's time where each rank has a program, and a channel that does one collective after the other."""
    sim = Simulation(lambda source, to, nbytes: LINK.seconds(nbytes))

    def program(rank: int) -> Process:
        moments = [(c.ready, k, False) for k, c in enumerate(step.collectives)]
        moments += [(c.wanted, k, True) for k, c in enumerate(step.collectives)]
        before = 0.0
        for moment, k, waits in sorted(moments):
            yield moment - before
            before = moment
            if waits:
                yield "done", rank, k
            else:
                sim.happen(("launched", rank, k))
        yield step.computation - before

    def channel(rank: int) -> Process:
        for k, c in enumerate(step.collectives):
            yield "launched", rank, k
            yield from ordered(sim, rank, ranks, c.nbytes)
            sim.happen(("done", rank, k))

    for rank in range(ranks):
        sim.start(program(rank))
        sim.start(channel(rank))
    return sim.run()


@pytest.mark.parametrize("seed", range(20))
def test_a_simulation_of_the_ranks_takes_as_long(seed: int) -> None:
    chance = random.Random(seed)
    ranks, found = chance.choice([2, 3, 4, 6]), []
    for moment in sorted(chance.random() for _ in range(8)):
        nbytes = chance.randrange(1, 80) * MIB
        found.append(
            bucket(nbytes, moment, 0.8) if moment < 0.8 and chance.random() < 0.7 else blocking(nbytes, moment)
        )
    step = Step(1.0, found)
    assert predict(step, flat(ranks)).seconds == pytest.approx(simulated(step, ranks), rel=1e-9)


def test_the_simulation_notices_another_time() -> None:
    step = Step(0.1, [bucket(MIB, 0.02, 0.03), blocking(MIB, 0.05)])
    assert predict(step, flat(4, Link(0.9e9, 1e-4))).seconds != pytest.approx(simulated(step, 4), rel=1e-4)
    assert 0.1 < simulated(step, 4) < simulated(step, 5)


# Other sizes of buckets ----------------------------------------------------------------------------------------------


def test_buckets_are_joined_as_the_tape_joins_them() -> None:
    parts = [bucket(MIB, 0.01 * k, 0.5) for k in range(10)]
    other = blocking(7, 0.035)
    step = Step(0.6, sorted([*parts, other], key=lambda c: c.ready))
    joined = regrouped(step, 4 * MIB)
    assert joined.computation == 0.6
    assert [(c.nbytes, c.ready) for c in joined.collectives] == [
        (MIB, 0.0), (7, 0.035), (4 * MIB, 0.04), (4 * MIB, 0.08), (MIB, 0.09)
    ]  # fmt: skip
    assert buckets([(MIB, "float32")] * 10, 4 * MIB) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert regrouped(step, 1).collectives == step.collectives


def test_other_walks_and_dtypes_are_not_joined() -> None:
    parts = [bucket(MIB, 0.1, 0.2), bucket(MIB, 0.15, 0.2), bucket(MIB, 0.3, 0.5, walk=1),
             bucket(MIB, 0.35, 0.5, walk=1, common="float64")]  # fmt: skip
    joined = regrouped(Step(0.6, parts), 100 * MIB)
    assert [(c.nbytes, c.ready, c.walk, c.common) for c in joined.collectives] == [
        (2 * MIB, 0.15, 0, "float32"), (MIB, 0.3, 1, "float32"), (MIB, 0.35, 1, "float64")
    ]  # fmt: skip


def test_the_best_size_lies_between_many_messages_and_one_that_is_late() -> None:
    """100 gradients of 100 KB within a second: each sum costs 24 ms of latency, and bandwidth 0.4 s for all."""
    step = Step(1.0, [bucket(100_000, 0.01 * k, 1.0) for k in range(100)])
    net = flat(5, Link(40e6, 3e-3))
    found = dict(bucket_sizes(step, net))
    assert list(found) == [1 << k for k in range(17, 27)]  # up to where one bucket has them all
    assert all(p == predict(regrouped(step, size), net) for size, p in found.items())
    best = min(found, key=lambda size: found[size].seconds)
    assert min(found) < best < max(found)
    assert predict(step, net).seconds > found[best].seconds < found[max(found)].seconds
    assert sum(line.nbytes for line in found[best].lines) == 10_000_000


def test_nothing_to_join() -> None:
    step = Step(1.0, [blocking(MIB, 0.5), bucket(MIB, 0.6, 0.9)])
    assert list(bucket_sizes(step, flat(8))) == []
    assert list(bucket_sizes(Step(1.0, [replace(step.collectives[0])]), flat(8))) == []


def test_doublings() -> None:
    assert [list(doublings(n)) for n in (1, 2, 3, 8, 12)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]
    ]  # fmt: skip


def test_a_time_is_what_its_collective_takes() -> None:
    step = Step(0.5, [bucket(3 * MIB, 0.1, 0.4)])
    (line,) = predict(step, flat(6)).lines
    assert line.seconds == pytest.approx(seconds(step.collectives[0], flat(6)))
