"""``tapegrad report``: a recorded run as text and as files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from tapegrad.profile.report.outputs import DERIVED, ENDINGS, STDOUT, View, targets, write
from tapegrad.profile.report.rows import BY, SORTS

if TYPE_CHECKING:
    from tapegrad.tracing.run import Run

_WHAT = {
    "html": "an interactive page; it needs no network",
    "csv": "one line per allocation",
    "json": "what is shown, as integers; without FILE to stdout",
    "perfetto": "a trace for ui.perfetto.dev and chrome://tracing",
    "speedscope": "a flame graph of live bytes for speedscope.app",
    "memory_viz": "a snapshot for pytorch.org/memory_viz",
}


def _files(command: Callable[..., object]) -> Callable[..., object]:
    """An option per format, each with or without the name of a file."""
    for kind in reversed(ENDINGS):
        option = click.option(
            f"--{kind.replace('_', '-')}",
            kind,
            metavar="[FILE]",
            is_flag=False,
            flag_value=STDOUT if kind == "json" else DERIVED,
            help=f"Write {_WHAT[kind]}.",
        )
        command = option(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", metavar="RUN", required=False, type=click.Path())
@click.option("--at", metavar="MOMENT", default="peak", show_default=True, help="peak, end, oom, step:N or seq:N.")
@click.option("--by", type=click.Choice(BY), help="Print a table of what was alive then, in groups.")
@click.option("--sort", type=click.Choice(SORTS), default="bytes", show_default=True, help="Order of the table.")
@click.option("-n", "--rows", type=click.IntRange(min=0), help="Lines of the table; 0 is all.")
@click.option("--no-source", is_flag=True, help="Leave the program's own source out of the HTML page.")
@_files
@click.option("--open", "open_html", is_flag=True, help="Write the HTML page and show it in a browser.")
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
def report(
    run: str | None,
    at: str,
    by: str | None,
    sort: str,
    rows: int | None,
    no_source: bool,
    open_html: bool,
    force: bool,
    **files: str | None,
) -> None:
    """Show a recorded run as text, or write it as files.

    Without options: the peak, what was alive then, and what recomputation cost.  A FILE that is left out is named after
    RUN and lies beside it; - is stdout.  Files that exist are kept unless --force is given.

    \b
    Examples:
      tapegrad report tapegrad-train.4242.sqlite
      tapegrad report tapegrad-train.4242.sqlite --at oom --by line -n 0
      tapegrad report tapegrad-train.4242.sqlite --html --csv allocations.csv

    The exit code is 1 if a file cannot be written, 2 if RUN cannot be read or an option does not fit.
    """
    from tapegrad.tracing.file import load
    from tapegrad.tracing.timeline import at as seq_at

    if run is None:
        raise click.UsageError("which run?  Name it first: tapegrad report RUN --html")
    asked = {kind: name for kind, name in files.items() if name is not None}
    if open_html:
        asked.setdefault("html", DERIVED)
    if open_html and asked["html"] == STDOUT:
        raise click.UsageError("--open shows a file: give --html the name of one")
    outputs = targets(asked, run, force)
    recorded = load(run)
    try:
        seq = seq_at(recorded, at)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if at.startswith("seq:") and seq < int(at.removeprefix("seq:")):
        raise click.UsageError(f"there is no event {at.removeprefix('seq:')}: the last of the run is {seq}")
    if not outputs:
        _print(recorded, run, at, seq, by, sort, rows)
    view = View(at, seq, by or "category", sort, rows or 0, not no_source)
    for kind, file in outputs.items():
        write(kind, recorded, view, file)
        if file is not None:
            click.echo(f"wrote {click.format_filename(file)}", err=True)
    if open_html:
        click.launch(str(outputs["html"]))


def _print(run: Run, path: str, at: str, seq: int, by: str | None, sort: str, rows: int | None) -> None:
    from rich.console import Console

    from tapegrad.profile.report import text
    from tapegrad.profile.report.rows import rows as groups

    console = Console(highlight=False)
    if by is None and sort == "bytes":
        from tapegrad.profile.plan.advice import advice

        helps = advice(run, path) if at == "peak" and run.meta.get("plan") is None else None
        moment = None if at == "peak" else seq
        text.print_summary(run, console, path=path, seq=moment, rows=5 if rows is None else rows, advice=helps)
    else:
        by = by or "line"
        text.print_table(run, console, groups(run, seq, by, sort), by, seq, 20 if rows is None else rows)
