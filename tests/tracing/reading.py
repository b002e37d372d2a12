"""Runs that are written to a file and read again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tapegrad.tracing.file import load, save
from tapegrad.tracing.run import Run


def reread(run: Run) -> Run:
    """Return what a file holds that ``run`` was written to; it is checked on the way."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.sqlite")
        save(run, path)
        return load(path)
