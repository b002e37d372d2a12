"""A line on the terminal while bytes are written or read for longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tapegrad.sizes import format_bytes


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A function that is called with the bytes that were done; the block ends with the line erased.

    The line is ``save step-000120: 1.2 GiB of 8.0 GiB``, on stderr.  ``shown``: False on most ranks.
    """
    done, width, due = 0, 0, time.monotonic() + 1.0

    def advance(nbytes: int) -> None:
        nonlocal done, width, due
        done += nbytes
        if shown and (now := time.monotonic()) >= due and sys.stderr.isatty():
            due = now + 0.1
            text = f"{what}: {format_bytes(done)} of {format_bytes(total)}"
            print(f"\r{text.ljust(width)}", end="", file=sys.stderr, flush=True)
            width = len(text)

    try:
        yield advance
    finally:
        if width:
            print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
