"""The search: against trying everything, and over budgets."""

from __future__ import annotations

import itertools

import pytest

from tapegrad.profile.plan.lives import alive_at
from tapegrad.profile.plan.problem import Outcome, Problem
from tapegrad.profile.plan.search import Search
from tests.profile.plan.made import MIB, nested, training
from tests.profile.plan.test_predicting import plain


def antichains(problem: Problem) -> list[tuple[int, ...]]:
    n = len(problem.candidates)
    found = []
    for size in range(n + 1):
        for some in itertools.combinations(range(n), size):
            if not any(set(problem.candidates[i].within) & set(some) for i in some):
                found.append(some)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_integer_program_finds_what_trying_everything_finds(seed: int) -> None:
    problem = nested(seed)
    outcomes = [problem.outcome(some) for some in antichains(problem)]
    search = Search(problem)
    assert search.least.peak_bytes == min(o.peak_bytes for o in outcomes)
    low, high = search.least.peak_bytes, search.plain.peak_bytes
    for budget in (low, (low + high) // 2, (low + 3 * high) // 4, high):
        found = search.within(budget)
        assert found is not None and found.peak_bytes <= budget
        assert found.step_ns == min(o.step_ns for o in outcomes if o.peak_bytes <= budget)
        assert not any(set(problem.candidates[i].within) & set(found.chosen) for i in found.chosen)
    chosen = search.least.chosen
    assert not any(set(problem.candidates[i].within) & set(chosen) for i in chosen)
    assert search.within(low - 1) is None
    for share in (0, 0.05, 0.2):
        ns = int(problem.step_ns * (1 + share))
        found = search.shortest_peak(ns)
        assert found.step_ns <= ns
        assert found.peak_bytes == min(o.peak_bytes for o in outcomes if o.step_ns <= ns)


def test_a_smaller_budget_is_never_answered_with_more_bytes_or_less_time() -> None:
    for problem in (nested(7, 4), Problem(plain("transformer")[0])):
        search = Search(problem)
        low, high = search.least.peak_bytes, search.plain.peak_bytes
        before: Outcome | None = None
        for i in range(25):
            budget = high - (high - low) * i // 24
            found = search.within(budget)
            assert found is not None and found.peak_bytes <= budget
            if before is not None:
                assert found.peak_bytes <= before.peak_bytes and found.step_ns >= before.step_ns
            before = found


def test_no_plan_is_better_than_another_in_the_list() -> None:
    points = Search(nested(3)).pareto()
    assert 2 <= len(points) <= 12
    for a, b in itertools.pairwise(points):
        assert a.peak_bytes > b.peak_bytes and a.step_ns < b.step_ns


def test_what_fits_is_left_alone() -> None:
    search = Search(nested(1))
    assert search.within(search.plain.peak_bytes) == search.plain
    assert search.within(1 << 50) == search.plain
    assert search.shortest_peak(search.problem.step_ns) == search.plain


def test_of_equal_calls_the_earliest_are_taken() -> None:
    problem = Problem(training(steps=2))
    found = Search(problem).within(problem.outcome(()).peak_bytes - 2 * 2 * MIB)
    assert found is not None
    assert [problem.candidates[i].ordinal for i in found.chosen] == [0, 1]


def test_of_many_calls_no_more_are_taken_than_a_budget_asks_for() -> None:
    problem = Problem(training(steps=2, blocks=100))
    search = Search(problem)
    for few in (1, 30, 80):
        found = search.within(search.plain.peak_bytes - few * 2 * MIB)
        assert found is not None and len(found.chosen) == few


def test_effects_add_up() -> None:
    problem = nested(5)
    for some in antichains(problem)[:40]:
        profiles = [problem.profile(()), *(problem.effect(i) for i in some)]
        for moment, nbytes in problem.profile(some):
            assert sum(alive_at(profile, moment) for profile in profiles) == nbytes
