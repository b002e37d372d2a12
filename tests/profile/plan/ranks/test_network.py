"""Links, and the times of collectives: closed forms, their limits, and a simulation of the messages."""

from __future__ import annotations

from math import inf

import pytest

from tapegrad.distributed.ordered import AT_ONCE
from tapegrad.profile.plan.ranks.collectives import Collective, seconds
from tapegrad.profile.plan.ranks.network import Link, LinkError, network, parse_link
from tests.profile.plan.ranks.simulation import Process, Simulation, ordered, ring, tree

A, B = 5e-6, 1 / 25e9
LINK = Link(1 / B, A)
BYTES = 3 << 20


def time_of(kind: str, ranks: int, nbytes: int = BYTES, link: Link = LINK, exact: bool = True) -> float:
    return seconds(Collective(kind, nbytes, 0.0, 0.0, exact=exact), network(ranks, link, link))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 64, 1000])
def test_closed_forms(n: int) -> None:
    rounds = (n - 1).bit_length()
    whole = {
        "all_reduce": 2 * (n - 1) * A + 2 * (n - 1) / n * BYTES * B,
        "all_gather": (n - 1) * (A + BYTES * B),
        "gather_pieces": (n - 1) * A + (n - 1) / n * BYTES * B,
        "reduce_scatter": (n - 1) * A + (n - 1) / n * BYTES * B,
        "all_to_all": (n - 1) * A + (n - 1) / n * BYTES * B,
        "gather": (n - 1) * (A + BYTES * B),
        "scatter": (n - 1) * (A + BYTES * B),
        "reduce": (n - 1) * (A + BYTES * B),
        "broadcast": rounds * (A + BYTES * B),
        "shift": A + BYTES * B,
        "recv": A + BYTES * B,
        "barrier": rounds * A,
    }
    for kind, expected in whole.items():
        assert time_of(kind, n) == pytest.approx(expected, rel=1e-12), kind
    assert time_of("all_reduce", n, exact=False) == pytest.approx(whole["all_reduce"], rel=1e-12)
    assert time_of("all_reduce", n, 8, exact=False) == pytest.approx(2 * (n - 1) * (A + 8 / n * B), rel=1e-12)
    assert time_of("all_reduce", n, AT_ONCE) == pytest.approx((n - 1) * (A + AT_ONCE * B), rel=1e-12)
    split = 2 * (n - 1) * A + 2 * (n - 1) / n * (AT_ONCE + 1) * B
    assert time_of("all_reduce", n, AT_ONCE + 1) == pytest.approx(split, rel=1e-12)


def test_limits() -> None:
    for kind in ("all_reduce", "all_gather", "broadcast", "shift", "gather", "barrier"):
        assert time_of(kind, 1) == 0.0
        assert time_of(kind, 8, link=Link(inf, 0.0)) == 0.0
    assert time_of("all_reduce", 8, link=Link(inf, A)) == pytest.approx(14 * A)
    assert time_of("all_reduce", 8, link=Link(1 / B, 0.0)) == pytest.approx(2 * 7 / 8 * BYTES * B)
    assert time_of("all_reduce", 10**6, link=Link(1 / B, 0.0)) == pytest.approx(2 * BYTES * B, rel=1e-5)


def simulated(way: object, ranks: int, far: Link, near: Link | None = None, per_node: int = 1) -> float:
    def cost(source: int, to: int, nbytes: float) -> float:
        return (far if near is None or source // per_node != to // per_node else near).seconds(nbytes)

    sim = Simulation(cost)
    for rank in range(ranks):
        process: Process = way(sim, rank, ranks, BYTES)  # type: ignore[operator]
        sim.start(process)
    return sim.run()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize(
    ("kind", "exact", "way"), [("all_reduce", True, ordered), ("all_reduce", False, ring), ("broadcast", True, tree)]
)
def test_a_simulation_of_the_messages_takes_as_long(n: int, kind: str, exact: bool, way: object) -> None:
    assert time_of(kind, n, exact=exact) == pytest.approx(simulated(way, n, LINK), rel=1e-9)


@pytest.mark.parametrize(("n", "per_node"), [(4, 2), (8, 4), (12, 4), (16, 8)])
def test_the_slower_link_counts(n: int, per_node: int) -> None:
    near = Link(200e9, 1e-6)
    for kind, exact, way in (("all_reduce", True, ordered), ("all_reduce", False, ring), ("broadcast", True, tree)):
        found = seconds(Collective(kind, BYTES, 0.0, 0.0, exact=exact), network(n, LINK, near, per_node))
        assert found == time_of(kind, n, exact=exact)
        if way is tree:  # its first rounds stay within a node
            assert found > simulated(way, n, LINK, near, per_node) > time_of(kind, n, link=near)
        else:
            assert found == pytest.approx(simulated(way, n, LINK, near, per_node), rel=0.05)


def test_ranks_of_one_node_use_its_link_alone() -> None:
    near = Link(200e9, 1e-6)
    for kind in ("all_reduce", "all_gather", "broadcast", "shift"):
        c = Collective(kind, BYTES, 0.0, 0.0)
        assert (
            seconds(c, network(4, LINK, near, 4))
            == seconds(c, network(4, near, near))
            < seconds(c, network(4, LINK, LINK))
        )
        assert seconds(c, network(4, LINK, near, 1)) == seconds(c, network(4, LINK, LINK))
        assert seconds(c, network(4, near, LINK, 2)) == seconds(c, network(4, LINK, LINK))  # a slow one within nodes


@pytest.mark.parametrize(
    ("text", "speed", "latency"),
    [
        ("25GB/s,5us", 25e9, 5e-6), ("25 GiB/s , 5 us", 25 * 2**30, 5e-6), ("800MB/s,0.1ms", 800e6, 1e-4),
        ("200Gbit/s,1.5us", 25e9, 1.5e-6), ("1TB/s,700ns", 1e12, 7e-7), ("100kB/s,1s", 1e5, 1.0), ("9B/s,0us", 9, 0),
        ("1Mibit/s,3µs", 2**17, 3e-6),
    ],
)  # fmt: skip
def test_links_are_read(text: str, speed: float, latency: float) -> None:
    link = parse_link(text)
    assert (link.bytes_per_second, link.latency) == (pytest.approx(speed), pytest.approx(latency))


@pytest.mark.parametrize(
    "text", ["", "25GB/s", "5us,25GB/s", "25GB,5us", "25Gb/s,5us", "25GB/s,5", "-25GB/s,5us", "0GB/s,5us", "25iB/s,5us",
             "25GB/s,5us,1us", "25mB/s,5us", "9999999999TB/s,5us"]
)  # fmt: skip
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(LinkError, match="is no link"):
        parse_link(text)
