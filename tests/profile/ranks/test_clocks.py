"""Clocks of ranks: made-up offsets, delays and drifts are found again."""

from __future__ import annotations

import random

import pytest

from tapegrad.profile.ranks.clocks import PINGS, Clock, Ping, Reading, reading


def pings(ahead: int, delays: list[tuple[int, int]], start: int = 10**12) -> list[Ping]:
    """Of a clock that is so much ahead; ``delays``: of each ping there and back, in ns."""
    found = []
    for there, back in delays:
        found.append((start, start + there + ahead, start + there + back))
        start += there + back + 100
    return found


@pytest.mark.parametrize("ahead", [0, 7, -3_000_000, 5 * 10**15])
def test_the_ping_that_takes_least_tells(ahead: int) -> None:
    chance = random.Random(1)
    delays = [(chance.randint(20_000, 900_000), chance.randint(20_000, 900_000)) for _ in range(PINGS - 1)]
    found = reading(pings(ahead, [*delays[:4], (900, 900), *delays[4:]]))
    assert found.ahead == ahead
    assert abs(reading(pings(ahead, [(900, 1100)])).ahead - ahead) <= 100  # half of what the two ways differ by


def test_an_error_is_at_most_half_of_the_shortest_round_trip() -> None:
    chance = random.Random(2)
    for _ in range(200):
        delays = [(chance.randint(0, 10**6), chance.randint(0, 10**6)) for _ in range(PINGS)]
        assert abs(reading(pings(12345, delays)).ahead - 12345) <= min(map(sum, delays)) / 2 + 1


def test_a_clock_that_drifts_is_right_in_between_and_around() -> None:
    theirs = lambda ns: ns + 4_000_000 + ns // 20_000  # 50 us a second
    readings = [Reading(theirs(ns), theirs(ns) - ns) for ns in (10**9, 3601 * 10**9)]
    clock = Clock(*readings)
    for ns in (10**9, 5 * 10**8, 17 * 10**9, 3601 * 10**9, 3700 * 10**9):
        assert abs(clock.by_rank_0(theirs(ns)) - ns) <= 2
    assert abs(Clock(readings[0]).by_rank_0(theirs(17 * 10**9)) - 17 * 10**9) == 800_000  # with one reading: 16 s later


def test_two_readings_at_one_moment_are_one() -> None:
    assert Clock(Reading(50, 20), Reading(50, 30)).by_rank_0(100) == 80
