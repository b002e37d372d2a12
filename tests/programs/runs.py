"""What a program asks of the way in which it is run: plainly, with checkpoints, within budgets."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from checks import laid

import tapegrad as tg
from tapegrad.errors import BudgetError
from tapegrad.tracing.metrics import Measure

NAMED = "n"

POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "recompute": dict,
    "recompute, checked": lambda: {"check": "values"},
    "save names": lambda: {"policy": tg.policies.save_names(NAMED)},
    "save products": lambda: {"policy": tg.policies.save_matmuls},
    "save everything": lambda: {"policy": tg.policies.save_everything},
    "offload names": lambda: {"policy": tg.policies.offload_names(NAMED)},
    "save or offload": lambda: {
        "policy": tg.policies.any_of(tg.policies.save_matmuls, tg.policies.offload_names(NAMED))
    },
    "offload everything": lambda: {"policy": lambda value: tg.policies.OFFLOAD},
}
"""Options of a checkpoint, by name."""


class Run:
    """Plainly: no checkpoint, no budget."""

    nudge: Any = 0.0
    measure: Measure | None = None
    data: int = 0
    """Bytes alive when the data was made."""

    def wrap(self, number: int, f: Callable) -> Callable:
        """Block ``number``."""
        return f

    def loop(self, step: Callable, state: Any, n: int) -> Any:
        """``n`` steps from ``state``."""
        for _ in range(n):
            state = step(state)
        return state

    def captured(self, f: Callable) -> Callable:
        """A function that is called several times."""
        return f

    def laid(self, module: Any, x: np.ndarray, lies: str) -> Any:
        """A matrix of ``module``'s whose elements lie so; the reference knows rows alone."""
        return tg.asarray(laid(x, lies), copy=False) if module is tg else x

    def reach(self, point: int) -> None:
        """A point of the program is reached."""
        if point == 0 and self.measure is not None:
            self.data = self.measure.live_bytes


class Captured(Run):
    """With its function captured; ``stats`` are the function's."""

    stats: Any = None

    def captured(self, f: Callable) -> Callable:
        found = tg.function(f)
        self.stats = found.stats
        return found


class CapturedWithin(Captured):
    """Captured within a budget from its second call on: what replays take at least, and a ``share`` of what more they
    would take without one.

    ``budget``: its bytes; None: the function cannot be captured.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.budget: int | None = None

    def captured(self, f: Callable) -> Callable:
        made: list[Any] = []

        def call(*args: Any) -> Any:
            if not made:
                result = f(*args)  # a dry run may ask what was run before
                found = tg.memory.predict_peak(f, *args, budgets=[], least=True).as_function
                gc.collect()  # the books of dry runs refer to themselves
                if found is not None and found.least_bytes is not None:
                    more = int(self.share * (found.peak_bytes - found.least_bytes))
                    self.budget = max(1, found.least_bytes + more)
                made.append(tg.function(f, budget=self.budget))
                self.stats = made[0].stats
                return result
            return made[0](*args)

        return call


class Predicted(Run):
    """With its function predicted before it is called, and once more within a budget of a ``share`` of the room.

    ``wrong``: where what is measured then is something else.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.wrong: list[str] = []

    def captured(self, f: Callable) -> Callable:
        def predicted(*args: Any) -> Any:
            f(*args)  # a dry run may ask what was run before, and constants are made once
            live, peak = self._compare(f, args, None)
            gc.collect()
            with tg.measure() as m:  # a call may leave values with its caller
                now = m.live_bytes
            self._compare(f, args, now + int(self.share * (peak - live)))
            return f(*args)

        return predicted

    def _compare(self, f: Callable, args: tuple[Any, ...], limit: int | None) -> tuple[int, int]:
        """One prediction, and one call: bytes alive before it, and at its peak."""
        found = tg.memory.predict_peak(f, *args, budgets=[] if limit is None else [limit])
        gc.collect()  # the books of dry runs refer to themselves
        with tg.measure() as m:
            live, needed = m.live_bytes, 0
            with tg.memory_budget(limit) if limit is not None else nullcontext():
                try:
                    f(*args)
                except BudgetError as e:
                    needed = e.needed_bytes
                    traceback.clear_frames(e.__traceback__)
        point = found.curve[0] if found.curve else found
        for name in ("peak_bytes", "kernel_runs", "bytes_moved", "evictions", "restored"):
            wanted, got = getattr(point, name, None), getattr(m, name)
            if wanted is not None and wanted != got:
                self.wrong.append(f"within {limit} bytes {name} is {got}, predicted {wanted}")
        for parts in (m.peak_by_category, m.peak_by_primitive, m.peak_by_line):
            if sum(parts.values()) != m.peak_bytes:
                self.wrong.append(f"within {limit} bytes the parts of the peak of {m.peak_bytes} bytes are {parts}")
        if needed != getattr(point, "needed_bytes", 0):
            self.wrong.append(f"within {limit} bytes {needed} are needed, predicted {point.needed_bytes}")
        return live, m.peak_bytes


@dataclass
class Modified(Run):
    """With checkpoints (``policies``: names, for one block after another), checkpointed loops, and budgets.

    ``spans``: the points between which each budget holds; ``limits``: its bytes; ``offloading``: its policy is to move
    named values.  ``peaks``: of each budget that was left, the most bytes and the limit.
    """

    policies: tuple[str, ...] = ()
    loops: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    limits: tuple[int, ...] = ()
    offloading: bool = False
    at: Callable[[int], None] | None = None
    peaks: list[tuple[int, int]] = field(default_factory=list)
    _stacks: list[ExitStack] = field(default_factory=list)

    def wrap(self, number: int, f: Callable) -> Callable:
        if not self.policies:
            return f
        return tg.recompute_grad(f, **POLICIES[self.policies[number % len(self.policies)]]())

    def loop(self, step: Callable, state: Any, n: int) -> Any:
        return tg.checkpointed_loop(step, state, n, snapshots=2) if self.loops else super().loop(step, state, n)

    def reach(self, point: int) -> None:
        super().reach(point)
        if self.at is not None:
            self.at(point)
        for stack, (start, stop), limit in zip(self._stacks, self.spans, self.limits, strict=False):
            if stop == point:
                stack.close()
            if start == point:
                policy = tg.policies.offload_names(NAMED) if self.offloading else None
                m = stack.enter_context(tg.memory_budget(limit, policy))
                stack.callback(lambda m=m, limit=limit: self.peaks.append((m.peak_bytes, limit)))

    @contextmanager
    def entered(self) -> Iterator[Modified]:
        """Budgets that the program has begun end with the block, at the latest."""
        with ExitStack() as rest:
            self._stacks = [rest.enter_context(ExitStack()) for _ in self.spans]
            yield self
