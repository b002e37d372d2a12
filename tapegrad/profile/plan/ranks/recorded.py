"""The step of a recorded run whose communication is predicted: when its collectives begin, and are needed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low

from tapegrad.errors import TapegradError
from tapegrad.profile.compare import steady_steps
from tapegrad.profile.plan.ranks.collectives import Collective
from tapegrad.profile.plan.ranks.timeline import Step
from tapegrad.tracing import communication as recorded
from tapegrad.tracing.run import Run

_SETTING_UP = 2
"""Steps, at the beginning, that are left out if there are others."""
_Known = dict[tuple[str, int, str], int]
"""By group, number and kind of a collective."""


class CommunicationError(TapegradError, ValueError):
    """A run of which no communication can be predicted."""


@dataclass(frozen=True)
class RecordedStep:
    """A step, the ns that it took, and how many ranks took part."""

    step: Step
    ns: int
    ranks: int


def step_of(run: Run) -> RecordedStep:
    """Of the complete steps that communicate, one of median computation.  Raises CommunicationError."""
    everybodys = recorded.collectives(run)
    rank = run.meta.get("rank", 0)  # whose steps are those of the run
    mine = [c for c in everybodys if c.rank == rank and c.done >= 0 and c.kind != "send"]  # that is its receiver's
    most, computed = _most_bytes(everybodys), _clock(mine)
    steps = []
    for row in steady_steps(run):
        begin, end = run.steps["begin_ns"][row], run.steps["end_ns"][row]
        seconds = _since(begin, computed)
        own = [_collective(c, most, seconds) for c in mine if begin <= c.entered < end]
        if own:
            own.sort(key=lambda c: c.ready)
            steps.append((row, RecordedStep(Step(seconds(end), own), end - begin, max(c.ranks for c in mine))))
    if not steps:
        raise CommunicationError(
            f"{'no complete step of the run communicates' if mine else 'the run has no communication'}: record three "
            "steps or more of a program that takes its gradients with tg.distributed.GradientTape, or calls "
            "collectives; one process is enough: tapegrad profile PROGRAM"
        )
    steps = [s for s in steps if s[0] >= _SETTING_UP] or steps
    middle = median_low(found.step.computation for _, found in steps)
    return next(found for _, found in steps if found.step.computation == middle)


def _clock(mine: list[recorded.Collective]) -> Callable[[int], int]:
    """How long the program has computed, and not waited, at a moment of the run; all in ns."""
    waits = sorted((c.done, c.waited) for c in mine)
    over, total = [end for end, _ in waits], [0, *accumulate(ns for _, ns in waits)]
    return lambda moment: moment - total[bisect_right(over, moment)]


def _needed(c: recorded.Collective) -> int:
    """When the program waited for what was under way; when it was done, if the program never did."""
    return c.done if c.needed < 0 else c.needed


def _since(begin: int, computed: Callable[[int], int]) -> Callable[[int], float]:
    """Seconds that were computed from ``begin`` until a moment."""
    return lambda moment: (computed(moment) - computed(begin)) / 1e9


def _most_bytes(everybodys: list[recorded.Collective]) -> _Known:
    """What the rank gave that gave most: of a scatter it is the root that gives all."""
    found: _Known = {}
    for c in everybodys:
        key = c.group, c.number, c.kind
        found[key] = max(c.bytes, found.get(key, 0))
    return found


def _collective(c: recorded.Collective, most: _Known, seconds: Callable[[int], float]) -> Collective:
    nbytes, ready = most[c.group, c.number, c.kind], seconds(c.entered)
    if c.kind == "scatter":
        nbytes //= max(1, c.ranks)
    elif c.kind == "gather_pieces":
        nbytes *= c.ranks
    return Collective(
        c.kind, nbytes, ready, max(ready, seconds(_needed(c))) if c.under_way else ready, c.file, c.line,
        "exact=False" not in c.detail, c.walk if c.under_way else -1, re.sub(r"\(.*?\)", "", c.detail),
    )  # fmt: skip
