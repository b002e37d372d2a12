"""What would help, for the summary after a run: a few plans, each of all calls of one function or layer."""

from __future__ import annotations

import os
import shlex

from tapegrad.profile.plan.problem import CallKey, Problem, held_bytes
from tapegrad.profile.plan.words import calls_of, change_in_time
from tapegrad.profile.report.units import iec
from tapegrad.profile.runs.model import Run

_MOST_CANDIDATES = 4000
_LINES = 2


def advice(run: Run, path: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """Pairs of what to do, and what peak and step time it is predicted to give; the lowest peak first.

    ``path``: the file of the run, if there is one.
    """
    problem = Problem(run)
    if len(problem.candidates) > _MOST_CANDIDATES:
        return []
    plain, seen, found = problem.outcome(()), set(), []
    for key in _largest(problem):
        chosen = tuple(i for i, c in enumerate(problem.candidates) if c.key == key and not _within(problem, i, key))
        outcome = problem.outcome(chosen)
        if outcome.peak_bytes < plain.peak_bytes and outcome.peak_bytes not in seen:
            seen.add(outcome.peak_bytes)
            found.append((outcome.peak_bytes, outcome, key))
    found.sort(key=lambda pair: pair[0])
    lines = []
    for nbytes, outcome, key in found[:_LINES]:
        time = change_in_time(outcome.step_ns, problem.step_ns)
        what = f"checkpoint {calls_of(problem, key, len(outcome.chosen))}"
        lines.append((what, f"peak {iec(nbytes)}, step {time}"))
    if lines:
        name = "RUN" if path is None else shlex.quote(os.fspath(path))
        lines.append(("other mixes", f"tapegrad plan {name} --pareto"))
        return lines
    least = held_bytes(run)
    if problem.step is None or least >= plain.peak_bytes:
        return []
    return [(f"no call helps; a budget down to {iec(least)}", "tapegrad profile --budget SIZE PROGRAM")]


def _largest(problem: Problem) -> list[CallKey]:
    """The kinds of calls that keep most."""
    total: dict[CallKey, int] = {}
    for c in problem.candidates:
        total[c.key] = total.get(c.key, 0) + c.kept_bytes
    return sorted(total, key=lambda key: -total[key])[:8]


def _within(problem: Problem, candidate: int, key: CallKey) -> bool:
    """Whether a call lies in another one of the same thing."""
    return any(problem.candidates[j].key == key for j in problem.candidates[candidate].within)
