"""``tapegrad top``: devices, the processes on them, and by category what those of ours hold."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from tapegrad.profile.report.escape import plain
from tapegrad.profile.top import devices, processes
from tapegrad.profile.top.text import lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-1", "--once", is_flag=True, help="Print once and end; also what happens off a terminal.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes as integers, unknown is null.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII characters alone.")
def top(once: bool, interval: float, as_json: bool, ascii_only: bool) -> None:
    """Show devices, their processes, and what tapegrad's hold.

    Devices come from NVML (pip install nvidia-ml-py); where it is missing or refuses, that is said, and the rest is
    shown.  A program under `tapegrad profile` tells its bytes by category; of others the driver knows the total.
    Ctrl-C ends the live view.

    \b
    Examples:
      tapegrad top
      tapegrad top -1 --ascii
      tapegrad top --json | jq '.processes[].categories'
    """
    if as_json:
        click.echo(json.dumps(gather(), indent=2))
        return
    ascii_only = ascii_only or plain(getattr(sys.stdout, "encoding", None) or "ascii")
    if once or not _terminal():
        Console(highlight=False).print(_view(ascii_only), soft_wrap=True)
        return
    try:
        _live(interval, ascii_only)
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
    for one in ours:
        one["age"] = None if one["updated"] is None else max(0.0, now - one["updated"])
    return {"notes": notes, "devices": gpus, "cpu": processes.cpu(), "processes": ours}


def _view(ascii_only: bool) -> Text:
    """All that is known now, devices in bold."""
    texts = lines(gather(), shutil.get_terminal_size((80, 24)).columns, ascii_only)
    return Text("\n").join(Text(line, "bold" if line.startswith(("GPU ", "CPU")) else "") for line in texts)


def _terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _live(interval: float, ascii_only: bool) -> None:
    from rich.live import Live

    with Live(_view(ascii_only), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(_view(ascii_only), refresh=True)
