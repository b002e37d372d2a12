"""``tapegrad bench``: what saving memory costs on this machine, on canned workloads."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from tapegrad.profile.report.units import iec, ms

if TYPE_CHECKING:
    from tapegrad.profile.bench_run import Way
    from tapegrad.profile.bench_workloads import Workload

HEADINGS = ("workload", "way", "peak", "of plain", "step", "times plain", "gradients")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Smaller workloads and fewer rounds: under 20 seconds on two cores.")
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; the default is tapegrad's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes and nanoseconds, integers.")
@click.option("--md", "as_markdown", is_flag=True, help="Print a Markdown table.")
def bench(quick: bool, device: str | None, as_json: bool, as_markdown: bool) -> None:
    """Measure what saving memory costs here, on canned workloads.

    The gradients of a transformer, an MLP, an LSTM and a wave equation are computed in three ways: plainly, with every
    part under recompute_grad, and inside a budget of half the memory that the plain way needs beyond the parameters.
    The three take turns, so that what else the machine does slows all of them alike; times are medians.

    The exit code is 1 if gradients differ in a single bit.

    \b
    Examples:
      tapegrad bench --quick
      tapegrad bench --device cuda --md > bench.md
    """
    if as_json and as_markdown:
        raise click.UsageError("--json and --md exclude each other")
    found = run(quick, device)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(_markdown(found) if as_markdown else _text(found))
    if not found["identical"]:
        click.echo("gradients differ", err=True)
        raise click.exceptions.Exit(1)


def run(quick: bool, device: str | None) -> dict[str, Any]:
    """All figures, as ``--json`` prints them."""
    import tapegrad as tg
    from tapegrad.profile import bench_run, bench_workloads

    done = []
    with nullcontext() if device is None else tg.device(device):
        name = str(tg.zeros(1).device)
        for make in bench_workloads.ALL:
            tg.random.seed(0)
            work = make(quick)
            with _Progress(work.name, 5 if quick else 7) as progress:
                done.append(_figures(work, bench_run.measure(work, progress.rounds, progress)))
    same = all(way["identical"] for work in done for way in work["ways"])
    return {"tapegrad": tg.__version__, "device": name, "quick": quick, "identical": same, "workloads": done}


class _Progress:
    """On stderr: one line for each workload, or on a terminal one line that changes."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self.moves = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        click.echo(f"{self.name} ...", err=True, nl=not self.moves)
        return self

    def __call__(self, done: int) -> None:
        if self.moves:
            click.echo(f"\r{self.name}: round {done} of {self.rounds}", err=True, nl=False)

    def __exit__(self, *exception: object) -> None:
        if self.moves:
            click.echo(f"\r{' ' * 40}\r", err=True, nl=False)


def _figures(work: Workload, ways: list[Way]) -> dict[str, Any]:
    plain = ways[0]
    return {
        "name": work.name,
        "size": work.size,
        "ways": [
            {
                "way": way.way,
                "peak_bytes": way.peak_bytes,
                "base_bytes": way.base_bytes,
                "budget_bytes": way.budget_bytes,
                "step_ns": round(statistics.median(way.step_ns)) if way.step_ns else None,
                "times_plain": round(way.times(plain), 3) if way.step_ns else None,
                "reruns": way.reruns,
                "evictions": way.evictions,
                "identical": way.identical,
                "error": way.error,
            }
            for way in ways
        ],
    }


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for work in found["workloads"]:
        for way in work["ways"]:
            name = work["name"] if way is work["ways"][0] else ""
            if way["error"] is not None:
                rows.append((name, way["way"], "does not fit", "", "", "", ""))
                continue
            share = f"{100 * way['peak_bytes'] / work['ways'][0]['peak_bytes']:.0f} %"
            same = "identical" if way["identical"] else "DIFFER"
            times = f"{way['times_plain']:.2f}"
            rows.append((name, way["way"], iec(way["peak_bytes"]), share, ms(way["step_ns"]), times, same))
    return rows


def _text(found: dict[str, Any]) -> str:
    rows = [HEADINGS, *_rows(found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [f"tapegrad {found['tapegrad']} on {found['device']}"]
    for number, row in enumerate(rows):
        cells = [c.rjust(w) if 2 <= i <= 5 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines[-1] = click.style(lines[-1], bold=True)
    lines += [f"{work['name']}: {work['size']}" for work in found["workloads"]]
    return "\n".join(lines)


def _markdown(found: dict[str, Any]) -> str:
    rows = [HEADINGS, ("---", "---", "---:", "---:", "---:", "---:", "---"), *_rows(found)]
    sizes = "; ".join(f"{work['name']}: {work['size']}" for work in found["workloads"])
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"On {found['device']}. {sizes}."])
