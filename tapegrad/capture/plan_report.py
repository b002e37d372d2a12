"""Plans as people read them: what a captured call takes, what it does, and what of that it does again."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import basename

from tapegrad.capture import arena
from tapegrad.capture.accounting import at_the_peak
from tapegrad.capture.planner.fit import bound_bytes
from tapegrad.capture.program import Program, Step
from tapegrad.sizes import format_bytes

_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One task: the primitives that it evaluates, the line of the user's program, the arena's bytes that it writes.

    ``offset``: where in the arena these begin (bytes; -1: it writes none); ``again``: whether it was done before.
    """

    op: str
    line: str
    nbytes: int
    offset: int
    again: bool
    cost: float


@dataclass(frozen=True)
class Plan:
    """What a replay takes, in bytes; ``print`` it for a table of its tasks.

    ``peak_bytes``: the arena and the variables and constants bound; ``lower_bound``: the most bytes of the arena alive
    at once; ``recomputed``: tasks done again, by what they do; ``extra``: what that costs, as a part of the plain call.
    """

    peak_bytes: int
    arena_bytes: int
    lower_bound: int
    recomputed: dict[str, int]
    extra: float
    kernels: int
    at_the_peak: dict[str, int]
    """What is in the arena where most is, by the ledger's categories, in bytes."""
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        again = sum(self.recomputed.values())
        head = (
            f"{self.kernels} tasks in an arena of {format_bytes(self.arena_bytes)} (lower bound "
            f"{format_bytes(self.lower_bound)}), {format_bytes(self.peak_bytes)} with variables and constants; "
            f"{again} of them again, {self.extra:.1%} more work"
        )
        inside = ", ".join(f"{category} {format_bytes(n)}" for category, n in self.at_the_peak.items())
        cells = [("bytes", "offset", "", "cost", "line", "op")]
        for r in self.rows:
            offset = "" if r.offset < 0 else str(r.offset)
            cells.append((format_bytes(r.nbytes), offset, "again" * r.again, f"{r.cost:.3g}", r.line, r.op))
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        head += f"\nin the arena at its peak: {inside or 'nothing'}"
        return "\n".join([head, *(x if len(x) <= _WIDTH else x[: _WIDTH - 3] + "..." for x in lines)])


def table(program: Program, plain: Program, layout: arena.Layout) -> Plan:
    """The plan of ``program``, which does what ``plain`` does, in an arena of this layout."""
    rows: list[Row] = []
    recomputed: dict[str, int] = {}
    for step in program.steps:
        if step.again:
            recomputed[", ".join(step.names)] = recomputed.get(", ".join(step.names), 0) + 1
        rows.append(_row(step, layout, step.again))
    cost = lambda p: sum(s.cost for s in p.steps)
    extra = cost(program) / cost(plain) - 1.0 if plain.steps else 0.0
    peak = layout.nbytes + bound_bytes(program)
    return Plan(
        peak,
        layout.nbytes,
        layout.lower_bound,
        recomputed,
        extra,
        len(program.steps),
        at_the_peak(program),
        tuple(rows),
    )


def _row(step: Step, layout: arena.Layout, again: bool) -> Row:
    line = "" if step.place is None else f"{basename(step.place[0])}:{step.place[1]}"
    offsets = [layout.offsets[id(v.slot)] for v in step.writes]
    nbytes = sum(v.slot.nbytes for v in step.writes)
    return Row(", ".join(step.names), line, nbytes, min(offsets, default=-1), again, step.cost)
