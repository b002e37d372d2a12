"""What ranks did together, as numbers and as tables: each rank, and each line of the program with a collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

from tapegrad.profile.report.output import RunOutput
from tapegrad.profile.report.table import Column
from tapegrad.profile.report.units import counted
from tapegrad.sizes import format_bytes
from tapegrad.tracing.communication import Collective, collectives
from tapegrad.tracing.run import Run

_MOST_RANKS = 8


@dataclass(frozen=True)
class RankRow:
    """A rank: its peak, how long it was recorded, what it sent to others.

    ``waited_ns``: how long its program stood still in collectives; ``delayed_ns``: how long each of the others waited
    for it, the last to come, on average.
    """

    rank: int
    peak_bytes: int
    ns: int
    sent_bytes: int
    waited_ns: int
    delayed_ns: int


@dataclass(frozen=True)
class LineRow:
    """The collectives of one kind that a line has called, for a rank on average; ``bytes``: of the ranks' own parts.

    ``others_ns``: until the last rank had come; ``transfer_ns``: from then on; their sum again, as ``exposed_ns``,
    while the program stood still, and ``hidden_ns``, while it did something else.  ``unfinished``: of all ranks.
    """

    kind: str
    file: str
    line: int
    ranks: int
    calls: int
    bytes: int
    others_ns: int
    transfer_ns: int
    exposed_ns: int
    hidden_ns: int
    unfinished: int


def rank_rows(run: Run) -> list[RankRow]:
    """Every rank that has told of itself; none of a program alone."""
    waited: dict[int, int] = defaultdict(int)
    delayed: dict[int, int] = defaultdict(int)
    together: dict[tuple[str, int], list[Collective]] = defaultdict(list)
    for e in collectives(run):
        waited[e.rank] += e.exposed
        together[e.group, e.number].append(e)
    for events in together.values():
        if len(events) > 1:
            last = max(events, key=lambda e: e.entered)
            delayed[last.rank] += sum(e.others for e in events) // (len(events) - 1)
    return [
        RankRow(rank, peak, end - begin, sent, waited[rank], delayed[rank])
        for rank, peak, begin, end, sent in zip(*run.ranks.values())
    ]


def line_rows(run: Run) -> list[LineRow]:
    """Those for which programs stood still longest first."""
    groups: dict[tuple[str, str, int], list[Collective]] = defaultdict(list)
    for e in collectives(run):
        groups[e.kind, e.file, e.line].append(e)
    found = []
    for key, events in groups.items():
        ranks = len({e.rank for e in events})
        each = lambda values, ranks=ranks: round(sum(values) / ranks)
        found.append(LineRow(
            *key, ranks, each([1] * len(events)), each(e.bytes for e in events), each(e.others for e in events),
            each(e.transfer for e in events), each(e.exposed for e in events), each(e.hidden for e in events),
            sum(e.done < 0 for e in events),
        ))  # fmt: skip
    return sorted(found, key=lambda row: (-row.exposed_ns, -row.hidden_ns, row.file, row.line, row.kind))


def print_ranks(run: Run, out: RunOutput, limit: int) -> None:
    """Print both tables, ``limit`` lines (0: all), if the run is one of several ranks."""
    rows = rank_rows(run)
    if not rows:
        return
    out.line()
    _ranks(rows, out, limit)
    if run.meta["outcome"].get("message"):
        out.line(run.meta["outcome"]["message"])
    lines = line_rows(run)
    if not lines:
        return
    out.line()
    _lines(lines[:limit] if limit else lines, out)
    if limit and len(lines) > limit:
        out.line(f"{out.dots} {len(lines) - limit:,} more (-n 0 shows all)")
    if (left := run.meta.get("collectives_left_out", 0)) > 0:
        out.line(f"{counted(left, 'collective')} came later and was not noted" if left == 1 else
                 f"{counted(left, 'collective')} came later and were not noted")  # fmt: skip


def _ranks(rows: list[RankRow], out: RunOutput, limit: int) -> None:
    highest, lowest = max(r.peak_bytes for r in rows), min(r.peak_bytes for r in rows)
    cells: list[list[str | Text]] = []
    shown = _telling(rows) if limit and len(rows) > _MOST_RANKS else rows
    for row in shown:
        which = "" if highest == lowest else " max" if row.peak_bytes == highest else (
            " min" if row.peak_bytes == lowest else "")  # fmt: skip
        cells.append([
            f"{row.rank}{which}", format_bytes(row.peak_bytes), out.ms(row.ns), format_bytes(row.sent_bytes),
            out.ms(row.waited_ns), out.ms(row.delayed_ns),
        ])  # fmt: skip
    titles = ("peak", "time", "sent", "waited", "waited for")
    out.table([Column("Rank"), *(Column(title, right=True) for title in titles)], cells)
    if len(shown) < len(rows):
        out.line(f"{out.dots} {len(rows) - len(shown):,} more (-n 0 shows all)")


def _telling(rows: list[RankRow]) -> list[RankRow]:
    """The ranks that stand out, and the first ones."""
    extremes: Iterable[RankRow] = (
        max(rows, key=lambda r: r.peak_bytes), min(rows, key=lambda r: r.peak_bytes),
        max(rows, key=lambda r: r.waited_ns), max(rows, key=lambda r: r.delayed_ns),
    )  # fmt: skip
    chosen = {row.rank for row in extremes}
    for row in rows:
        if len(chosen) < _MOST_RANKS:
            chosen.add(row.rank)
    return [row for row in rows if row.rank in chosen]


def _lines(rows: list[LineRow], out: RunOutput) -> None:
    numbers = ("calls", "bytes", "others", "transfer", "exposed", "hidden")
    columns = [Column("Mean of ranks", flexible=True), Column("at", flexible=True, source=True)]
    cells: list[list[str | Text]] = []
    for row in rows:
        where = out.source(f"{row.file}:{row.line}") if row.file else "(unknown)"
        times = [out.ms(ns) for ns in (row.others_ns, row.transfer_ns, row.exposed_ns, row.hidden_ns)]
        stuck = f" ({row.unfinished} not done)" if row.unfinished else ""
        cells.append([out.text(row.kind) + stuck, where, f"{row.calls:,}", format_bytes(row.bytes), *times])
    out.table([*columns, *(Column(title, right=True) for title in numbers)], cells)
