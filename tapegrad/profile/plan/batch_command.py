"""``tapegrad plan --batch``: another batch, and the largest one that fits."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from tapegrad.profile.plan.batch import MOST, Scaled, of_one, of_two
from tapegrad.profile.plan.options import DOES_NOT_FIT, budget_of, device_bytes

if TYPE_CHECKING:
    from tapegrad.profile.runs.model import Run


def answer(run: Run, path: str, options: dict[str, Any]) -> int:
    """Print what a batch would give; the exit code: 3 if it does not fit ``--budget``."""
    from tapegrad.profile.runs import load

    other, now, wanted = options["other"], options["batch_now"], options["batch"]
    scaled = of_one(run, now) if other is None else of_two(run, load(other), now)
    limit = device_bytes(run) if options["budget"] is None else budget_of(run, options["budget"])
    nbytes, ns = scaled.bytes_at(wanted), scaled.ns_at(wanted)
    largest = None if limit is None else scaled.largest(limit)
    fits = limit is None or nbytes <= limit
    if options["as_json"]:
        click.echo(json.dumps({
            "batch_now": scaled.now, "batch": wanted, "measured_bytes": run.peak["bytes"], "peak_bytes": nbytes,
            "step_ns": ns, "step_bound": scaled.bound(wanted) or None, "limit_bytes": limit, "largest_batch": largest,
            "fits": fits, "assumed": scaled.assumed,
        }, indent=1))  # fmt: skip
    else:
        _print(run, scaled, wanted, limit, largest)
    return 0 if fits or options["budget"] is None else DOES_NOT_FIT


def _print(run: Run, scaled: Scaled, wanted: int, limit: int | None, largest: int | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from tapegrad.profile.plan.words import change_in_bytes
    from tapegrad.profile.report.units import iec, ms

    console = Console(highlight=False)
    bound = scaled.bound(wanted)
    step = f"step at {bound} {ms(scaled.ns_at(wanted))}" if bound else f"step {ms(scaled.ns_at(wanted))}"
    now, then = scaled.bytes_at(scaled.now), scaled.bytes_at(wanted)
    lines = [
        f"Batch {scaled.now} now: peak {iec(run.peak['bytes'])}, step {ms(scaled.ns_at(scaled.now))}",
        f"Batch {wanted}: predicted peak {iec(then)} ({change_in_bytes(then - now)}), {step}",
    ]
    if limit is not None and largest is not None:
        most = f"the largest batch is {largest:,}" if largest < MOST // 2 else "any batch fits"
        lines.append(
            f"{'Fits' if then <= limit else 'Does not fit'} {iec(limit)}; {most if largest else 'no batch does'}"
        )
    for text in lines:
        console.print(Text(text), soft_wrap=True)
    for line in textwrap.wrap(f"Assumed: {scaled.assumed}.", min(console.width, 120)):
        console.print(Text(line, "dim"), soft_wrap=True)
