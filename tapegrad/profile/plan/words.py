"""How plans speak of calls, of changes and of moments."""

from __future__ import annotations

from pathlib import PurePath

from tapegrad.memory.plan import Action
from tapegrad.profile.plan.problem import CallKey, Outcome, Problem
from tapegrad.profile.report.rows import step_of
from tapegrad.profile.report.units import counted, iec, ms
from tapegrad.profile.runs.model import PHASES


def name_of(kind: str, name: str) -> str:
    """A function as ``f()``, a layer as ``Block``."""
    return f"{name}()" if kind == "function" else name


def calls_of(problem: Problem, key: CallKey, count: int) -> str:
    """``Block, 3 of 6 calls``."""
    of = problem.calls_of(key)
    return f"{name_of(key[0], key[1])}, " + (
        f"all {of} calls" if 1 < count == of else f"{count} of {counted(of, 'call')}"
    )


def numbers(ordinals: tuple[int, ...]) -> str:
    """``0-3, 7``."""
    parts: list[list[int]] = []
    for n in ordinals:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)


def file_line(file: str, line: int) -> str:
    """``model.py:36``."""
    return f"{PurePath(file.replace(chr(92), '/')).name}:{line}"


def change_in_bytes(nbytes: int) -> str:
    """``-1.42 GiB``."""
    return f"{'-' if nbytes < 0 else '+'}{iec(abs(nbytes))}"


def change_in_time(after: int, before: int) -> str:
    """``+4.1 %``; in ms where there is nothing to compare with."""
    return f"{100 * (after - before) / before:+.1f} %" if before else f"+{ms(after)}"


def short(actions: list[Action]) -> str:
    """``Block x3, attend() x2 offloaded``; ``-`` for nothing."""
    marks = {"offload": " offloaded"}
    return ", ".join(f"{name_of(a.kind, a.name)} x{len(a.ordinals)}{marks.get(a.do, '')}" for a in actions) or "-"


def moment(problem: Problem, outcome: Outcome) -> str:
    """Where the peak is: ``step 2, backward, mlp() model.py:58``."""
    run, (seq, side, inner) = problem.run, outcome.at
    a = run.allocs
    wanted = inner if side else seq
    alloc = next((i for i, begin in enumerate(a["begin_seq"]) if begin == wanted), -1)
    parts = []
    step = step_of(run, seq)
    if step >= 0:
        parts.append(f"step {step}")
    if alloc >= 0:
        file, line, function = run.frame_of(a["stack"][alloc])
        parts.append("rerun" if side == -1 else PHASES[a["phase"][alloc]])
        if file:
            parts.append(f"{function}() {file_line(file, line)}")
    return ", ".join(parts)
