"""Collectives that were entered, and who is told of them while a profile is recorded; else nobody notes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapegrad.device.types import Array
    from tapegrad.distributed.engine import Engine, Piece


@dataclass(slots=True)
class Entered:
    """A collective that this rank has entered: the message of every error about it."""

    group: str
    kind: str
    detail: str
    """What must be the same on all ranks."""
    number: int
    """It is the ``number``-th of its group."""
    ranks: Sequence[int]
    """Who takes part."""
    nbytes: int
    """Of this rank's part."""
    line: tuple[str, int] | None
    before: Entered | None = None
    """The one before."""
    digest: bytes = b""
    """Of this one and all before it."""
    noted: Any = None
    """What a watcher notes of it."""

    def __str__(self) -> str:
        where = "" if self.line is None else f" at {self.line[0]}:{self.line[1]}"
        return f"{self.kind} #{self.number} of {self.detail} ({self.nbytes} bytes){where}"


class Watcher:
    """Notes nothing; each docstring says what a subclass is told."""

    def entered(self, entered: Entered, under_way: bool) -> None:
        """This rank has entered a collective; ``under_way``: the program goes on while its bytes move."""

    def begun(self, entered: Entered) -> None:
        """Its bytes begin to move."""

    def waits(self, entered: Entered) -> None:
        """The program waits for it from now on."""

    def waited(self, entered: Entered) -> None:
        """The program waits for it no more: it is done, or ranks have compared what they do."""

    def arrived(self, entered: Entered) -> None:
        """It is done; this may be told more than once."""

    def sent(self, rank: int, pieces: Sequence[Piece]) -> None:
        """This rank, which has the number ``rank``, sends arrays to ranks, perhaps also to itself."""


class _Watching:
    """The watcher in force in this process."""

    def __init__(self) -> None:
        self.now = self.nobody = Watcher()

    def start(self, watcher: Watcher) -> None:
        """Tell ``watcher`` from now on."""
        self.now = watcher

    def stop(self) -> None:
        """Tell nobody."""
        self.now = self.nobody


WATCHING = _Watching()


def watch_broadcast(engine: Engine, array: Array, root: int) -> None:
    """Tell of a broadcast by MPI or NCCL: the root counts as the one that sends, though others pass its bytes on."""
    if engine.rank == root:
        WATCHING.now.sent(root, [(r, array) for r in range(engine.size)])


def watch_all_reduce(engine: Engine, array: Array) -> None:
    """Tell of a reduction by MPI or NCCL, as if it sent no more than it must."""
    part = array[: array.size // engine.size]
    WATCHING.now.sent(engine.rank, 2 * [(r, part) for r in range(engine.size)])
