"""Cells: places whose content may be exchanged, the only things that change.

Reruns of a checkpointed function see an *overlay*: the contents of the time of its first run; what the rerun writes
goes to the overlay and is dropped with it.  So a rerun neither sees a later value nor repeats a state change.  A
variable's cell holds a tensor's buffer; a random generator's holds its position.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Seen = dict["Cell", tuple[Any, Any]]
"""Cells that were used, each with its content before its first use, and its owner (a variable, or None)."""


class _Cells(threading.local):
    """How this thread sees cells: overlays, innermost last, and look-outs that note what is used."""

    overlays: tuple[dict[Cell, Any], ...] = ()
    lookouts: tuple[Seen, ...] = ()


_cells = _Cells()


class Cell:
    """Something whose content may be exchanged."""

    __slots__ = ("__weakref__", "_content")

    def __init__(self, content: Any) -> None:
        self._content = content

    def get(self, owner: Any = None) -> Any:
        """The content as this thread sees it; look-outs note the ``owner`` with it."""
        content = self._content
        for overlay in _cells.overlays:
            content = overlay.get(self, content)
        for seen in _cells.lookouts:
            first = seen.setdefault(self, (content, owner))
            if first[1] is None and owner is not None:
                seen[self] = (first[0], owner)
        return content

    def set(self, content: Any, owner: Any = None) -> None:
        """Exchange the content: in the innermost overlay if there is one, else for everybody."""
        if _cells.lookouts:
            self.get(owner)
        if _cells.overlays:
            _cells.overlays[-1][self] = content
        else:
            self._content = content


@contextmanager
def lookout() -> Iterator[Seen]:
    """Note each cell used in the block, in this thread, with its content before its first use."""
    seen: Seen = {}
    before = _cells.lookouts
    _cells.lookouts = (*before, seen)
    try:
        yield seen
    finally:
        _cells.lookouts = before


@contextmanager
def shadowed(writes: dict[Cell, Any]) -> Iterator[None]:
    """What this thread writes to cells in the block goes to ``writes`` instead."""
    before = _cells.overlays
    _cells.overlays = (*before, writes)
    try:
        yield
    finally:
        _cells.overlays = before


@contextmanager
def overlay(contents: dict[Cell, Any]) -> Iterator[None]:
    """Let this thread see ``contents`` in the block; what is written there is dropped afterwards."""
    before = _cells.overlays
    _cells.overlays = (*before, dict(contents))
    try:
        yield
    finally:
        _cells.overlays = before
