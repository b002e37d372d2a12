"""The figures of a measurement, and the work that adds to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from tapegrad.core.buffer import Buffer
from tapegrad.sizes import format_bytes
from tapegrad.tracing import html
from tapegrad.tracing.costs import FLOPS_PER_BYTE, units
from tapegrad.tracing.frames import by_line
from tapegrad.tracing.program_summary import Contents

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "communication", "temporary", "input", "user",
)  # fmt: skip
_MOST_LINES = 10
Parts = Counter[tuple[str, str, Any]]
"""Bytes by category, primitive and location."""
PARTS = ("category", "primitive", "location")


def by(part: str, parts: Parts) -> dict[Any, int]:
    """Return the bytes of ``parts`` by one of ``PARTS``, the most first."""
    position = PARTS.index(part)
    total: Counter[Any] = Counter()
    for key, nbytes in parts.items():
        total[key[position]] += nbytes
    return {key: n for key, n in total.most_common() if n}


class Replayed(NamedTuple):
    """What one replay of a captured program is counted as."""

    kernels: int
    nbytes: int
    nodes: Counter[str]
    restored: int
    arena: dict[str, int]
    """What its arena holds at the program's own peak, by category."""
    number: int
    """Which program it is."""
    memory: ref[Buffer]
    """Its arena."""
    contents: Callable[[], Contents]
    """What it consists of."""


class Figure:
    """A figure to which events are added late: it is right as soon as it is read."""

    def __init__(self, start: Any) -> None:
        self._start = start

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, m: Any, owner: type) -> Any:
        if m is None:
            return self._start
        if m.settle is not None:
            m.settle()
        return m.__dict__[self._name]

    def __set__(self, m: Any, value: Any) -> None:
        if m.settle is not None:
            m.settle()
        m.__dict__[self._name] = value


class Cost(Figure):
    """Kept in whole numbers, in which sums do not depend on their order: of what ``costs.units`` says."""

    def __get__(self, m: Any, owner: type) -> Any:
        return self._start if m is None else super().__get__(m, owner) / FLOPS_PER_BYTE

    def __set__(self, m: Any, value: Any) -> None:
        super().__set__(m, units(value))


def late(start: Any, kind: type[Figure] = Figure) -> Any:
    """The declaration of a figure that begins with ``start``."""
    return kind(start)


_COUNTS = {
    "reruns": "reruns", "evictions": "values evicted", "restored": "values recomputed", "offloads": "values offloaded",
    "fetches": "values fetched",
}  # fmt: skip


@dataclass(repr=False)
class Measure:
    """Figures of one ``measure`` block; read them in the block or after it."""

    live_bytes: int = late(0)
    """Bytes alive now (or at the end of the block), whenever they were allocated."""
    peak_bytes: int = late(0)
    """The most bytes alive at once in the block."""
    allocated_bytes: int = late(0)
    """Bytes allocated in the block, freed or not."""
    scratch_bytes: int = 0
    """The largest workspace of one kernel on the CPU (registers, on a GPU); not part of the bytes above."""
    kernel_runs: int = late(0)
    """Kernels and barriers run: a region counts as one."""
    bytes_moved: int = late(0)
    """Bytes read plus written by them; what one kernel reads twice counts once."""
    nodes_run: Counter[str] = late(None)
    """How often nodes of each primitive were evaluated."""
    reruns: int = 0
    """Reruns of functions under ``recompute_grad``."""
    cost: float = late(0.0, Cost)
    """What all nodes cost by the estimate of ``tracing/costs.py``, in bytes moved."""
    arena_by_category: dict[str, int] = late(None)
    """Of the captured program with the largest arena among those replayed: what is in it at the program's own peak."""
    evictions: int = 0
    """Values evicted to keep a budget."""
    restored_cost: float = late(0.0, Cost)
    """The part of ``cost`` that went into values recomputed after an eviction."""
    restored: int = 0
    """Recomputed values, node by node, after that."""
    offloads: int = 0
    """Values moved to another memory by a policy."""
    fetches: int = 0
    """Values brought back from there."""
    prefetches: int = 0
    """Values that were on their way back before they were asked for."""
    live_by_category: dict[str, int] = field(default_factory=dict)
    peak_parts: Parts = field(default_factory=Counter)
    """Bytes alive at the peak."""
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """With ``timeline=True``: (seconds since the start, live bytes, of which kept for rules) after every change."""
    timeline: bool = False
    started: float = field(default_factory=time.perf_counter)
    detailed: bool = True
    """Whether work, and the bytes by category, primitive and line, are counted; without, bytes alone, in less time."""
    settle: Callable[[], None] | None = None
    """While the block is open: adds what has happened."""

    def __post_init__(self) -> None:
        if self.nodes_run is None:
            self.nodes_run = Counter()
        if self.arena_by_category is None:
            self.arena_by_category = {}

    def __repr__(self) -> str:
        """The figures in one line: sizes in KiB and MiB, and counts that are not 0."""
        parts = sorted(self.peak_by_category.items(), key=lambda part: -part[1])
        held = ", ".join(f"{category} {format_bytes(n)}" for category, n in parts)
        said = [f"peak {format_bytes(self.peak_bytes)}" + (f" ({held})" if held else "")]
        said.append(f"live {format_bytes(self.live_bytes)}")
        if self.detailed:
            said.append(f"kernels: {self.kernel_runs}, which moved {format_bytes(self.bytes_moved)}")
        said += [f"{what}: {n}" for name, what in _COUNTS.items() if (n := getattr(self, name))]
        return f"<Measure: {'; '.join(said)}>"

    def _repr_html_(self) -> str:
        """The figures as tables, for notebooks: sizes, and bytes."""
        lines = list(self.peak_by_line.items())[:_MOST_LINES]
        return "".join([
            html.paragraph(f"peak {format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes), live "
                           f"{format_bytes(self.live_bytes)} ({self.live_bytes} bytes)"),
            html.table(("at the peak", "size", "bytes"), _sizes(sorted(self.peak_by_category.items(), key=_by_bytes))),
            html.table(("line", "size", "bytes"), _sizes(lines)),
        ])  # fmt: skip

    @property
    def peak_by_category(self) -> dict[str, int]:
        """What was alive, by category, when the peak was reached."""
        return self._part("category")

    @property
    def peak_by_primitive(self) -> dict[str, int]:
        """What was alive then, by the primitive that had made it."""
        return self._part("primitive")

    @property
    def peak_by_line(self) -> dict[str, int]:
        """What was alive then, by the line of the program that had made it."""
        return by_line(self._part("location"))

    def _part(self, what: str) -> dict[Any, int]:
        if self.settle is not None:
            self.settle()
        return by(what, self.peak_parts)


def _by_bytes(part: tuple[str, int]) -> int:
    return -part[1]


def _sizes(parts: Iterable[tuple[str, int]]) -> list[tuple[str, str, str]]:
    return [(name, format_bytes(n), str(n)) for name, n in parts]


Work = tuple[int, tuple[str, ...], int, int, bool]
"""Kernels run, primitives that they have evaluated, bytes moved; the cost of a node in units, and whether its value had
been dropped before."""


def add_work(done: Iterable[Work], m: Measure) -> None:
    """Add work to the figures of ``m``."""
    figures = m.__dict__
    for (kernels, names, moved, cost, restored), n in Counter(done).items():
        figures["kernel_runs"] += n * kernels
        figures["bytes_moved"] += n * moved
        figures["cost"] += n * cost
        if restored:
            figures["restored_cost"] += n * cost
        for name in names:
            figures["nodes_run"][name] += n
