"""Schedules for equal steps: counts against the literature's formulas and recurrences, and a check of every action."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import astuple
from math import isqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import DISK, Advance, Drop, Restore, Reverse, Store, Tape, count
from tapegrad.remat.schedules.mixed import mixed, total_steps
from tapegrad.remat.schedules.multistage import fewest_stores_split, hierarchical, multistage
from tapegrad.remat.schedules.online import ideal_states, online
from tapegrad.remat.schedules.revolve import beta, extra_steps, repetitions, revolve
from tapegrad.remat.schedules.sqrt import by_segments, even_starts, sqrt, starts_by_bytes

lengths, places = st.integers(0, 120), st.integers(1, 12)

COLUMNS = (1, 2, 3, 4, 5, 8, 10, 15, 20)
EXTRA = {
    10: (45, 20, 15, 14, 13, 10, 9, 9, 9),
    20: (190, 65, 45, 39, 33, 30, 28, 23, 19),
    50: (1225, 285, 180, 144, 122, 95, 88, 83, 78),
    100: (4950, 845, 490, 374, 316, 245, 222, 183, 178),
    200: (19900, 2470, 1305, 948, 790, 580, 522, 447, 378),
    500: (124750, 10044, 4680, 3213, 2576, 1785, 1636, 1347, 1247),
    1000: (499500, 28820, 12155, 7998, 6284, 4285, 3636, 3031, 2747),
}
MIXED = {
    (10, 3): 19, (20, 3): 55, (50, 5): 138, (100, 5): 352, (100, 10): 237, (200, 10): 553, (500, 10): 1732,
    (1000, 3): 12986, (1000, 10): 3921, (1000, 20): 2823,
}  # fmt: skip


@pytest.mark.parametrize("n", EXTRA)
def test_revolve_has_the_published_counts(n: int) -> None:
    for c, wanted in zip(COLUMNS, EXTRA[n], strict=True):
        found = count(revolve(n, c), n)
        assert extra_steps(n, c) == found.advanced == wanted
        assert (found.steps, found.tapes, found.disk) == (wanted + n, 1, 0) and found.ram <= c


def test_the_closed_form_is_the_recurrence() -> None:
    @functools.cache
    def t(n: int, c: int) -> int:
        if n == 1 or c == 1:
            return n * (n - 1) // 2
        return min(j + t(n - j, c - 1) + t(j, c) for j in range(1, n))

    for n in range(1, 81):
        for c in range(1, 13):
            assert extra_steps(n, c) == t(n, c) == count(revolve(n, c), n).advanced, (n, c)
    assert [beta(3, 3), beta(5, 5), beta(10, 3), beta(10, 4), beta(20, 3)] == [20, 252, 286, 1001, 1771]


def test_how_often_a_step_is_repeated_is_the_least_that_the_places_allow() -> None:
    for length, c in itertools.product(range(1, 80), range(1, 6)):
        r = repetitions(length, c)
        assert beta(c, r - 1) < length <= beta(c, r), (length, c)


@given(lengths, places)
def test_revolve_uses_no_more_than_it_may(n: int, c: int) -> None:
    found = count(revolve(n, c), n)
    assert found.ram <= c and found.tapes == min(n, 1) and found.steps == extra_steps(n, c) + n


def test_mixed_is_its_recurrence() -> None:
    @functools.cache
    def m(n: int, s: int) -> int:
        if n <= s + 1:
            return n
        if s == 1:
            return n * (n + 1) // 2 - 1
        return min(1 + m(n - 1, s - 1), min(i + m(i, s) + m(n - i, s - 1) for i in range(2, n)))

    for n in range(1, 41):
        for s in range(1, 10):
            assert total_steps(n, s) == m(n, s), (n, s)
            assert n > 20 or count(mixed(n, s), n).steps == m(n, s), (n, s)
            assert total_steps(n, s) <= extra_steps(n, s) + n
    for (n, s), wanted in MIXED.items():
        assert total_steps(n, s) == count(mixed(n, s), n).steps == wanted
    assert total_steps(150, 20) == count(mixed(150, 20), 150).steps


def test_mixed_keeps_the_tape_of_the_first_step_where_that_is_as_good_as_its_state() -> None:
    late = [Store(1), Advance(1, 3), Tape(3), Reverse(3), Restore(1), Drop(1), Tape(1), Tape(2), Reverse(2), Reverse(1)]
    assert list(mixed(4, 2)) == [Tape(0), *late, Reverse(0)]
    assert [total_steps(n, 0) for n in (0, 1)] == [0, 1] and list(mixed(1, 0)) == [Tape(0), Reverse(0)]
    assert [total_steps(n, n - 2) for n in (3, 4, 5, 9)] == [5, 6, 7, 11]
    for f in (total_steps, mixed):
        with pytest.raises(RecomputeError, match="reversing 2 steps takes at least one unit of memory, not 0"):
            list(f(2, 0))  # type: ignore[call-overload]


@given(lengths, places)
def test_mixed_uses_what_it_may_and_no_more(n: int, s: int) -> None:
    found = count(mixed(n, s), n)
    assert found.units == min(s, max(n - 1, 0)) and found.steps == total_steps(n, s)
    if n <= s + 1:
        assert found.steps == n


@given(lengths, st.integers(0, 6), st.integers(0, 6))
def test_multistage_is_revolve_with_the_quiet_places_on_disk(n: int, ram: int, disk: int) -> None:
    if ram + disk == 0:
        return
    found = count(multistage(n, ram, disk), n)
    assert found.ram <= ram and found.disk <= disk and found.steps == extra_steps(n, ram + disk) + n
    if not disk:
        assert found.reads == found.writes == 0


def test_the_disk_gets_the_states_that_are_read_least() -> None:
    found = count(multistage(100, 5, 5), 100)
    assert (found.steps, found.writes, found.reads) == (322, 15, 34)
    for _, place in enumerate(range(3)):
        other = count(_on_disk(100, 10, set(range(place, place + 5))), 100)
        assert found.writes + found.reads <= other.writes + other.reads


def _on_disk(n: int, c: int, on_disk: set[int]) -> list:
    """Revolve with these places of its stack on disk."""
    depth, found = 0, []
    for a in revolve(n, c):
        found.append(Store(a.step, "disk" if depth in on_disk else "ram") if isinstance(a, Store) else a)
        depth += isinstance(a, Store) - isinstance(a, Drop)
    return found


def test_hierarchical_has_the_published_counts() -> None:
    for n, ram, disk, wanted in ((100, 5, 5, (337, 5, 5)), (200, 10, 10, (602, 10, 10))):
        found = count(hierarchical(n, ram, disk), n)
        assert (found.steps, found.writes, found.reads) == wanted
        assert found.ram <= ram and found.disk <= disk


@given(lengths, st.integers(1, 5), st.integers(0, 5), st.sampled_from([0.0, 0.5, 2.0, 30.0]))
def test_hierarchical_is_between_memory_alone_and_all_in_memory(n: int, ram: int, disk: int, cost: float) -> None:
    found = count(hierarchical(n, ram, disk, cost, cost), n)
    assert found.ram <= ram and found.disk <= disk
    paid = found.advanced + cost * (found.writes + found.reads)
    assert extra_steps(n, ram + disk) <= found.advanced and paid <= extra_steps(n, ram)


def cheapest(n: int, ram: int, disk: int, write: float, read: float) -> float:
    """Extra steps, writes and reads of the best schedule of this form, with every first part tried."""

    @functools.cache
    def at_hand(length: int, free: int) -> float:
        in_memory = extra_steps(length, ram)
        return min(in_memory, write + stored(length, free)) if free and length > 1 else in_memory

    @functools.cache
    def stored(length: int, free: int) -> float:
        parts = [i + at_hand(length - i, free - 1) + read + stored(i, free) for i in range(1, length)]
        return min([float(extra_steps(length, ram)), *parts])

    return at_hand(n, disk)


@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.25, 0.5), (2.0, 2.0), (1.0, 3.0)])
def test_hierarchical_is_the_cheapest_of_its_form(costs: tuple[float, float]) -> None:
    """Also where a first part is one step."""
    write, read = costs
    for n, ram, disk in itertools.product(range(1, 14), (1, 2), range(4)):
        found = count(hierarchical(n, ram, disk, *costs), n)
        assert found.advanced + write * found.writes + read * found.reads == cheapest(n, ram, disk, *costs)


@given(st.integers(0, 300), places)
def test_online_is_one_step_from_optimal_until_its_places_are_used_up(n: int, c: int) -> None:
    found = count(online(n, c), n)
    assert found.ram <= c + 1 and found.tapes == min(n, 1)  # the state before the last step, where its tape will be
    if n:
        best = extra_steps(n, c) + n
        assert found.steps == best + 1 if n <= (c + 1) * (c + 2) // 2 else best < found.steps
        if c > 1:
            assert found.steps <= 1.3 * best + 1


THINNED = {
    1: [1] * 8,
    2: [2, 2, 3, 4, 4, 4, 5, 6, 7, 7, 7, 8, 9, 10, 11, 11, 11, 12, 13, 14, 15, 16, 16, 16],
    3: [2, 4, 3, 2, 6, 5, 4, 4, 10, 9, 7, 6, 5, 12, 10, 8, 7, 6, 5, 18, 16, 14, 13, 12],
    5: [2, 5, 7, 11, 10, 9, 8, 7, 6, 5, 4, 10, 15, 20, 19, 18, 17, 16, 15, 14, 13, 14, 16, 15],
}
"""By places, and from the first length on that is more than they are optimal for: steps beyond the optimum."""


@pytest.mark.parametrize("c", THINNED)
def test_what_thinning_out_costs_when_places_are_used_up(c: int) -> None:
    optimal = (c + 1) * (c + 2) // 2
    beyond = [count(online(n, c), n).steps - extra_steps(n, c) - n for n in range(1, optimal + len(THINNED[c]) + 1)]
    assert beyond == [1] * optimal + THINNED[c]


def test_how_many_states_make_a_loop_cheap() -> None:
    for n in (1, 2, 3, 6, 7, 100, 1000):
        c = ideal_states(n)
        assert count(online(n, c), n).steps <= 3 * n and (c == 1 or c * (c + 1) // 2 < n)


@given(st.integers(1, 400), st.integers(1, 40))
def test_even_segments(n: int, k: int) -> None:
    starts = even_starts(n, k)
    k = min(k, n)
    sizes = [b - a for a, b in zip(starts, [*starts[1:], n], strict=True)]
    assert len(sizes) == k and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes) and sum(sizes) == n
    found = count(sqrt(n, k), n)
    assert found.steps == 2 * n - -(-n // k) and found.ram <= k and found.tapes == -(-n // k)
    assert abs(len(even_starts(n)) - isqrt(n)) <= 1


def test_square_root_examples() -> None:
    for n, segments, extra in ((64, 8, 56), (100, 10, 90), (1000, 32, 968)):
        assert len(even_starts(n)) == segments and count(sqrt(n), n).steps == n + extra


def test_of_segments_that_take_as_much_the_first_found_are_taken() -> None:
    """And what is no chain has one segment, which begins it, and costs nothing."""
    assert starts_by_bytes([1, 1, 1], [0, 1, 0]) == [0, 1, 2]
    assert starts_by_bytes([], []) == [] and even_starts(0, 5) == even_starts(0) == [0]
    assert [len(even_starts(n)) for n in range(1, 14)] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]
    assert astuple(count([], 0)) == (0,) * 8


@pytest.mark.parametrize(("actions", "counts"), [
    ([Tape(0), Tape(1), Tape(2), Reverse(2), Reverse(1), Reverse(0)], (3, 0, 0, 0, 3, 2, 0, 0)),
    ([Store(0), Advance(0, 1), Store(1, DISK), Advance(1, 2), Tape(2), Reverse(2), Restore(1), Drop(1), Tape(1),
      Reverse(1), Restore(0), Drop(0), Tape(0), Reverse(0)], (5, 2, 1, 1, 1, 1, 1, 1)),
])  # fmt: skip
def test_what_a_schedule_costs(actions: list[Any], counts: tuple[int, ...]) -> None:
    """Steps, of which advanced; at most in memory, on disk, tapes, units; writes and reads of the disk."""
    assert astuple(count(actions, 3)) == counts


WRONG: dict[str, list[Any]] = {
    "from a state that is not at hand": [Advance(1, 2)],
    "beyond the end": [Store(0), Advance(0, 3)],
    "nowhere": [Advance(0, 0)],
    "a state that is not at hand": [Store(1)],
    "twice": [Store(0), Store(0)],
    "what was not stored": [Restore(0)],
    "dropped before": [Store(0), Drop(0), Restore(0)],
    "never stored": [Drop(0)],
    "a step from another state": [Tape(1)],
    "a step beyond the end": [Advance(0, 2), Tape(2)],
    "a step on tape already": [Store(0), Tape(0), Restore(0), Tape(0)],
    "a step that is not on tape": [Reverse(1)],
    "not the last step": [Tape(0), Reverse(0)],
    "steps left": [Advance(0, 1), Tape(1), Reverse(1)],
    "a state left": [Store(0), Tape(0), Tape(1), Reverse(1), Reverse(0)],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_schedule_that_is_wrong_is_refused_at_its_first_wrong_action(what: str) -> None:
    actions = WRONG[what]
    right = [Tape(0), Tape(1), Reverse(1), Reverse(0)]
    assert count(right, 2).steps == 2
    wrong = "the end" if what.endswith("left") else str(actions[-1])
    with pytest.raises(RecomputeError, match="a schedule is wrong: " + re.escape(wrong)):
        count(actions, 2)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), min_size=1, max_size=9))
def test_segments_by_bytes_are_the_best_of_all_thresholds(chain: list[tuple[int, int]]) -> None:
    inside, boundary = [a for a, _ in chain], [b for _, b in chain]

    def peak(starts: list[int]) -> int:
        ends = [*starts[1:], len(chain)]
        return sum(boundary[i] for i in starts) + max(sum(inside[a:b]) for a, b in zip(starts, ends, strict=True))

    def cut(threshold: int) -> list[int]:
        starts, total = [0], 0
        for i, x in enumerate(inside):
            if total + x > threshold and i > starts[-1]:
                starts.append(i)
                total = 0
            total += x
        return starts

    starts = starts_by_bytes(inside, boundary)
    assert peak(starts) == min(peak(cut(b)) for b in range(max(inside), sum(inside) + 1))
    count(by_segments(len(chain), starts), len(chain))


@pytest.mark.parametrize("schedule", [revolve, mixed, online, hierarchical])
def test_no_place_at_all_is_an_error(schedule: object) -> None:
    with pytest.raises(RecomputeError, match="at least one"):
        list(schedule(5, 0, 0) if schedule is hierarchical else schedule(5, 0))  # type: ignore[operator]
    with pytest.raises(RecomputeError, match="at least one"):
        list(hierarchical(0, 0, 0))
    with pytest.raises(RecomputeError, match="at least one"):
        even_starts(5, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        [Tape(0), Reverse(0)],  # not all
        [Advance(0, 1), Tape(1), Reverse(1), Tape(0), Reverse(0)],  # from a state that is not at hand
        [Advance(0, 1), Tape(1), Reverse(1), Restore(0), Tape(0), Reverse(0)],  # that was never stored
        [Store(0), Advance(0, 1), Tape(1), Reverse(1), Restore(0), Tape(0), Reverse(0)],  # still stored
        [Tape(0), Tape(1), Reverse(0), Reverse(1)],  # in the wrong order
        [Tape(0), Tape(1), Reverse(1), Reverse(1)],  # twice
        [Store(1), Tape(0), Tape(1), Reverse(1), Reverse(0)],  # under another name
        [Tape(0), Advance(1, 3), Reverse(0)],  # past the end
    ],
)
def test_a_wrong_schedule_is_found(wrong: list) -> None:
    with pytest.raises(RecomputeError, match="a schedule is wrong"):
        count(wrong, 2)


# Steps, writes to disk and reads from it, by n and the states in memory and on disk: MultistageCheckpointSchedule of
# checkpoint_schedules 1.0.4 (https://pypi.org/project/checkpoint-schedules/), with its default trajectory.
MULTISTAGE = {
    (2, 0, 2): (3, 1, 1),
    (2, 1, 1): (3, 0, 0),
    (5, 0, 2): (11, 2, 4),
    (7, 0, 3): (16, 3, 6),
    (9, 1, 3): (21, 3, 6),
    (12, 0, 2): (40, 4, 11),
    (40, 3, 2): (132, 4, 9),
    (60, 0, 8): (185, 36, 59),
    (100, 5, 5): (322, 15, 34),
    (100, 20, 20): (258, 20, 40),
    (250, 4, 4): (1030, 20, 53),
    (250, 8, 8): (829, 36, 80),
    (250, 20, 20): (708, 90, 110),
}


@pytest.mark.parametrize("case", MULTISTAGE, ids=str)
def test_multistage_writes_no_more_than_other_implementations(case: tuple[int, int, int]) -> None:
    counts = count(multistage(*case), case[0])
    assert (counts.steps, counts.writes, counts.reads) == MULTISTAGE[case]


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_multistage_writes_no_state_that_is_not_read(n: int) -> None:
    for ram, disk in ((0, 1), (1, 1), (0, 7), (2, 4), (3, 50)):
        unread: set[int] = set()
        for action in multistage(n, ram, disk):
            if isinstance(action, Store) and action.where == "disk":
                unread.add(action.step)
            elif isinstance(action, Restore):
                unread.discard(action.step)
            elif isinstance(action, Drop):
                assert action.step not in unread


@functools.cache
def _fewest_stores(l: int, c: int) -> int:  # noqa: E741
    """Of all schedules with the least number of steps: the fewest states stored besides the first and read."""
    if l == 1 or c == 1:
        return 0
    steps = extra_steps(l, c)
    return min(
        (0 if l - j == 1 else 1 + _fewest_stores(l - j, c - 1)) + _fewest_stores(j, c)
        for j in range(1, l)
        if j + extra_steps(l - j, c - 1) + extra_steps(j, c) == steps
    )


@pytest.mark.parametrize("c", range(1, 9))
def test_multistage_stores_the_fewest_states(c: int) -> None:
    for n in range(1, 50):
        actions = list(revolve(n, c, fewest_stores_split))
        restored = sum(
            isinstance(a, Store) and not isinstance(b, Tape) for a, b in zip(actions, actions[1:], strict=False)
        )
        assert restored == _fewest_stores(n, c) + (n > 1)


@pytest.mark.parametrize("numbers", [(-1, 2, 2), (10, -1, 3), (10, 3, -1)])
def test_negative_numbers_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(RecomputeError, match="multistage: n="):
        list(multistage(*numbers))
