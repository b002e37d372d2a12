"""What would help, for the summary after a run: a few plans, each of all calls of one function or layer."""

from __future__ import annotations

import os
import shlex

from tapegrad.memory.program_files import own_name
from tapegrad.profile.plan.captured import replayed
from tapegrad.profile.plan.problem import CallKey, Problem, held_bytes
from tapegrad.profile.plan.text import calls_of, change_in_time, file_line, name_of
from tapegrad.profile.report.units import iec
from tapegrad.profile.runs.model import Run

_MOST_CANDIDATES = 4000
_LINES = 2
_WORTH = 0.9
"""Advice is worth reading if it leaves at most this share of the peak."""
_CHAIN = 16
"""Calls of one function in a step, from which on they may be a loop."""


def advice(run: Run, path: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """Pairs of what to do, and what peak and step time it is predicted to give; the lowest peak first.

    Only what takes a tenth of the peak away.  ``path``: the file of the run, if there is one.
    """
    name = "RUN" if path is None else shlex.quote(os.fspath(path))
    if (program := replayed(run)) >= 0:
        return [(f"less memory for {run.text(run.programs['name'][program])}", f"tapegrad plan {name} --pareto")]
    problem = Problem(run)
    if len(problem.candidates) > _MOST_CANDIDATES:
        return []
    plain, seen, good = problem.outcome(()), set(), []
    for key in _largest(problem):
        chosen = tuple(i for i, c in enumerate(problem.candidates) if c.key == key and not _within(problem, i, key))
        outcome = problem.outcome(chosen)
        if outcome.peak_bytes <= _WORTH * plain.peak_bytes and outcome.peak_bytes not in seen:
            seen.add(outcome.peak_bytes)
            good.append((outcome.peak_bytes, outcome, key))
    good.sort(key=lambda pair: pair[0])
    lines = []
    for nbytes, outcome, key in good[:_LINES]:
        time = change_in_time(outcome.step_ns, problem.step_ns)
        what = f"checkpoint {calls_of(problem, key, len(outcome.chosen))}{_defined(key)}"
        lines.append((what, f"peak {iec(nbytes)}, step {time}"))
    least = held_bytes(run)
    lines += _loop(problem, least, good[0][0] if good else plain.peak_bytes)
    if good:
        lines.append(("other mixes", f"tapegrad plan {name} --pareto"))
    if lines or problem.step is None or least > _WORTH * plain.peak_bytes:
        return lines
    return [(f"no call helps; a budget down to {iec(least)}", "tapegrad profile --budget SIZE PROGRAM")]


def _loop(problem: Problem, least: int, best: int) -> list[tuple[str, str]]:
    """``checkpointed_loop`` for the function that is called most, if it may be a loop and that gains more.

    About 2 sqrt(n) states are kept then, each what a call keeps now, and every step runs twice (Griewank and Walther,
    2000: fewer states, more runs).
    """
    plain = problem.outcome(()).peak_bytes
    counted = [(problem.calls_of(key), key) for key in _largest(problem) if key[0] == "function"]
    if not counted:
        return []
    calls, key = max(counted)
    kept = sum(c.kept_bytes for c in problem.candidates if c.key == key)
    about = least + int(2 * calls**0.5) * max(kept, plain - least) // max(calls, 1)
    if calls < _CHAIN or about > _WORTH * best:
        return []
    what = f"if {name_of(key[0], key[1])}{_defined(key)} takes the state of the call before, {calls} times"
    return [(f"{what}: tg.checkpointed_loop", f"peak about {iec(about)}, one more run of each step")]


def _defined(key: CallKey) -> str:
    """Where the user's own function or layer is written; nothing for one of the library's."""
    return "" if own_name(key[2]) else f" ({file_line(key[2], key[3])})"


def _largest(problem: Problem) -> list[CallKey]:
    """The kinds of calls that keep most."""
    total: dict[CallKey, int] = {}
    for c in problem.candidates:
        total[c.key] = total.get(c.key, 0) + c.kept_bytes
    return sorted(total, key=lambda key: -total[key])[:8]


def _within(problem: Problem, candidate: int, key: CallKey) -> bool:
    """Whether a call lies in another one of the same thing."""
    return any(problem.candidates[j].key == key for j in problem.candidates[candidate].within)
