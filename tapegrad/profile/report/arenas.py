"""What lies in the arenas of captured programs (``tg.function``) over a call, as numbers and as tables.

The ledger counts an arena as one value; what is in it when is the program's to say, for all of its replays alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.text import Text

from tapegrad.profile.report.output import RunOutput
from tapegrad.profile.report.rows import op_name
from tapegrad.profile.report.table import Column
from tapegrad.profile.report.units import counted, percent
from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import CATEGORIES, PHASES, SLOT_KINDS
from tapegrad.tracing.run import Run

_MOST = 4
"""Programs shown, if not all are asked for."""


@dataclass(frozen=True)
class Group:
    """Values that lie in the arena at the program's own peak and have a key in common: bytes, how many, mostly what."""

    key: str
    bytes: int
    count: int
    category: str
    op: str


@dataclass(frozen=True)
class Arena:
    """The arena of a program that was replayed.

    ``bytes``: what it takes; ``peak_bytes``: of the values in it where these are most, which is at the task ``at`` of
    ``tasks`` (-1: there are none), of a phase, an op and a line.  ``curve``: (task, category by number, change of
    bytes), in order.  What is given out in memory of its own is not among them.
    """

    program: str
    replays: int
    bytes: int
    peak_bytes: int
    tasks: int
    at: int
    phase: str
    op: str
    line: str
    categories: list[Group]
    lines: list[Group]
    curve: list[tuple[int, int, int]]


def arenas(run: Run) -> list[Arena]:
    """Those of the programs that were replayed, the largest first."""
    replays = Counter(run.replays["program"])
    slots: dict[int, list[int]] = defaultdict(list)
    tasks: dict[int, list[int]] = defaultdict(list)
    for program, numbers in ((run.slots["program"], slots), (run.tasks["program"], tasks)):
        for i, of in enumerate(program):
            numbers[of].append(i)
    listed = [_arena(run, program, count, slots[program], tasks[program]) for program, count in replays.items()]
    return sorted(listed, key=lambda a: (-a.bytes, a.program))


def _arena(run: Run, program: int, replays: int, slots: list[int], tasks: list[int]) -> Arena:
    s, w = run.slots, run.tasks
    inside = [i for i in slots if SLOT_KINDS[s["kind"][i]] in ("argument", "made") and not s["outside"][i]]
    changes = [(s["begin"][i], s["category"][i], s["bytes"][i]) for i in inside]
    changes += [(s["end"][i], s["category"][i], -s["bytes"][i]) for i in inside]
    curve = _summed(changes)
    live = most = peak = 0
    at = -1
    moments: dict[int, int] = defaultdict(int)
    for moment, _, change in curve:
        moments[moment] += change
    for moment in sorted(moments):
        live += moments[moment]
        if live > most:
            most, peak, at = live, moment, moment
    there = [i for i in inside if s["begin"][i] <= peak < s["end"][i]] if most else []
    row = tasks[at] if 0 <= at < len(tasks) else -1
    return Arena(
        program=run.text(run.programs["name"][program]) or "(unknown)", replays=replays,
        bytes=run.programs["bytes"][program], peak_bytes=most, tasks=len(tasks), at=at,
        phase=PHASES[w["phase"][row]] if row >= 0 else "", op=run.text(w["op"][row]) if row >= 0 else "",
        line=_line(run, row), categories=_groups(run, there, lambda i: CATEGORIES[s["category"][i]]),
        lines=_groups(run, there, lambda i: _line(run, s["maker"][i]) or "(argument)"), curve=curve,
    )  # fmt: skip


def _summed(changes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    sums: dict[tuple[int, int], int] = defaultdict(int)
    for moment, category, nbytes in changes:
        sums[moment, category] += nbytes
    return [(*key, nbytes) for key, nbytes in sorted(sums.items()) if nbytes]


def _line(run: Run, task: int) -> str:
    w = run.tasks
    return f"{run.text(w['file'][task])}:{w['line'][task]}" if task >= 0 and w["file"][task] >= 0 else ""


def _groups(run: Run, slots: list[int], key: Callable[[int], str]) -> list[Group]:
    s, groups = run.slots, defaultdict[str, list[int]](list)
    for i in slots:
        groups[key(i)].append(i)

    def most(group: list[int], name: Callable[[int], str]) -> str:
        sums: Counter[str] = Counter()
        for i in group:
            sums[name(i)] += s["bytes"][i]
        return min(sums, key=lambda n: (-sums[n], n))

    op = lambda i: run.text(run.tasks["op"][s["maker"][i]]) if s["maker"][i] >= 0 else ""
    rows = [
        Group(name, sum(s["bytes"][i] for i in group), len(group), most(group, lambda i: CATEGORIES[s["category"][i]]),
              most(group, op))
        for name, group in groups.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda g: (-g.bytes, g.key))


def print_arenas(run: Run, out: RunOutput, limit: int, styles: dict[str, str]) -> None:
    """Print what lies in each arena where most does, ``limit`` lines (0: all), in the ``styles`` of categories."""
    listed = arenas(run)
    for arena in listed[:_MOST] if limit else listed:
        out.line()
        what = f"Arena of {arena.program}: {format_bytes(arena.bytes)}, {counted(arena.replays, 'replay')}"
        out.line(what, style="bold")
        if not arena.peak_bytes:
            out.line("nothing lies in it")
            continue
        task = f"task {arena.at + 1} of {arena.tasks}" if arena.at >= 0 else "the start"
        place = "".join(f", {part}" for part in (out.op(arena.op), out.source(arena.line), arena.phase) if part)
        out.line(f"most of it, {format_bytes(arena.peak_bytes)}, is in use at {task}{place}")
        _print_groups(out, "In use then", arena.categories, arena, styles)
        _print_groups(out, "Largest, by line", arena.lines[:limit] if limit else arena.lines, arena)
        if limit and len(arena.lines) > limit:
            out.line(f"{out.dots} {len(arena.lines) - limit:,} more (-n 0 shows all)")
    if limit and len(listed) > _MOST:
        out.line(f"{out.dots} {counted(len(listed) - _MOST, 'more arena')} (-n 0 shows all)")


def _print_groups(
    out: RunOutput, title: str, groups: list[Group], arena: Arena, styles: dict[str, str] | None = None
) -> None:
    columns = [Column(title, flexible=True, source=styles is None)]
    columns += [] if styles is not None else [Column("op", flexible=True)]
    columns += [Column(name, right=True) for name in ("bytes", "share", "values")]
    cells: list[list[str | Text]] = []
    for g in groups:
        first: list[str | Text] = [out.source(g.key), out.op(op_name(g.op))] if styles is None else [
            Text(g.key, styles[g.key])]  # fmt: skip
        cells.append([*first, format_bytes(g.bytes), percent(g.bytes, arena.peak_bytes), f"{g.count:,}"])
    out.table(columns, cells)
