"""Rotor: published instances, all plans of small chains, the least budget, and its error."""

from __future__ import annotations

from functools import cache
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import Advance, Tape, count
from tapegrad.remat.schedules.rotor import Rotor, Stage, least_bytes

EQUAL = [Stage(f"s{i}", 1, 2, 1000, 5000) for i in range(16)]


@pytest.mark.parametrize(
    ("share", "slowdown"),
    [(0.8, 1.083), (0.6, 1.146), (0.5, 1.188), (0.4, 1.229), (0.3, 1.271), (0.2, 1.333), (0.15, 1.5)],
)
def test_equal_stages_have_the_published_slowdown(share: float, slowdown: float) -> None:
    plan = Rotor(EQUAL, int(share * 80_000))
    assert round(plan.cost / plan.plain_cost, 3) == slowdown
    assert count(plan.actions(), 16).steps + 32 == plan.cost


def pyramid() -> list[Stage]:
    """Early stages large and cheap, as in a convolutional network."""
    return [Stage(f"s{i}", 1 + i, 2 + 2 * i, 64000 >> i, 5 * (64000 >> i)) for i in range(7)]


def peak_of(stages: list[Stage], given: int, plan: Rotor) -> int:
    """The most bytes that a schedule holds at once, followed action by action."""
    out = [given, *(s.out for s in stages)]
    stored: set[int] = set()
    taped: set[int] = set()
    peak, gradient = 0, out[-1]
    current = 0
    for a in plan.actions():
        # A stored state costs nothing if it is the chain's input, or the output of a step whose tape is there.
        held = sum(out[i] for i in stored if i and i - 1 not in taped) + sum(stages[i].taped for i in taped)
        here = 0 if current in stored or not current or current - 1 in taped else out[current]
        match a:
            case Advance(start, stop):
                for i in range(start, stop):
                    peak = max(peak, held + here + out[i + 1] + stages[i].forward_overhead + gradient)
                    here = out[i + 1]
                current = stop
            case Tape(step):
                peak = max(peak, held + here + stages[step].taped + stages[step].forward_overhead + gradient)
                taped.add(step)
                current = step + 1
            case _:
                kind = type(a).__name__
                if kind == "Store":
                    stored.add(a.step)
                elif kind == "Drop":
                    stored.discard(a.step)
                elif kind == "Restore":
                    current = a.step
                else:
                    peak = max(peak, held + out[a.step] + gradient + stages[a.step].backward_overhead)
                    taped.discard(a.step)
                    gradient, current = out[a.step], a.step
    return peak


def test_a_pyramid_pays_more_the_less_it_has() -> None:
    stages = pyramid()
    need, worst = least_bytes(stages)
    full = sum(s.taped for s in stages)
    costs = [Rotor(stages, int(f * full)).cost / Rotor(stages, 2 * full).cost for f in (1.1, 0.9, 0.8, 0.7)]
    assert worst == 0 and costs[0] == 1 and costs == sorted(costs) and costs[-1] > 1
    with pytest.raises(RecomputeError, match=rf"stage 0 \(s0\) has a tape of 320000 bytes.*least budget is {need} "):
        Rotor(stages, need - 1)
    assert Rotor(stages, need).cost < inf


def test_running_a_stage_needs_room_beside_the_gradient_of_what_follows() -> None:
    stages = [Stage("a", 1, 1, 0, 100, forward_overhead=700), Stage("b", 1, 1, 600, 600)]
    assert least_bytes(stages) == (1300, 0) and Rotor(stages, 1300).cost == 1 + (1 + 1) + (1 + 1)


stage = st.builds(
    lambda f, b, out, more, over, under: Stage("s", f, b, 100 * out, 100 * (out + more), 100 * over, 100 * under),
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 6), st.integers(0, 6), st.integers(0, 2), st.integers(0, 2),
)  # fmt: skip


def at_the_edge(*figures: tuple[int, int, int, int, int, int]) -> list[Stage]:
    """Stages of so many hundreds of bytes."""
    return [Stage("s", f, b, 100 * o, 100 * taped, 100 * over, 100 * under) for f, b, o, taped, over, under in figures]


@given(st.lists(stage, min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 50))
@example(at_the_edge((1, 1, 0, 1, 2, 0), (2, 1, 1, 1, 0, 0)), 1, 3)  # the chain's input takes nothing of the budget
@example(at_the_edge((2, 1, 1, 1, 4, 0), (1, 1, 2, 2, 0, 0)), 0, 6)  # to run a stage takes its output, too
@example(at_the_edge((1, 1, 0, 1, 0, 0), (1, 2, 0, 0, 4, 0), (1, 2, 2, 2, 0, 0)), 1, 6)  # and the last one's gradient
def test_the_plan_is_the_best_of_all_and_keeps_its_budget(stages: list[Stage], given: int, units: int) -> None:
    out = [100 * given, *(s.out for s in stages)]

    @cache
    def best(s: int, t: int, m: int) -> float:
        """The recurrence, word for word."""
        if m < 0:
            return inf
        a, found = stages[s], inf
        if m >= a.taped + max(out[t + 1] + a.forward_overhead, out[s + 1] + out[s] + a.backward_overhead):
            found = a.forward + a.backward + (best(s + 1, t, m - a.taped) if s < t else 0)
        for cut in range(s + 1, t + 1):
            run = max((out[k] if k > s else 0) + out[k + 1] + stages[k].forward_overhead for k in range(s, cut))
            if m >= out[t + 1] + run:
                time = sum(stages[k].forward for k in range(s, cut))
                found = min(found, time + best(cut, t, m - out[cut]) + best(s, cut - 1, m))
        return found

    budget = 100 * units
    wanted = best(0, len(stages) - 1, budget)
    assert (wanted < inf) == (budget >= least_bytes(stages, 100 * given)[0])
    if wanted == inf:
        with pytest.raises(RecomputeError, match="least budget"):
            Rotor(stages, budget, 100 * given)
        return
    plan = Rotor(stages, budget, 100 * given)
    assert plan.cost == wanted
    runs = [0] * len(stages)
    for a in plan.actions():
        for i in range(a.start, a.stop) if isinstance(a, Advance) else [a.step] if isinstance(a, Tape) else []:
            runs[i] += 1
    assert sum(r * s.forward + s.backward for r, s in zip(runs, stages, strict=True)) == wanted
    count(plan.actions(), len(stages))
    assert peak_of(stages, 100 * given, plan) <= budget


def test_rounding_never_exceeds_the_budget() -> None:
    stages = [Stage("s", 1, 2, 1009 + 7 * i, 3001 + 11 * i) for i in range(12)]
    need, _ = least_bytes(stages)
    for budget in (need * 6 // 5, need * 2, need * 3):
        exact, coarse = Rotor(stages, budget), Rotor(stages, budget, slots=40)
        assert exact.cost <= coarse.cost and peak_of(stages, 0, coarse) <= budget
    with pytest.raises(RecomputeError, match="in units of"):
        Rotor(stages, need, slots=20)
    with pytest.raises(RecomputeError, match="without stages"):
        Rotor([], 100)
    fixed = Rotor(stages, need * 2 + 5000, fixed=5000)
    assert fixed.cost == Rotor(stages, need * 2).cost


def test_sizes_with_a_large_divisor_are_counted_exactly_where_so_many_units_are_allowed() -> None:
    stages = [Stage("a", 1, 1, 1000, 2000), Stage("b", 1, 1, 0, 1000)]
    assert least_bytes(stages) == (3000, 1) and Rotor(stages, 3001, slots=3).cost == 5
    with pytest.raises(RecomputeError, match="3000 bytes; in units of 1501 bytes, more"):
        Rotor(stages, 3001, slots=2)


def test_up_to_fifty_stages_the_units_are_five_hundred() -> None:
    """Where they are fewer the same budget allows a slower plan alone."""
    stages = [Stage("s", 1, 2, 1009 + 7 * i, 3001 + 11 * i) for i in range(15)]
    budget = least_bytes(stages)[0] * 117 // 100
    assert Rotor(stages, budget).cost == Rotor(stages, budget, slots=500).cost == 91


def test_stages_that_take_no_bytes_need_no_budget() -> None:
    plan = Rotor([Stage(f"s{i}", 1, 2, 0, 0) for i in range(3)], 0)
    assert plan.cost == plan.plain_cost == 9 and count(plan.actions(), 3).steps == 3


def test_one_byte_too_few_is_too_few() -> None:
    with pytest.raises(RecomputeError, match="least budget is 1 bytes"):
        Rotor([Stage("s", 1, 2, 0, 1)], 0)
    assert Rotor([Stage("s", 1, 2, 0, 1)], 1).cost == 3


def test_one_plan_has_the_schedules_of_all_smaller_budgets() -> None:
    plan = Rotor(EQUAL, 80_000)
    assert list(plan.units) == list(range(least_bytes(EQUAL)[0] // 1000, 81))
    runs = [count(plan.actions(units), 16).steps for units in plan.units]
    assert runs == sorted(runs, reverse=True)
    assert all(
        count(Rotor(EQUAL, 1000 * units).actions(), 16).steps == r for units, r in zip(plan.units, runs, strict=True)
    )
