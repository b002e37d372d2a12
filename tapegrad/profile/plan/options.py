"""Options that the commands about plans share: budgets, shares, exit codes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tapegrad.profile.runs.model import Run

DOES_NOT_FIT = 3
"""The exit code where no plan fits."""


def budget_of(run: Run, text: str) -> int:
    """Bytes of a ``--budget``.  Raises click.UsageError."""
    if text.strip().endswith("%"):
        total = device_bytes(run)
        if total is None:
            raise click.UsageError(f"--budget {text}: the run does not say how large the device is; give a size")
        return int(total * percent("--budget", text) / 100)
    return size("--budget", text)


def size(option: str, text: str) -> int:
    """Bytes of an option such as ``512MiB``.  Raises click.UsageError."""
    from tapegrad.memory.sizes import SizeError, parse_bytes

    try:
        return parse_bytes(text)
    except SizeError as e:
        raise click.UsageError(f"{option}: {e}") from None


def device_bytes(run: Run) -> int | None:
    """The memory of the device of ``run``, or the limit it ran under."""
    for found in (run.meta.get("limit_bytes"), run.meta["device"].get("total_bytes")):
        if isinstance(found, int) and found > 0:
            return found
    return None


def percent(option: str, text: str) -> float:
    """The number of an option such as ``10%``.  Raises click.UsageError."""
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text)
    if found is None:
        number = text.strip() if re.fullmatch(r"\s*\d{1,6}(\.\d{1,6})?\s*", text) else "10"
        raise click.UsageError(f"{option} {text!r}: a share is a number and a percent sign, such as {number}%")
    return float(found[1])
