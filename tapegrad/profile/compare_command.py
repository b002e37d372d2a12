"""``tapegrad compare``: two runs side by side, and an exit code for automated checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import click
from rich.console import Console

from tapegrad.profile import compare as c
from tapegrad.profile.compare import BY, Change, Comparison, Threshold
from tapegrad.profile.report.rows import op_name
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import ms, percent
from tapegrad.sizes import format_bytes
from tapegrad.tracing.file import load


class Side(NamedTuple):
    """One of the two runs: its file, and how it ended (nothing: it finished)."""

    path: str
    outcome: str


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("before", metavar="A", type=click.Path())
@click.argument("after", metavar="B", type=click.Path())
@click.option("--fail-above", metavar="5%|100MiB", help="Exit with 3 if the peak of B is higher by more than this.")
@click.option("--time-above", metavar="10%|20ms", help="Exit with 3 if a step of B takes longer by more than this.")
@click.option("--by", type=click.Choice(BY), default="category", show_default=True, help="Groups at the peaks.")
@click.option("-n", "--rows", type=click.IntRange(min=0), default=10, show_default=True, help="Groups; 0 is all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; bytes and ns are integers.")
def compare(
    before: str, after: str, fail_above: str | None, time_above: str | None, by: str, rows: int, as_json: bool
) -> None:
    """Compare two recorded runs, with an exit code for CI.

    Shown are peaks, step times (medians of the steps after the first), what was alive at the peaks, and whether
    gradients are equal, bit for bit, if both runs recorded them (tapegrad profile --gradients).

    \b
    Examples:
      tapegrad compare before.sqlite after.sqlite --fail-above 2%
      tapegrad compare before.sqlite after.sqlite --by line --json

    The exit code is 3 if B exceeds a threshold, or did not finish though there is one, or if its gradients differ; 2 if
    a run cannot be read, 1 on other errors.
    """
    bounds: dict[str, Threshold] = {}
    try:
        if fail_above is not None:
            bounds["peak used"] = c.parse_threshold(fail_above, "bytes")
        if time_above is not None:
            bounds["step time"] = c.parse_threshold(time_above, "ns")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    runs = load(before), load(after)
    comparison = c.compare(*runs, by)
    outcomes = c.outcome(runs[0]), c.outcome(runs[1])
    failed = bool(bounds) and bool(outcomes[1])
    if time_above is not None and not failed and not comparison.figure("step time").known:
        raise click.ClickException("--time-above needs a step that came to its end in both runs; see tg.memory.step()")
    figures = ((name, bound, comparison.figure(name)) for name, bound in bounds.items())
    exceeded = [name for name, bound, figure in figures if figure.known and bound.exceeded(figure)]
    if comparison.gradients.state in ("different", "none in common"):
        exceeded.append("gradients")
    if failed:
        exceeded.append("B did not finish")
    shown = [Side(before, outcomes[0]), Side(after, outcomes[1])]
    if as_json:
        click.echo(json.dumps(_as_json(comparison, shown, by, rows, exceeded), indent=2))
    else:
        _print(comparison, shown, by, rows, exceeded)
    if exceeded:
        raise click.exceptions.Exit(3)


def _as_json(comparison: Comparison, sides: list[Side], by: str, rows: int, exceeded: list[str]) -> dict[str, object]:
    parts = comparison.parts[:rows] if rows and by != "category" else comparison.parts
    return {
        "before": sides[0].path,
        "after": sides[1].path,
        "outcomes": [side.outcome or "finished" for side in sides],
        "figures": [asdict(change) for change in comparison.figures],
        "by": by,
        "at_peak": [asdict(change) for change in parts],
        "gradients": asdict(comparison.gradients),
        "exceeded": exceeded,
    }


def _print(comparison: Comparison, sides: list[Side], by: str, rows: int, exceeded: list[str]) -> None:
    out = Output(Console(highlight=False))
    for name, side in zip("AB", sides):
        out.line(f"{name}: {side.path}")
        if side.outcome:
            out.line(f"   did not finish: {side.outcome}", "bold red")
    out.line()
    _table(out, "", [change for change in comparison.figures if change.before >= 0 or change.after >= 0])
    out.line()
    parts = comparison.parts[:rows] if rows and by != "category" else comparison.parts
    if by == "op":
        parts = tuple(replace(part, name=op_name(part.name)) for part in parts)
    _table(out, f"At the peaks, by {by}", parts)
    if len(comparison.parts) > len(parts):
        out.line(f"{len(comparison.parts) - len(parts):,} more (--rows 0 shows all)")
    out.line()
    out.line(f"gradients: {_gradients(comparison)}")
    if exceeded:
        out.line(f"worse than allowed: {', '.join(exceeded)}", "bold red")


def _gradients(comparison: Comparison) -> str:
    g = comparison.gradients
    if g.state == "not recorded":
        return "not recorded (tapegrad profile --gradients)"
    alone = f", {g.alone:,} in one run only" if g.alone else ""
    first = f"; the first: {g.first[1]} in step {g.first[0]}" if g.first else ""
    return f"{g.state}, {g.compared:,} compared{alone}{first}"


def _table(out: Output, title: str, changes: Sequence[Change]) -> None:
    columns = [
        Column(title, flexible=True, source=True), Column("A", right=True), Column("B", right=True),
        Column("change", right=True), Column("", right=True),
    ]  # fmt: skip
    out.table(columns, [_cells(change, out.plain) for change in changes])


def _cells(change: Change, plain: bool) -> list[str]:
    form = {"bytes": format_bytes, "ns": lambda n: ms(n, plain), "count": lambda n: f"{n:,}"}[change.unit]
    values = [form(n) if n >= 0 else "-" for n in (change.before, change.after)]
    if not change.known or change.difference == 0:
        return [change.name, *values, "=" if change.known else "", ""]
    sign = "+" if change.difference > 0 else "-"
    share = percent(abs(change.difference), change.before) if change.before else ""
    share = sign + share if share[:1].isdigit() else share
    return [change.name, *values, f"{sign}{form(abs(change.difference))}", share]
