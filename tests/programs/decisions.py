"""Count what users pay for (kernels, bytes, reruns, evictions) in random programs in each way of running them.

``decisions.csv`` holds the counts of some seeds, those of budgets summed over smaller and smaller ones; a test allows
2 % more, and any number less.  How the counts come about, and in which order, is nobody's business.  Write them anew
after an improvement with ``PYTHONPATH=tests python -m programs.decisions --write``; without ``--write`` the command
prints which counts rise and which fall, in per cent.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import sys
from pathlib import Path
from typing import Any

from budget_cases import live
from inside import forget_constants

import tapegrad as tg
from programs.draw import draw
from programs.runs import Captured, Modified, Run
from programs.search import warm_up
from programs.variants import CALLS, SPANS, Case, compiled, settings
from tapegrad.errors import BudgetError

FILE = Path(__file__).with_suffix(".csv")
SEEDS = (3, 7, 9, 12, 13, 16, 17, 19, 24, 25, 31, 34, 36, 37, 40, 43, 52, 55, 61, 74)
"""Of programs that a budget or a checkpoint makes run something again."""
SHARES = (0.9, 0.6, 0.3)
"""Of the room of a run without a budget: the room that budgets leave."""
WAYS = ("plain", "checkpoints", "budget", "checkpoints in a budget", "captured")
COUNTS = ("peak_bytes", "allocated_bytes", "kernel_runs", "bytes_moved", "reruns", "evictions", "restored", "offloads")
CPYTHON = (3, 11)
"""The version that writes the file.  Others drop references at other moments, so budgets evict other values there."""
SLACK = 0.02
"""The share by which a count may exceed the file's before a test fails."""


def decisions(seed: int, way: str) -> dict[str, int] | None:
    """Return the counts of a seed's program run in a way; None where it cannot be run so."""
    program = draw(seed)
    case = Case(program, seed)
    with settings(program):
        case.run()
        if way == "plain":
            return _counts(case, Run())
        if way == "captured":
            return None if case.looks else _counts(case, Captured(), compiled(program, CALLS))
        options = {} if way == "budget" else case.modified(way)
        if way == "checkpoints":
            return _counts(case, Modified(**options))
        case.run(Modified(**options))
        return _in_budgets(case, way, options)


def _in_budgets(case: Case, way: str, options: dict[str, Any]) -> dict[str, int]:
    """Return the sum of the counts under smaller and smaller budgets, the last one the least that suffices."""
    rng = case.choice(f"decisions, {way}")
    room, data, spans = case.room, case.data, rng.choice(SPANS)
    offloading = rng.random() < 0.25
    total = dict.fromkeys(COUNTS, 0)

    def run(room: int) -> int | None:
        forget_constants()
        base = live() + data
        limits = (base + room,) * len(spans)
        try:
            counts = _counts(case, Modified(**options, spans=spans, limits=limits, offloading=offloading))
        except BudgetError as e:
            return e.needed_bytes - base
        for name, count in counts.items():
            total[name] += count
        return None

    for share in SHARES:
        needed = run(int(room * share))
        if needed is not None:
            for _ in range(4):
                if (needed := run(needed)) is None:
                    break
            break
    return total


def _counts(case: Case, run: Run, main: Any = None) -> dict[str, int]:
    forget_constants()
    gc.collect()
    with tg.measure() as m:
        base = m.live_bytes
        case.run(run, main or case.main)
    case.littered = True  # a captured function and its globals refer to each other
    counts = {name: getattr(m, name) for name in COUNTS}
    counts["peak_bytes"] -= base
    return counts


def rows(seed: int) -> list[dict[str, str]]:
    """Return the rows of a seed's program, one for each way."""
    counts = ((way, decisions(seed, way)) for way in WAYS)
    return [
        {"seed": str(seed), "way": way, **{name: str(n) for name, n in counted.items()}}
        for way, counted in counts
        if counted is not None
    ]


def excess(seed: int) -> list[str]:
    """Return a line for each count of a seed's program that exceeds the file's by more than ``SLACK``."""
    counted, lines = {row["way"]: row for row in rows(seed)}, []
    for held in written(seed):
        way = held["way"]
        if way not in counted:
            lines.append(f"{way}: cannot be run so any more")
        elif sys.version_info[:2] == CPYTHON or "budget" not in way:
            lines += [
                f"{way}: {name} {counted[way][name]}, held are {held[name]}"
                for name in COUNTS
                if int(counted[way][name]) > math.ceil(int(held[name]) * (1 + SLACK))
            ]
    return lines


def changes(seed: int) -> list[str]:
    """Return a line for each count of a seed's program that differs from the file's."""
    counted = {row["way"]: row for row in rows(seed)}
    return [
        f"seed {seed}, {held['way']}: {name} {held[name]} -> {now} ({100 * (now / max(int(held[name]), 1) - 1):+.1f} %)"
        for held in written(seed)
        if held["way"] in counted
        for name in COUNTS
        if (now := int(counted[held["way"]][name])) != int(held[name])
    ]


def written(seed: int) -> list[dict[str, str]]:
    """Return the rows of the file for the program of a seed."""
    with open(FILE, newline="") as file:
        return [row for row in csv.DictReader(file) if row["seed"] == str(seed)]


def ready() -> None:
    """Import what is imported at first use, and let nothing wait: what is decided depends on neither."""
    warm_up(20)
    tg.set_num_threads(1)


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m programs.decisions", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    options = parser.parse_args(arguments)
    ready()
    if not options.write:
        print("\n".join(line for seed in SEEDS for line in changes(seed)))
    else:
        all_rows = [row for seed in SEEDS for row in rows(seed)]
        with open(FILE, "w", newline="") as file:
            writer = csv.DictWriter(file, list(all_rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(all_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
