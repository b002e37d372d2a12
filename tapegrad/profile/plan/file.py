"""Plan files: JSON, described by ``schema.json``; checked when read, as run files are."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from tapegrad.remat.plan import FORMAT, VERSION, Action, PlanError, actions_of, is_count, read_json
from tapegrad.tracing.atomic import atomic

_TEXTS = ("tapegrad", "file", "program", "device")


@dataclass(frozen=True)
class Point:
    """One plan among others: ``step_ns`` None: not predicted."""

    peak_bytes: int
    step_ns: int | None
    actions: tuple[Action, ...]


@dataclass
class Plan:
    """A plan: what to do, what it was made from, and what it is predicted to give.

    ``run``: ``file``, ``program``, ``device``, ``tapegrad`` (texts) and ``argv``.  ``memory_budget``: keep the whole
    program within so many bytes.  ``asked``: what the plan was made for.  ``smallest_bytes``: the lowest peak there is.
    """

    run: dict[str, Any]
    actions: list[Action]
    predicted: Point
    measured_bytes: int
    measured_ns: int
    smallest_bytes: int
    memory_budget: int | None = None
    asked: dict[str, int | None] = field(default_factory=dict)
    solver: str = ""
    pareto: list[Point] = field(default_factory=list)


def to_json(plan: Plan) -> dict[str, object]:
    """``plan`` as the JSON object that a file holds."""
    return {
        "format": FORMAT, "version": VERSION, "run": plan.run, "asked": plan.asked, "solver": plan.solver,
        "actions": [_row(a) for a in plan.actions], "memory_budget": plan.memory_budget,
        "measured": {"peak_bytes": plan.measured_bytes, "step_ns": plan.measured_ns},
        "predicted": {"peak_bytes": plan.predicted.peak_bytes, "step_ns": plan.predicted.step_ns},
        "smallest_bytes": plan.smallest_bytes,
        "pareto": [
            {"peak_bytes": p.peak_bytes, "step_ns": p.step_ns, "actions": [_row(a) for a in p.actions]}
            for p in plan.pareto
        ],
    }  # fmt: skip


def _row(a: Action) -> dict[str, object]:
    return {
        "do": a.do, "kind": a.kind, "name": a.name, "file": a.file, "relative": a.relative, "line": a.line,
        "ordinals": list(a.ordinals),
    }  # fmt: skip


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path``: all of it, or (on an error) nothing.  Raises OSError."""
    with atomic(path) as part:
        part.write_text(json.dumps(to_json(plan), indent=1) + "\n", encoding="ascii")


def load(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan.  Raises PlanError, with one line that says what is wrong."""
    data, name = read_json(path), os.fspath(path)
    actions, budget = actions_of(data, name)
    run = data.get("run")
    if not isinstance(run, dict) or not all(isinstance(run.get(key), str) for key in _TEXTS):
        raise PlanError(f"{name}: 'run' does not have the texts {', '.join(_TEXTS)}")
    argv = run.get("argv")
    if not isinstance(argv, list) or not all(isinstance(a, str) for a in argv):
        raise PlanError(f"{name}: run.argv is not a list of strings")
    if not isinstance(data.get("solver"), str) or not is_count(data.get("smallest_bytes")):
        raise PlanError(f"{name}: 'solver' is not a text, or 'smallest_bytes' not a number of bytes")
    measured = _figures(data.get("measured"), f"{name}: 'measured'")
    return Plan(
        run, actions, Point(*_figures(data.get("predicted"), f"{name}: 'predicted'"), tuple(actions)),
        measured[0], measured[1] or 0, data["smallest_bytes"], budget, _asked(data.get("asked"), name),
        data["solver"], _points(data.get("pareto"), name),
    )  # fmt: skip


def _figures(data: object, what: str) -> tuple[int, int | None]:
    if not isinstance(data, dict) or not is_count(data.get("peak_bytes")):
        raise PlanError(f"{what} has no peak_bytes")
    ns = data.get("step_ns")
    if ns is not None and not is_count(ns):
        raise PlanError(f"{what}: step_ns is neither null nor a number of nanoseconds")
    return data["peak_bytes"], ns


def _asked(data: object, name: str) -> dict[str, int | None]:
    if not isinstance(data, dict) or not all(v is None or is_count(v) for v in data.values()):
        raise PlanError(f"{name}: 'asked' is not an object of numbers")
    return data


def _points(rows: object, name: str) -> list[Point]:
    if not isinstance(rows, list):
        raise PlanError(f"{name}: 'pareto' is not a list")
    points = []
    for i, row in enumerate(rows):
        what = f"{name}: pareto point {i}"
        figures = _figures(row, what)
        points.append(Point(*figures, tuple(actions_of(row, what)[0])))
    return points
