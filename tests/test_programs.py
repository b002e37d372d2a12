"""Random programs in every way of running them; and that the search finds what is planted.

With ``tests`` on the path, ``python -m programs.search`` runs as many as one likes, and ``python -m programs.stress``
threads with interrupts and forks.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from programs import decisions
from programs.draw import draw
from programs.search import failure
from programs.stress import Stress
from programs.variants import Case, compiled, wrong

import tapegrad as tg
from tapegrad.autodiff import custom_gradient

PROGRAMS = 30


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


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs(seed: int) -> None:
    program, found = failure(seed, Case.VARIANTS, 0.0)
    assert found is None, f"seed {seed}, {found['variant']}: {found['how']}\n{found['text']}"


@pytest.mark.parametrize("seed", decisions.SEEDS)
def test_counts_stay_within_those_written_down(seed: int) -> None:
    """Kernels, bytes, reruns and evictions are at most 2 % more than ``decisions.csv`` says."""
    assert decisions.excess(seed) == []


def _count(variants: tuple[str, ...], most: int) -> int:
    """How many programs it takes until one fails."""
    for count in range(most):
        if wrong(draw(count), count, variants) is not None:
            return count + 1
    return most + 1


def test_a_stop_that_forward_mode_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted: stop_gradient stops tapes alone."""
    monkeypatch.setattr(tg, "stop_gradient", lambda x: tg.asarray(x) * 1.0)
    assert _count((), 60) <= 60


def test_a_wrong_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_gradient.CustomGradient, "__call__", lambda self, *args: self.__wrapped__(*args)[0])
    assert _count((), 60) <= 60


def test_values_changed_by_a_budget_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted: what is made again has another last bit."""
    from tapegrad.memory.budget import replay

    made: Any = replay._made

    def other(recipe: Any, inputs: Any) -> Any:
        out = made(recipe, inputs)
        if isinstance(out.array, np.ndarray) and out.array.dtype == np.float64 and out.array.size and not out.keeps:
            out.array = np.nextafter(out.array, np.inf)
        return out

    monkeypatch.setattr(replay, "_made", other)
    assert _count(("budget",), 100) <= 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_threads_tapes_budgets_and_forks() -> None:
    """Without interrupts: one that comes while another one is being dealt with may still leave a budget in force."""
    stress = Stress(seconds=6, workers=3, seed=0, interrupts=False)
    wrong_things = stress.run()
    assert not wrong_things, wrong_things[0]
    assert stress.told["forks"] and stress.told["programs with the right bits"] > 5
