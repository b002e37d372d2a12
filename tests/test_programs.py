"""Random programs in every way of running them; and that the search finds what is planted.

With ``tests`` on the path, ``python -m programs.search`` runs as many as one likes, and ``python -m programs.stress``
threads with interrupts and forks.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from programs import contracts, decisions
from programs.draw import draw
from programs.search import failure
from programs.stress import Stress
from programs.variants import Case, compiled, wrong

import tapegrad as tg

PROGRAMS = (0, 1, 2, 4, *range(6, 31))
"""Seeds; the search for plans takes half a minute in those left out (``programs.search`` runs them)."""


@pytest.fixture(autouse=True)
def kernels(kernels_at_once: None) -> None:
    """Captured functions and regions run by machine code, where there is some."""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What is imported at its first use need not be looked at by the collector again and again."""
    decisions.ready()


def test_a_seed_gives_one_program() -> None:
    assert [draw(seed).text() for seed in range(20)] == [draw(seed).text() for seed in range(20)]
    assert all(callable(compiled(draw(seed))) for seed in range(20))


def test_programs_do_everything() -> None:
    from programs import ops

    kinds = set().union(*(draw(seed).kinds() for seed in range(400)))
    assert {op.kind for op in ops.OPS} | {f"way: {way}" for way in ops.WAYS} <= kinds


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("seed", PROGRAMS)
def test_random_programs(seed: int) -> None:
    program, found = failure(seed, Case.VARIANTS, 0.0)
    assert found is None, f"seed {seed}, {found['variant']}: {found['how']}\n{found['text']}"


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("seed", decisions.SEEDS)
def test_counts_stay_within_those_written_down(seed: int) -> None:
    """Kernels, bytes, reruns and evictions are at most 2 % more than ``decisions.csv`` says."""
    assert decisions.excess(seed) == []


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_a_larger_limit_never_fails_where_a_smaller_one_suffices(seed: int) -> None:
    contracts.holds(contracts.monotone, Case(draw(seed), seed))


@pytest.mark.parametrize("seed", range(2, 60, 7))
def test_nothing_is_left_of_a_run_that_ctrl_c_ends_at_any_moment(seed: int) -> None:
    assert contracts.holds(contracts.interrupted, Case(draw(seed), seed)) > 0


@pytest.mark.parametrize("seed", range(3, 60, 11))
def test_many_steps_retain_nothing(seed: int) -> None:
    contracts.holds(contracts.repeated, Case(draw(seed), seed), 25)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("seed", range(4, 60, 11))
def test_a_forked_child_gets_the_plain_bits(seed: int) -> None:
    contracts.holds(contracts.forked, Case(draw(seed), seed))


# What is planted is found --------------------------------------------------------------------------------------------


def _found(variants: tuple[str, ...], most: int, variant: str = "plain") -> bool:
    """Whether one of the first programs fails in a variant."""
    failures = (wrong(draw(seed), seed, variants) for seed in range(most))
    return any(failure is not None and failure[0] == variant for failure in failures)


def test_a_stop_that_forward_mode_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted: stop_gradient stops tapes alone."""
    monkeypatch.setattr(tg, "stop_gradient", lambda x: tg.asarray(x) * 1.0)
    assert _found((), 60)


def test_a_wrong_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tg, "custom_gradient", lambda f: lambda *args: f(*args)[0])
    assert _found((), 60)


def test_values_changed_by_a_budget_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted: within a budget a hyperbolic tangent has another last bit."""
    budgets, budget, tanh = [], tg.memory_budget, tg.tanh

    def entered(*args: Any) -> Any:
        budgets.append(1)
        return budget(*args)

    monkeypatch.setattr(tg, "memory_budget", entered)
    monkeypatch.setattr(tg, "tanh", lambda x: tanh(x) * (1.0 + 2.0**-23) if budgets else tanh(x))
    assert _found(("budget",), 60, "budget")


def test_a_limit_that_is_exceeded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted: budgets of 512 bytes more."""
    budget = tg.memory_budget
    monkeypatch.setattr(tg, "memory_budget", lambda limit, policy=None: budget(limit + 512, policy))
    assert _found(("budget",), 60, "budget")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_threads_tapes_budgets_and_forks() -> None:
    """Without interrupts: one that comes while another one is being dealt with may still leave a budget in force."""
    stress = Stress(seconds=3, workers=3, seed=0, interrupts=False)
    wrong_things = stress.run()
    assert not wrong_things, wrong_things[0]
    assert stress.told["forks"] and stress.told["programs with the right bits"] > 5
