"""Collectives of a run, of one rank or of several, as objects."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tapegrad.tracing.run import Run


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one rank saw it: a row of ``communication`` in ``schema.sql``.  Times in ns."""

    rank: int
    group: str
    ranks: int
    number: int
    kind: str
    detail: str
    bytes: int
    file: str
    line: int
    entered: int
    begun: int
    done: int
    needed: int
    waited: int
    under_way: bool
    walk: int
    last: int
    """When the last rank entered it, as far as ranks were recorded."""

    @property
    def others(self) -> int:
        """Nanoseconds until the last rank had entered it."""
        return 0 if self.done < 0 else max(0, min(self.last, self.done) - self.entered)

    @property
    def transfer(self) -> int:
        """Nanoseconds from then on."""
        return 0 if self.done < 0 else self.done - self.entered - self.others

    @property
    def exposed(self) -> int:
        """Nanoseconds for which the program waited for it, whether for other ranks or for bytes."""
        took = 0 if self.done < 0 else self.done - self.entered
        return min(self.waited, took) if self.under_way else took

    @property
    def hidden(self) -> int:
        """Nanoseconds of it during which the program went on."""
        return 0 if self.done < 0 else self.done - self.entered - self.exposed


@dataclass(frozen=True, slots=True)
class Walk:
    """A backward pass of one rank; times in ns."""

    rank: int
    begin: int
    end: int


def collectives(run: Run) -> list[Collective]:
    """Return all collectives of a run, rank by rank, in the order of entry."""
    table = run.communication
    last: dict[tuple[int, int], int] = defaultdict(int)
    for group, number, entered in zip(table["group"], table["number"], table["entered_ns"]):
        last[group, number] = max(last[group, number], entered)
    return [
        Collective(
            rank, run.text(group), ranks, number, run.text(kind), run.text(detail), nbytes, run.text(file), line,
            entered, begun, done, needed, waited, bool(under_way), walk, last[group, number],
        )
        for rank, group, ranks, number, kind, detail, nbytes, file, line,
            entered, begun, done, needed, waited, under_way, walk
        in zip(*table.values())
    ]  # fmt: skip


def walks(run: Run) -> list[Walk]:
    """Return the backward passes of all ranks."""
    return [Walk(*row) for row in zip(*run.walks.values())]
