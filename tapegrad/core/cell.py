"""Cells hold a content that may be exchanged; nothing else in the engine changes.

Reruns of a checkpointed function see an *overlay*: the contents of the time of its first run; what the rerun writes
goes to the overlay and is dropped with it.  So a rerun neither sees a later value nor repeats a state change.  A
variable's cell holds a tensor's buffer; a random generator's holds its position.

Another thread may exchange a content in the middle of a first run.  The look-out notes that as a *jump*, and the rerun
jumps as well: so two threads may draw from one generator of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from tapegrad.core.threads import Local

_CONTENT = attrgetter("_content")

Jumps = dict["Cell", dict[Any, Any]]
"""For each cell: from the content that this thread wrote to the one that another thread wrote afterwards."""


class Seen(dict["Cell", tuple[Any, Any]]):
    """Cells that were used, each with its content before its first use, and its owner (a variable, or None)."""

    def __init__(self, overlays: tuple[object, ...] = ()) -> None:
        self.jumps: Jumps = {}
        self.made: set[Cell] = set()
        """The cells that were made meanwhile."""
        self._left: dict[Cell, Any] = {}
        self._overlays = overlays  # under the overlays of an inner rerun, contents are of another time

    def got(self, cell: Cell, content: object, owner: object) -> None:
        """This thread has read ``content``."""
        first = self.setdefault(cell, (content, owner))
        if first[1] is None and owner is not None:
            self[cell] = (first[0], owner)
        if _cells.overlays is self._overlays:
            left = self._left.setdefault(cell, content)
            if left is not content:
                self.jumps.setdefault(cell, {})[left] = content
                self._left[cell] = content

    def put(self, cell: Cell, content: object) -> None:
        """This thread has exchanged the content."""
        if _cells.overlays is self._overlays:
            self._left[cell] = content


class _Overlay(dict["Cell", Any]):
    """Contents that a thread sees; what it writes goes here."""

    def __init__(self, contents: dict[Cell, object], jumps: Jumps) -> None:
        super().__init__(contents)
        self.jumps = jumps


class _Cells(Local):
    """How this thread sees cells: overlays, innermost last, and look-outs that note what is used."""

    overlays: tuple[dict[Cell, Any], ...] = ()
    lookouts: tuple[Seen, ...] = ()


_cells = _Cells()


class Cell:
    """Something whose content may be exchanged."""

    __slots__ = ("__weakref__", "_content")

    def __init__(self, content: Any) -> None:
        self._content = content
        for seen in _cells.lookouts:
            seen.made.add(self)

    def get(self, owner: object = None) -> Any:
        """The content as this thread sees it; look-outs note the ``owner`` with it."""
        content = self._content
        for overlay in _cells.overlays:
            content = overlay.get(self, content)
            if type(overlay) is _Overlay and self in overlay.jumps:
                content = overlay.jumps[self].get(content, content)
        for seen in _cells.lookouts:
            seen.got(self, content, owner)
        return content

    def set(self, content: object, owner: object = None) -> None:
        """Exchange the content: in the innermost overlay if there is one, else for all threads."""
        if _cells.lookouts:
            self.get(owner)
            for seen in _cells.lookouts:
                seen.put(self, content)
        if _cells.overlays:
            _cells.overlays[-1][self] = content
        else:
            self._content = content


def contents_now(cells: Iterable[Cell]) -> list[Any] | None:
    """What cells hold; None where this thread sees others, or its look-outs want to know."""
    return None if _cells.overlays or _cells.lookouts else list(map(_CONTENT, cells))


def contents(cells: Iterable[Cell], owners: Iterable[object]) -> list[Any]:
    """The contents of many cells, each as :meth:`Cell.get` gives it."""
    if _cells.overlays or _cells.lookouts:
        return [cell.get(owner) for cell, owner in zip(cells, owners, strict=True)]
    return list(map(_CONTENT, cells))


def exchange(cells: Sequence[Cell], contents: Sequence[object], owners: Sequence[object]) -> None:
    """Exchange the contents of many cells, each as :meth:`Cell.set` does it."""
    if _cells.overlays or _cells.lookouts:
        for cell, content, owner in zip(cells, contents, owners, strict=True):
            cell.set(content, owner)
        return
    for cell, content in zip(cells, contents, strict=True):
        cell._content = content


def seen_by_overlays() -> bool:
    """Whether this thread sees other contents of cells than the rest of the process."""
    return bool(_cells.overlays)


@contextmanager
def lookout(kind: Callable[[tuple[object, ...]], Seen] = Seen) -> Iterator[Seen]:
    """Note each cell used in the block, in this thread, with its content before its first use."""
    seen = kind(_cells.overlays)
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
def overlay(contents: dict[Cell, Any], jumps: Jumps | None = None) -> Iterator[None]:
    """Let this thread see ``contents`` in the block, and ``jumps``; what is written there is dropped afterwards."""
    before = _cells.overlays
    _cells.overlays = (*before, _Overlay(contents, {} if jumps is None else jumps))
    try:
        yield
    finally:
        _cells.overlays = before
