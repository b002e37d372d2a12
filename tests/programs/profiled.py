"""A program while it is recorded for a profile, in memory and in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapegrad.profile.recorder import Session
from tapegrad.tracing.file import load
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.log import Log
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import totals
from tests.tracing.reading import reread

META: dict[str, Any] = {"tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"}}
META["outcome"] = {"kind": "running", "code": 0, "message": ""}


def recorded(program: Callable[[], Any], stacks: str, gradients: bool) -> tuple[Any, Run, list[str]]:
    """What ``program`` returns, its run, and what is wrong with that."""
    seen: dict[int, tuple[int, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        session = Session(stacks=stacks, gradients=gradients, log=Log(path))
        session.log.set("meta", META | {"stacks": stacks})
        session.log.set("recording", {"host": "elsewhere"})
        session.start()
        session.journal.before_op = lambda: seen.update(
            {session.journal.now(): (LEDGER.live_bytes, LEDGER.by("category"))}
        )
        try:
            found = program()
        finally:
            session.stop()
        run = session.run(META, source=False)
        on_disk = load(path)
    problems = [*_totals(run, seen), *_differences(reread(run), run), *_differences(on_disk, run), *_made_again(run)]
    return found, run, problems


def _totals(run: Run, seen: dict[int, tuple[int, dict[str, int]]]) -> list[str]:
    """Where the run does not hold what the ledger held, before each operation."""
    told, wrong = list(totals(run)), []
    place = -1
    for seq, (live, by) in sorted(seen.items()):
        while place + 1 < len(told) and told[place + 1][0] < seq:
            place += 1
        if place < 0:
            continue
        _, _, total, parts = told[place]
        mine = {name: n for name, n in zip(CATEGORIES, parts, strict=False) if n}
        if total != live or mine != {name: n for name, n in by.items() if n}:
            wrong.append(f"at {seq} the run holds {total}, {mine}; the ledger {live}, {by}")
    if told and run.peak["bytes"] != max(total for _, _, total, _ in told):
        wrong.append(f"the peak is {run.peak}, of the events {max(total for _, _, total, _ in told)}")
    return wrong[:1]


def _differences(found: Run, run: Run) -> list[str]:
    """Where a run that was read holds something else."""
    found.meta["outcome"] = run.meta["outcome"]
    one, other = asdict(found), asdict(run)
    return [f"on disk {key} is {one[key]!s:.300}, not {other[key]!s:.300}" for key in other if one[key] != other[key]]


def _made_again(run: Run) -> list[str]:
    """Recomputed values that name others than those they are like."""
    a = run.allocs
    pairs = [(i, old) for i, old in enumerate(a["remat_of"]) if old >= 0]
    return [
        f"allocation {i} is to be {old} recomputed, which is another"
        for i, old in pairs
        if any(a[column][old] != a[column][i] for column in ("op", "shape", "dtype"))
    ]
