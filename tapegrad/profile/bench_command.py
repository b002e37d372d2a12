"""``tapegrad bench``: what saving memory costs on this machine, on canned workloads."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.console import Console

from tapegrad.profile.report.table import Column, Output
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
    results = _measure(quick, device)
    if as_json:
        click.echo(json.dumps(_to_json(results), indent=2))
    elif as_markdown:
        click.echo(_markdown(results))
    else:
        _print(results)
    if not results.identical:
        click.echo("gradients differ", err=True)
        raise click.exceptions.Exit(1)


class Results(NamedTuple):
    """The ways of each workload, the plain one first."""

    device: str
    quick: bool
    measured: list[tuple[Workload, list[Way]]]

    @property
    def identical(self) -> bool:
        """Whether all ways gave the gradients of the plain one."""
        return all(way.identical for _, ways in self.measured for way in ways)


def _measure(quick: bool, device: str | None) -> Results:
    import tapegrad as tg
    from tapegrad.profile import bench_run, bench_workloads

    with nullcontext() if device is None else tg.device(device):
        results = Results(str(tg.zeros(1).device), quick, [])
        for make in bench_workloads.ALL:
            tg.random.seed(0)
            work = make(quick)
            with _Progress(work.name, 5 if quick else 7) as progress:
                results.measured.append((work, bench_run.measure(work, progress.rounds, progress)))
    return results


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


def _to_json(results: Results) -> dict[str, object]:
    import tapegrad as tg

    return {
        "tapegrad": tg.__version__, "device": results.device, "quick": results.quick, "identical": results.identical,
        "workloads": [
            {"name": work.name, "size": work.size, "ways": [_way_to_json(way, ways[0]) for way in ways]}
            for work, ways in results.measured
        ],
    }  # fmt: skip


def _way_to_json(way: Way, plain: Way) -> dict[str, object]:
    timed = bool(way.step_ns)
    return {
        "way": way.way, "peak_bytes": way.peak_bytes, "base_bytes": way.base_bytes, "budget_bytes": way.budget_bytes,
        "step_ns": way.median_ns if timed else None, "times_plain": round(way.times(plain), 3) if timed else None,
        "reruns": way.reruns, "evictions": way.evictions, "identical": way.identical, "error": way.error,
    }  # fmt: skip


def _rows(results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for work, ways in results.measured:
        for way in ways:
            name = work.name if way is ways[0] else ""
            if way.error is not None:
                rows.append((name, way.way, "does not fit", "", "", "", ""))
                continue
            share = f"{100 * way.peak_bytes / ways[0].peak_bytes:.0f} %"
            same = "identical" if way.identical else "DIFFER"
            rows.append(
                (name, way.way, iec(way.peak_bytes), share, ms(way.median_ns), f"{way.times(ways[0]):.2f}", same)
            )
    return rows


def _print(results: Results) -> None:
    import tapegrad as tg

    out = Output(Console(highlight=False))
    out.line(f"tapegrad {tg.__version__} on {results.device}")
    out.table([Column(title, right=2 <= i <= 5) for i, title in enumerate(HEADINGS)], _rows(results))
    for work, _ in results.measured:
        out.line(f"{work.name}: {work.size}")


def _markdown(results: Results) -> str:
    rows = [HEADINGS, ("---", "---", "---:", "---:", "---:", "---:", "---"), *_rows(results)]
    sizes = "; ".join(f"{work.name}: {work.size}" for work, _ in results.measured)
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"On {results.device}. {sizes}."])
