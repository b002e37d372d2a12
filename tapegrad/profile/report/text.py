"""A run on a terminal: its summary, what was alive when memory ran out, and tables of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tapegrad.profile.report import rows as r
from tapegrad.profile.report.arenas import print_arenas
from tapegrad.profile.report.chart import chart
from tapegrad.profile.report.communication import print_ranks
from tapegrad.profile.report.output import RunOutput
from tapegrad.profile.report.table import Column
from tapegrad.profile.report.units import counted, percent
from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import CATEGORIES, MARKS
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import at as seq_at

if TYPE_CHECKING:
    from tapegrad.profile.plan.advice import Advice

STYLES = {
    "parameter": "green", "optimizer": "yellow", "gradient": "blue", "activation": "red", "rematerialized": "cyan",
    "communication": "bright_magenta", "temporary": "magenta", "input": "bright_black", "user": "bright_green",
    "unattributed": "bright_black",
}  # fmt: skip
OOM = MARKS.index("oom")


def print_summary(
    run: Run,
    console: Console,
    *,
    path: str | None,
    seq: int | None = None,
    rows: int = 5,
    advice: Advice | None = None,
) -> None:
    """Print the peak (or the moment ``seq``), what was alive then, and what would help; first why memory ran out.

    ``path``: of the run file, for the commands that lead on.  ``rows``: lines in the table of the largest (0: all).
    ``advice``: what would help.
    """
    out = RunOutput(console, run)
    if run.meta["outcome"]["kind"] in ("killed", "running"):
        out.line(run.meta["outcome"].get("message", ""), style="bold red")
        out.line()
    if seq is None and OOM in run.marks["kind"]:
        print_oom(run, console, path=path)
        out.line()
    moment = run.peak["seq"] if seq is None else seq
    _headline(run, out, moment, seq is None or moment == run.peak["seq"])
    live = r.rows(run, moment, "category")
    if not live:
        out.line("nothing was alive" if seq is not None else "nothing was allocated")
        return
    out.line()
    for line in chart(run, r.step_of(run, moment), min(console.width, 100), out.plain, moment):
        out.line(line)
    out.line()
    _categories(run, out, live, moment)
    _largest(run, out, moment, rows, path)
    _recomputed(run, out, moment)
    print_arenas(run, out, rows, STYLES)
    print_ranks(run, out, rows)
    if advice is not None:
        _advise(out, advice)
    if path is not None:
        out.line()
        out.line(f"tapegrad report {out.file(path)} --html", style="bold")


def print_table(run: Run, console: Console, groups: list[r.Row], by: str, seq: int, limit: int) -> None:
    """Print groups of what was alive at ``seq``, ``limit`` of them (0: all), below a line that says when that was."""
    out = RunOutput(console, run)
    _headline(run, out, seq, seq == run.peak["seq"])
    out.line()
    listed = groups[:limit] if limit else groups
    _groups(out, by.capitalize(), listed, sum(row.bytes for row in groups), by)
    left = groups[len(listed) :]
    if left:
        out.line(f"{out.dots} {len(left):,} more, {format_bytes(sum(row.bytes for row in left))} (--rows 0 shows all)")
    out.line(f"total {_exact(sum(row.bytes for row in groups))}, {counted(sum(x.count for x in groups), 'allocation')}")


def print_oom(run: Run, console: Console, *, path: str | None = None) -> None:
    """Print why there was no room: what was asked for, what was alive then, and what could go first."""
    out = RunOutput(console, run)
    moment = seq_at(run, "oom")
    live = r.rows(run, moment, "category")
    used, limit = sum(row.bytes for row in live), run.meta.get("limit_bytes")
    asked = [run.text(text) for seq, text in zip(run.marks["seq"], run.marks["text"]) if seq == moment]
    origin = r.origin(run, moment)
    message = run.meta["outcome"].get("message", "")
    told = [*asked, *([message] if message not in asked else [])]
    lines = [out.text(text) for text in told if text]
    lines.append(f"used {_exact(used)}" + (f", limit {_exact(limit)}" if limit else "") + _reserved(run, moment))
    lines.append("alive: " + ", ".join(f"{row.key} {format_bytes(row.bytes)}" for row in live))
    first = _first_to_go(run, moment)
    if first is not None:
        idle = f", idle for {out.ms(first.idle_ns)}" if first.idle_ns >= 0 else ""
        what = "largest idle" if any("cannot be evicted" in text for text in told) else "first to go"
        lines.append(f"{what}: {out.source(first.key)} {out.op(first.op)}: {format_bytes(first.bytes)}{idle}")
    title = f"Out of memory on {out.text(run.meta['device']['name'])}{_when(origin.step if origin else -1, origin)}"
    out.panel(title, lines)
    if path is not None:
        out.line(f"all that was alive: tapegrad report {out.file(path)} --at oom --by line -n 0")


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else format_bytes(nbytes)


def _headline(run: Run, out: RunOutput, seq: int, is_peak: bool) -> None:
    total = run.peak["bytes"] if is_peak else sum(row.bytes for row in r.rows(run, seq, "category"))
    device = run.meta["device"]
    whole = device.get("total_bytes")
    # a share too small to be told is not worth its room
    share = f", {percent(total, whole)} of the device" if whole and total * 2000 >= whole else ""
    what = "Peak" if is_peak else "Alive"
    whose = f" of rank {run.meta['rank']}" if run.count("ranks") > 1 else ""
    where = f"{out.text(device['name'])}{whose}"
    out.line(f"{what} {_exact(total)} on {where}{share}{_reserved(run, seq)}", style="bold")
    origin = r.origin(run, seq)
    if origin is not None:
        where = out.source(r.source_line(origin.file, origin.line, origin.function))
        op = f" ({out.op(origin.op)})" if origin.op else ""
        out.line(f"at {where}{op}{_when(r.step_of(run, seq), origin)}")


def _when(step: int, origin: r.Origin | None) -> str:
    parts = [f"step {step}"] if step >= 0 else []
    return "".join(f", {part}" for part in [*parts, *([origin.phase] if origin else [])])


def _reserved(run: Run, seq: int) -> str:
    """What the pool had reserved at the peak; samples of other moments are too rare to speak of any moment."""
    reserved = run.peak["reserved_bytes"] if seq == run.peak["seq"] else -1
    return f", reserved {format_bytes(reserved)}" if reserved >= 0 else ""


def _categories(run: Run, out: RunOutput, live: list[r.Row], seq: int) -> None:
    total = sum(row.bytes for row in live)
    by_name = {row.key: row for row in live}
    cells: list[list[str | Text]] = []
    for name in sorted(CATEGORIES, key=lambda c: (-(by_name[c].bytes if c in by_name else -1), CATEGORIES.index(c))):
        if name in by_name:
            row, style = by_name[name], STYLES[name]
            bar = out.bar(row.bytes, max(x.bytes for x in live), style)
            cells.append([Text(name, style), format_bytes(row.bytes), percent(row.bytes, total), f"{row.count:,}", bar])
    cells.append(["total", format_bytes(total), "", f"{sum(row.count for row in live):,}", ""])
    columns = [
        Column("Alive then"), Column("bytes", right=True), Column("share", right=True), Column("allocs", right=True),
        Column(""),
    ]  # fmt: skip
    out.table(columns, cells, rule=True)
    if (outside := r.unattributed(run, seq)) > 0:
        out.line(f"beside it, unattributed {format_bytes(outside)}: taken from the pool by other code")
    out.line(_ledger(run), style="dim")


def _ledger(run: Run) -> str:
    checks = run.checks
    events = counted(checks["events"], "event")
    if checks["checked"] > 0:
        equal = "=" if checks["drift_bytes"] == 0 else "differs from"
        pool = "NumPy's allocations" if run.meta["device"]["name"].startswith("cpu") else "pool"
        said = f"ledger {equal} {pool}: drift {checks['drift_bytes']} B in {counted(checks['checked'], 'comparison')}"
    else:
        said = "ledger not compared (profile --check)"
    dropped = f"; {counted(checks['dropped'], 'event')} of steps that were not kept" if checks["dropped"] > 0 else ""
    return f"{said}, {events}{dropped}"


def _largest(run: Run, out: RunOutput, seq: int, limit: int, path: str | None) -> None:
    groups = r.rows(run, seq, "line")
    out.line()
    listed = groups[:limit] if limit else groups
    _groups(out, "Largest, by line", listed, sum(row.bytes for row in groups), "line")
    if len(groups) > len(listed):
        more = f": tapegrad report {out.file(path)} --by line" if path is not None else ""
        out.line(f"{out.dots} {len(groups) - len(listed):,} more{more}")


def _groups(out: RunOutput, title: str, groups: list[r.Row], total: int, by: str) -> None:
    by_line = by == "line"
    times = "x" if out.plain else "×"
    columns = [Column(title, flexible=True, source=by_line)]
    columns += [Column("op", flexible=True), Column("held by", flexible=True)] if by_line else []
    columns += [Column(f"n {times} size", right=True), Column("bytes", right=True)]
    columns += [Column("share", right=True)] if not by_line else []  # 80 columns hold either
    columns += [Column("idle", right=True)]
    cells: list[list[str | Text]] = []
    for row in groups:
        size = f" {times} {format_bytes(row.size)}" if row.size >= 0 else ""
        names = [out.op(row.op), out.text(row.holder)] if by_line else []
        share = [percent(row.bytes, total)] if not by_line else []
        name = out.source(row.key) if by_line else out.op(row.key) if by == "op" else out.text(row.key)
        key = Text(name, STYLES[row.category] if by == "category" else "")
        idle = out.ms(row.idle_ns) if row.idle_ns >= 0 else "-"
        cells.append([key, *names, f"{row.count:,}{size}", format_bytes(row.bytes), *share, idle])
    out.table(columns, cells)


def _recomputed(run: Run, out: RunOutput, seq: int) -> None:
    step = r.step_of(run, seq)
    reruns = r.reruns(run, seq, step)
    if not reruns:
        return
    out.line()
    times = "x" if out.plain else "×"
    columns = [
        Column(f"Recomputed in step {step}" if step >= 0 else "Recomputed", flexible=True, source=True),
        Column("times", right=True), Column("brought back", right=True), Column("took", right=True),
        Column("not alive then", right=True),
    ]  # fmt: skip
    cells: list[list[str | Text]] = []
    for rerun in reruns:
        name = out.source(r.source_line(rerun.file, rerun.line, rerun.name)) if rerun.file else out.text(rerun.name)
        took = out.ms(rerun.ns) if rerun.ns else "-"
        cells.append(
            [name, f"{rerun.count:,} {times}", format_bytes(rerun.bytes), took, format_bytes(rerun.spared_bytes)]
        )
    out.table(columns, cells)


def _advise(out: RunOutput, advice: Advice) -> None:
    """Cards, each with the lines to write; then commands."""
    if not (advice.cards or advice.commands):
        return
    out.line()
    out.line("What would help", "bold")
    arrow = "->" if out.plain else "→"
    for card in advice.cards:
        out.line(card.effect.replace("->", arrow))
        out.line(f"  {card.what}")
        for edit in card.edits:
            where = f"{out.files.get(edit.file, edit.file)}:{edit.line}"
            above = "" if edit.old else "above "
            out.line(f"  {above}{where}")
            if edit.new:
                out.line(f"    {edit.new}", "green")
    for what, command in advice.commands:
        out.line(f"{what}: {command}")


def _first_to_go(run: Run, seq: int) -> r.Row | None:
    """The line whose activations are most bytes; of equal ones, that which is idle longest."""
    activations = [row for row in r.rows(run, seq, "line") if row.category == "activation"]
    return max(activations, key=lambda row: (row.bytes, row.idle_ns, row.key), default=None)
