"""Captured steps: how tight their arenas are, and what less memory costs.

    python bench/function.py [--workloads resnet,lstm] [--fractions 0.5,0.3,0.2] [--timed] [--tasks] [--json]

Steps are those of bench/budget.py, forward and gradients, at sizes of some thousand tasks.  From each step's program:

    arena / bound   bytes of the plain arena over the most bytes alive at once, less than which no arena can have
    activations     A: bytes of the arena when most of it is alive that are not among the results
    limit           bytes for the arena: R + fraction * A, where R is what all results take
    extra work      cost of what is done again, by the rule of captured steps, over the cost of the plain step
    least           extra work that no plan can do without (function_bound.py), whatever its order
    planned in      processor time, of this process

``--timed`` runs plain and fitted programs by turns and checks bits: the median of their ratios of processor time is the
time over the plain program's; beside it, that over what the extra work says it is.  ``--tasks`` runs each task of the
plain programs alone and shows what takes most time, with its share of the cost: the rule's factors
(tapegrad/capture/costs.py) come from this table.
"""

from __future__ import annotations

import time
from typing import Any

import common

MIB = 2**20
_SHOWN = 20
"""Kinds of tasks shown."""
TARGETS = {
    "ResNet": {0.5: 0.05, 0.3: 0.12, 0.2: 0.20}, "transformer": {0.5: 0.05, 0.3: 0.18, 0.2: 0.30},
    "LSTM": {0.5: 0.10, 0.3: 0.20, 0.2: 0.30}, "acoustic wave": {0.5: 0.10, 0.3: 0.20, 0.2: 0.30},
}  # fmt: skip
"""The most extra work that is aimed at."""
SIZES = {
    "ResNet": {"blocks": 9, "channels": 16, "pixels": 32, "batch": 48},
    "transformer": {"blocks": 8, "width": 256, "heads": 8, "positions": 128, "batch": 16},
    "LSTM": {"steps": 100, "batch": 128, "hidden": 320, "features": 64},
    "acoustic wave": {"steps": 200, "cells": 300},
}


def activations(graph: Any) -> tuple[int, int]:
    """A and R (see above), in bytes."""
    plain = graph.account(range(len(graph.reads)))
    at = plain.live.index(plain.peak)
    alive = sum(graph.sizes[s] for s in graph.finals if graph.producers[s] <= at)
    return plain.peak - alive, sum(graph.sizes[s] for s in graph.finals)


def measured(name: str, step: Any, fractions: list[float], rounds: int, timed: bool) -> list[dict[str, Any]]:
    """One row a fraction; the first is the plain program."""
    from function_bound import least_extra

    from tapegrad.capture.capture import capture
    from tapegrad.capture.memory import ALIGNMENT
    from tapegrad.capture.planner.fit import Planner
    from tapegrad.capture.planner.schedule import Graph
    from tapegrad.capture.replay import Replay
    from tapegrad.errors import BudgetError

    program = capture(step, (), {})
    planner = Planner(program, ALIGNMENT)
    layout = planner.plain.layout
    graph = Graph(program, ALIGNMENT)
    A, R = activations(graph)
    rows: list[dict[str, Any]] = [
        {"workload": name, "tasks": len(program.steps), "fraction": 1.0, "limit": None, "arena": layout.nbytes,
         "bound": layout.lower_bound, "extra": 0.0, "least_extra": None, "target": None,
         "seconds": None, "time": None}
    ]  # fmt: skip
    plain = Replay(program) if timed else None
    for fraction in fractions:
        limit = int(R + fraction * A)
        row = {"workload": name, "fraction": fraction, "limit": limit, "target": TARGETS[name].get(fraction)}
        start = time.process_time()
        try:
            plan = Planner(program, ALIGNMENT).fit(limit)
        except BudgetError as e:
            rows.append(row | {"least": e.needed_bytes})
            continue
        row |= {
            "seconds": time.process_time() - start, "tasks": len(plan.program.steps), "arena": plan.layout.nbytes,
            "bound": plan.layout.lower_bound, "extra": plan.extra,
            "least_extra": least_extra(graph, limit), "time": None,
        }  # fmt: skip
        if plan.extra < row["least_extra"] - 1e-6:
            raise SystemExit(f"{name} at {fraction:g}: less extra work than the bound says is possible")
        if plain is not None:
            row["time"] = _slower(plain, Replay(plan.program), rounds)
        rows.append(row)
    return rows


def _slower(plain: Any, fitted: Any, rounds: int) -> float:
    """How much longer a replay takes, as a part of the plain one; ends the script where bits differ."""
    calls = {"plain": lambda: plain.run([]), "fitted": lambda: fitted.run([])}
    times = common.by_turns(calls, rounds, clock=time.process_time)
    for a, b in zip(plain.results([]), fitted.results([]), strict=True):
        if a.numpy().tobytes() != b.numpy().tobytes():
            raise SystemExit("the bits of a fitted program differ")
    return common.ratio(times["plain"], times["fitted"])


def tasks(name: str, program: Any, rounds: int) -> list[list[str | None]]:
    """Rows of a table: the tasks of a program that take most time, alike ones together, beside their cost."""
    from tapegrad.capture.replay import Replay

    replay = Replay(program)
    replay.run([])
    array = replay.memory.array
    calls = [
        step.calls(*([array(v) for v in views] for views in (step.reads, step.writes, step.temporaries)))
        for step in program.steps
    ]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, made in enumerate(calls):
            start = time.perf_counter()
            for f, args in made:
                f(*args)
            best[i] = min(best[i], time.perf_counter() - start)
    kinds: dict[tuple[str, int], list[float]] = {}
    for step, seconds in zip(program.steps, best, strict=True):
        moved = sum(v.slot.nbytes for v in (*step.reads, *step.writes))
        kind = kinds.setdefault((", ".join(step.names), moved >> 10), [0, 0.0, 0.0])
        kind[:] = kind[0] + 1, kind[1] + seconds, kind[2] + step.cost
    total, cost = sum(best), sum(step.cost for step in program.steps)
    rows: list[list[str | None]] = [[name, None, None, f"{1e3 * total:.0f} ms", f"{1e9 * total / cost:.3f} ns a byte"]]
    for (names, kib), (count, seconds, own) in sorted(kinds.items(), key=lambda x: -x[1][1])[:_SHOWN]:
        short = names if len(names) < 50 else names[:47] + "..."
        rows.append([f"  {short}", str(kib), str(count), f"{100 * seconds / total:.1f} %", f"{100 * own / cost:.1f} %"])
    return rows


def cells(r: dict[str, Any]) -> list[str | None]:
    """A row of the table."""
    percent = lambda x: None if x is None else f"{100 * x:.1f} %"
    size = lambda x: None if x is None else f"{x / MIB:.1f}"
    label = r["workload"] if r["limit"] is None else f"  {r['fraction']:g}"
    if "least" in r:
        return [label, None, size(r["limit"]), f"infeasible, least {size(r['least'])}"]
    seconds = None if r["seconds"] is None else f"{r['seconds']:.1f}"
    ratio = f"{r['arena'] / r['bound']:.4f}"
    times = [None, None] if r["time"] is None else [f"{r['time']:.3f}", f"{r['time'] / (1.0 + r['extra']):.3f}"]
    return [label, str(r["tasks"]), size(r["limit"]), size(r["arena"]), ratio, percent(r["extra"]),
            percent(r["least_extra"]), percent(r["target"]), *times, seconds]  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=5)
    parser.add_argument("--workloads", default="", help="parts of names, by commas (default: all)")
    parser.add_argument("--fractions", default="0.5,0.3,0.2", help="of the activations (default: %(default)s)")
    parser.add_argument("--timed", action="store_true", help="also run the programs")
    parser.add_argument("--tasks", action="store_true", help="only hold costs against the time of single tasks")
    options = parser.parse_args()
    common.begin(options.threads)
    common.load("tapegrad", options.threads)
    from budget_workloads import WORKLOADS

    from tapegrad.capture.capture import capture

    words = [word.lower() for word in options.workloads.split(",")]
    rows: list[dict[str, Any]] = []
    table: list[list[str | None]] = []
    for workload in WORKLOADS:
        if workload.name in SIZES and any(word in workload.name.lower() for word in words):
            step = workload.build(SIZES[workload.name], "float32")
            if options.tasks:
                table += tasks(workload.name, capture(step, (), {}), options.rounds)
                continue
            fractions = [float(x) for x in options.fractions.split(",")]
            rows += measured(workload.name, step, fractions, options.rounds, options.timed)
    facts = common.about(options.threads)
    columns = ["step, fraction of activations", "tasks", "limit, MiB", "arena, MiB", "arena / bound", "extra work",
               "least", "aim", "time", "time / (1 + extra)", "planned in, s"]  # fmt: skip
    if options.tasks:
        columns, title = ["task", "KiB moved", "times", "of the time", "of the cost"], "What tasks take"
        common.show(title, columns, table, facts)
        return
    common.show("Captured steps within fewer bytes", columns, [cells(r) for r in rows], facts)
    if options.json:
        common.write("function", facts, rows, fractions=options.fractions)


if __name__ == "__main__":
    main()
