"""Source text of the lines that a run names."""

from __future__ import annotations

import linecache
import os
from collections import defaultdict

from tapegrad.tracing.run import Run

AROUND = 3
"""Lines shown before and after a line that appears."""
_WIDTH = 200


def sources_of(run: Run, only_modules: bool = False) -> dict[str, dict[str, str]]:
    """Return by file and line number the lines that allocate, and those around them.

    ``only_modules``: only of regular files whose names end in ``.py``.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for table in (run.frames, run.tasks):
        for file, line in zip(table["file"], table["line"]):
            if file >= 0:
                numbers[run.text(file)].update(range(max(1, line - AROUND), line + AROUND + 1))
    sources: dict[str, dict[str, str]] = {}
    for name, lines in numbers.items():
        if only_modules and not (name.endswith(".py") and os.path.isfile(name)):
            continue
        texts = linecache.getlines(name)
        shown = {str(n): texts[n - 1].rstrip("\n")[:_WIDTH] for n in sorted(lines) if n <= len(texts)}
        if shown:
            sources[name] = shown
    return sources
