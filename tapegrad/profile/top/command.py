"""``tapegrad top``: devices, the processes on them, and by category what those of ours hold."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import click
import psutil
from rich.console import Console

from tapegrad.profile.top import devices, processes
from tapegrad.profile.top.text import view


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-1", "--once", is_flag=True, help="Print once and end; also what happens off a terminal.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes as integers, unknown is null.")
def top(once: bool, interval: float, as_json: bool) -> None:
    """Show devices, their processes, and what tapegrad's hold.

    Devices come from NVML (pip install nvidia-ml-py); where it is missing or refuses, that is said, and the rest is
    shown.  A program under `tapegrad profile` tells its bytes by category; of others the driver knows the total.
    Ctrl-C ends the live view.

    \b
    Examples:
      tapegrad top
      tapegrad top --json | jq '.processes[].categories'
    """
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(gather(), indent=2))
    elif once or not on_terminal():
        console.print(view(gather(), console), soft_wrap=True)
    else:
        try:
            _live(console, interval)
        except KeyboardInterrupt:
            pass  # the way to end it


def gather() -> dict[str, Any]:
    """All that is known now; integers are bytes unless their name says otherwise, None is "not known"."""
    gpus, notes = devices.gather()
    try:
        ours = processes.published()
    except OSError as error:
        ours, notes = [], [*notes, f"tapegrad's programs are not shown: {error}"]
    now = time.time()
    for process in ours:
        process["age"] = None if process["updated"] is None else max(0.0, now - process["updated"])
    memory = psutil.virtual_memory()
    cpu = {"total_bytes": memory.total, "available_bytes": memory.available}
    return {"notes": notes, "devices": gpus, "cpu": cpu, "processes": ours}


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _live(console: Console, interval: float) -> None:
    from rich.live import Live

    with Live(view(gather(), console), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(view(gather(), console), refresh=True)
