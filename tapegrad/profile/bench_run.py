"""Measuring one workload three ways: plainly, checkpointed, and inside half of the memory; nothing is printed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import tapegrad as tg
from tapegrad.errors import BudgetError
from tapegrad.profile.bench_workloads import Workload, Wrap

WAYS = ("plain", "checkpoint", "budget 50%")


@dataclass
class Way:
    """One way to compute the same gradients, measured; times in ns.

    ``base_bytes`` were there before the step; half of what a plain step needs beyond them is the budget.
    """

    way: str
    peak_bytes: int = 0
    base_bytes: int = 0
    budget_bytes: int | None = None
    reruns: int = 0
    evictions: int = 0
    identical: bool = True
    error: str | None = None
    step_ns: list[int] = field(default_factory=list)

    @property
    def median_ns(self) -> int:
        """The time of a step."""
        return round(statistics.median(self.step_ns))

    def times(self, plain: Way) -> float:
        """How many times as long as a plain step: of the medians, which stand beside it."""
        return self.median_ns / plain.median_ns


def measure(work: Workload, rounds: int, on_round: Callable[[int], None]) -> list[Way]:
    """Peak and gradients of one step in every way, then times in turns, so that noise falls on all alike."""
    plain = Way("plain")
    _step(work, plain)  # compiles, and fills caches
    wanted = _counted(work, plain)
    checkpoint = Way("checkpoint")
    budget = Way("budget 50%", budget_bytes=plain.base_bytes + (plain.peak_bytes - plain.base_bytes) // 2)
    ways = [plain, checkpoint, budget]
    for way in ways[1:]:
        try:
            way.identical = _counted(work, way) == wanted
        except BudgetError as error:
            way.error = str(error).splitlines()[0]
    for number in range(rounds):
        for way in ways:
            if way.error is None:
                begin = time.perf_counter_ns()
                _step(work, way)
                way.step_ns.append(time.perf_counter_ns() - begin)
        on_round(number + 1)
    return ways


def _counted(work: Workload, way: Way) -> list[bytes]:
    """One step under the ledger; the bytes of its gradients."""
    with tg.measure() as m:
        way.base_bytes = m.live_bytes
        gradients = _step(work, way)
    way.peak_bytes, way.reruns, way.evictions = m.peak_bytes, m.reruns, m.evictions
    return [g.numpy().tobytes() for g in gradients]


def _step(work: Workload, way: Way) -> list[tg.Tensor]:
    """The gradients; waits until they are computed."""
    limit: AbstractContextManager[object] = nullcontext()
    if way.budget_bytes is not None:
        limit = tg.memory_budget(way.budget_bytes)
    wrap: Wrap = tg.recompute_grad if way.way == "checkpoint" else lambda f: f
    with limit:
        with tg.GradientTape() as tape:
            loss = work.loss(wrap)
        gradients = tape.gradient(loss, work.variables)
        for g in gradients:
            g.numpy()  # waits
    return gradients
