"""A line on the terminal while bytes are written or read for longer than a second."""

from __future__ import annotations

import sys
import time

from tapegrad.sizes import format_bytes

_AFTER, _EVERY = 1.0, 0.1


class Progress:
    """``save step-120: 1.20 GiB of 8.00 GiB`` on stderr; it goes when all is done.  ``shown``: False on most ranks."""

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = shown and sys.stderr.isatty()
        self._next = time.monotonic() + _AFTER
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if self._shown and (now := time.monotonic()) >= self._next:
            self._next = now + _EVERY
            text = f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}"
            sys.stderr.write(f"\r{text.ljust(self._width)}")
            sys.stderr.flush()
            self._width = len(text)

    def __exit__(self, *exception: object) -> None:
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
