"""What the engine decides for a program: kernels, bytes, and what is dropped and made again, in which order.

``decisions.csv`` holds what it decides today, for the programs of some seeds in each way of running them.  A
change that is meant to change no decision changes no row.  One that is meant to: look at what it changes, and write
the rows anew, with ``PYTHONPATH=tests python -m programs.decisions --write``.  ``--show SEED`` prints all events of a
program, to be compared with those before the change.
"""

from __future__ import annotations

import argparse
import csv
import gc
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tapegrad as tg
from programs.draw import draw
from programs.runs import Captured, Modified, Run
from programs.search import warm_up
from programs.variants import CALLS, SPANS, Case, compiled, counted, settings
from tapegrad.device import threads
from tapegrad.engine import executor
from tapegrad.errors import BudgetError
from tapegrad.profile.recorder import Session
from tapegrad.profile.runs.model import Run as Recorded

FILE = Path(__file__).with_suffix(".csv")
SEEDS = (
    0, 1, 2, 3, 4, 7, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 31, 32, 34, 36, 37, 39,
    40, 43, 46, 50, 52, 55, 59, 61, 62, 66, 67, 72, 74, 81, 91,
)  # fmt: skip
"""Of programs that take little time, and of some in which a budget drops much."""
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Of the room of a run without a budget: the room that budgets leave."""
WAYS = ("plain", "checkpoints", "budget", "checkpoints in a budget", "captured")
COUNTS = (
    "peak_bytes", "allocated_bytes", "kernel_runs", "bytes_moved", "reruns", "evictions", "restored", "offloads",
    "fetches",
)  # fmt: skip
CPYTHON = (3, 11)
"""By which the file is written: when a frame lets go of a value depends on it, and with this the order of events, and
what a budget finds to drop."""
_TABLES = ("calls", "steps", "allocs", "changes", "ops", "programs", "works", "slots", "uses", "replays", "marks")
_LEFT_OUT = ("begin_ns", "end_ns", "ns", "cpu_ns", "site", "file")
_CALLS = ("call", "parent", "first")
_SEQ = ("seq", "begin_seq", "end_seq", "peak_seq", "last_forward_seq", "next_backward_seq")
_TEXTS = ("name", "op", "shape", "dtype", "holder", "device", "text")


@dataclass(frozen=True)
class Decisions:
    """Of one program, run in one way."""

    counts: dict[str, int]
    """In budgets: of all runs."""
    events: tuple[str, ...]

    def row(self, seed: int, way: str) -> dict[str, str]:
        """As a row of the file."""
        digest = zlib.crc32("\n".join(self.events).encode())
        return {
            "seed": str(seed), "way": way, **{name: str(n) for name, n in self.counts.items()},
            "events": f"{digest:08x}",
        }  # fmt: skip


def decisions(seed: int, way: str) -> Decisions | None:
    """Run the program of a seed in a way; None where it cannot be."""
    program = draw(seed)
    case = Case(program, seed)
    with settings(program):
        case.run()
        if way == "plain":
            return _recorded(case, Run())
        if way == "captured":
            return None if case.looks else _recorded(case, Captured(), compiled(program, CALLS))
        options = {} if way == "budget" else case.modified(way)
        if way == "checkpoints":
            return _recorded(case, Modified(**options))
        case.run(Modified(**options))
        return _in_budget(case, way, options)


def _in_budget(case: Case, way: str, options: dict[str, Any]) -> Decisions:
    """With less and less room, until a budget says that it is not enough; then with what it asks for."""
    rng = case.choice(f"decisions, {way}")
    room, data, spans = case.room, case.data, rng.choice(SPANS)
    offloading = rng.random() < 0.25
    found: list[Decisions] = []

    def run(rooms: int) -> None:
        executor.CONSTANTS.clear()
        with counted() as m:
            base = m.live_bytes + data
        limits = (base + rooms,) * len(spans)
        try:
            found.append(_recorded(case, Modified(**options, spans=spans, limits=limits, offloading=offloading)))
        except BudgetError as e:
            found.append(Decisions({"needed": e.needed_bytes - base}, ()))

    for share in SHARES:
        run(int(room * share))
        errors = 0
        while (needed := found[-1].counts.get("needed", 0)) and errors < 4:
            errors += 1
            run(needed)
        if errors:
            break
    counts = {name: sum(d.counts.get(name, 0) for d in found) for name in COUNTS}
    return Decisions(counts, tuple(event for d in found for event in (*map(str, d.counts.items()), *d.events)))


def _recorded(case: Case, run: Run, main: Callable | None = None) -> Decisions:
    executor.CONSTANTS.clear()
    gc.collect()
    session = Session()
    with tg.measure() as m, ExitStack() as stack:
        base = m.live_bytes
        session.start()
        stack.callback(session.stop)
        case.run(run, _as_script(main or case.main))
    case.littered = True  # a captured function and its globals refer to each other
    counts = {name: getattr(m, name) for name in COUNTS}
    counts["peak_bytes"] -= base
    return Decisions(counts, tuple(_events(session.run({"outcome": {"kind": "finished", "code": 0}}))))


def _as_script(main: Callable) -> Callable:
    """``main`` called by the lines of a script, as a user's is: no function of the tests counts as its caller."""
    code = compile("found = main(tg, run)", "<program>", "exec")

    def called(tg: Any, run: Run) -> Any:
        scope = {"main": main, "tg": tg, "run": run}
        exec(code, scope)
        return scope.pop("found")

    return called


def _events(run: Recorded) -> Iterator[str]:
    """The rows of a recorded run, without times and what is the tests' own: calls and events are numbered anew."""
    of_program = [i for i, file in enumerate(run.calls["file"]) if run.text(file).startswith("<program")]
    kept = {name: of_program if name == "calls" else range(run.count(name)) for name in _TABLES}
    moments = sorted(
        {run.tables[name][c][i] for name in _TABLES for c in run.tables[name] if c in _SEQ for i in kept[name]}
    )
    numbers = {
        **dict.fromkeys(_SEQ, {-1: -1} | {seq: number for number, seq in enumerate(n for n in moments if n >= 0)}),
        **dict.fromkeys(_CALLS, {call: number for number, call in enumerate(of_program)}),
    }
    for name in _TABLES:
        table = run.tables[name]
        columns = [column for column in table if column not in _LEFT_OUT]
        for i in kept[name]:
            told = (f"{c} {_told(run, c, table[c][i], numbers.get(c))}" for c in columns)
            yield f"{name}: {', '.join(told)}"


def _told(run: Recorded, column: str, value: int, numbers: dict[int, int] | None) -> str:
    if column in _TEXTS:
        return re.sub(r"variable_\d+", "a variable", run.text(value))
    if column == "stack":
        file, line, function = run.frame_of(value)
        return f"{line} {function}" if file.startswith("<program") else ""
    return str(value if numbers is None else numbers.get(value, -1))


def rows(seed: int) -> list[dict[str, str]]:
    """What is decided today for the program of a seed."""
    found = ((way, decisions(seed, way)) for way in WAYS)
    return [d.row(seed, way) for way, d in found if d is not None]


def written(seed: int) -> list[dict[str, str]]:
    """The rows of the file for the program of a seed."""
    with open(FILE, newline="") as file:
        return [row for row in csv.DictReader(file) if row["seed"] == str(seed)]


def by_any_python(some: list[dict[str, str]]) -> list[dict[str, str]]:
    """What of rows is the same by any CPython."""
    return [{key: told for key, told in row.items() if key != "events"} for row in some if "budget" not in row["way"]]


def ready() -> None:
    """Import what is imported at first use, and let nothing wait: what is decided depends on neither."""
    warm_up(20)
    threads.set_num_threads(1)


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m programs.decisions", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--show", type=int, metavar="SEED", help="print all events of a program")
    options = parser.parse_args(arguments)
    ready()
    if options.show is not None:
        for way in WAYS:
            found = decisions(options.show, way)
            if found is not None:
                print(way, found.counts, *found.events, sep="\n")
    if options.write:
        all_rows = [row for seed in SEEDS for row in rows(seed)]
        with open(FILE, "w", newline="") as file:
            writer = csv.DictWriter(file, list(all_rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(all_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
