"""The figures of a measurement, and what one event adds to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import ref

from tapegrad.core.buffer import Buffer
from tapegrad.core.run import Run
from tapegrad.memory import html
from tapegrad.memory.ledger.contents import Contents
from tapegrad.memory.ledger.costs import FLOPS_PER_BYTE, units
from tapegrad.memory.ledger.frames import by_line
from tapegrad.sizes import format_bytes

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "communication", "temporary", "input", "user",
)  # fmt: skip
GRAIN = 512
_MOST_LINES = 10
Parts = dict[str, dict[Any, int]]
"""Bytes by ``"category"``, ``"primitive"`` and ``"place"``."""


def rounded(nbytes: int) -> int:
    """``nbytes`` rounded up to the grain of CuPy's pool."""
    return -(-nbytes // GRAIN) * GRAIN


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
    """A figure that what has happened is added to late: it is right as soon as somebody reads it."""

    of_work = False
    """Whether it tells of work: that is added later still, since bytes are asked for more often."""

    def __init__(self, start: Any) -> None:
        self._start = start

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, m: Any, owner: type) -> Any:
        if m is None:
            return self._start
        if m.settle is not None:
            m.settle(self.of_work)
        return m.__dict__[self._name]

    def __set__(self, m: Any, value: Any) -> None:
        m.__dict__[self._name] = value


class LiveBytes(Figure):
    """While its block is open, what the ledger says."""

    def __get__(self, m: Any, owner: type) -> Any:
        return super().__get__(m, owner) if m is None or m.now is None else m.now()


class Work(Figure):
    """Of the works that have been done."""

    of_work = True


class Cost(Work):
    """Kept in whole numbers, in which sums do not depend on their order: of what ``costs.units`` says."""

    def __get__(self, m: Any, owner: type) -> Any:
        return self._start if m is None else super().__get__(m, owner) / FLOPS_PER_BYTE

    def __set__(self, m: Any, value: Any) -> None:
        super().__set__(m, units(value))


def late(start: Any, kind: type[Figure] = Figure) -> Any:
    """The declaration of a figure that begins with ``start``."""
    return kind(start)


_COUNTS = {
    "reruns": "reruns", "evictions": "values dropped", "restored": "values made again", "offloads": "values offloaded",
    "fetches": "values fetched",
}  # fmt: skip


@dataclass(repr=False)
class Measure:
    """Figures of one ``measure`` block; read them in the block or after it."""

    live_bytes: int = late(0, LiveBytes)
    """Bytes alive now (or at the end of the block), whenever they were allocated."""
    peak_bytes: int = late(0)
    """The most bytes alive at once in the block."""
    allocated_bytes: int = late(0, Work)
    """Bytes allocated in the block, freed or not."""
    scratch_bytes: int = late(0)
    """The largest workspace of one kernel on the CPU (registers, on a GPU); not part of the bytes above."""
    kernel_runs: int = late(0, Work)
    """Kernels and barriers run: a region counts as one."""
    bytes_moved: int = late(0, Work)
    """Bytes read plus written by them; what one kernel reads twice counts once."""
    nodes_run: Counter[str] = late(None, Work)
    """How often nodes of each primitive were evaluated."""
    reruns: int = 0
    """Reruns of functions under ``recompute_grad``."""
    cost: float = late(0.0, Cost)
    """What all nodes cost by the estimate of ``memory/ledger/costs.py``, in bytes moved."""
    arena_by_category: dict[str, int] = late(None)
    """Of the captured program with the largest arena among those replayed: what is in it at the program's own peak."""
    evictions: int = 0
    """Values dropped under pressure."""
    restored_cost: float = late(0.0, Cost)
    """The part of ``cost`` that went into values made again after an eviction."""
    restored: int = 0
    """Values made again, node by node, after that."""
    offloads: int = 0
    """Values moved to another memory by a policy."""
    fetches: int = 0
    """Values brought back from there."""
    prefetches: int = 0
    """Values that were on their way back before they were asked for."""
    live_by_category: dict[str, int] = field(default_factory=dict)
    peak_parts: Parts | Callable[[], Parts] = field(default_factory=dict)
    """What was alive at the peak, or what works that out."""
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """With ``timeline=True``: (seconds since the start, live bytes, of which kept for rules) after every change."""
    timeline: bool = False
    started: float = field(default_factory=time.perf_counter)
    detailed: bool = True
    """Whether work, and the bytes by category, primitive and line, are counted; without, bytes alone, in less time."""
    settle: Callable[..., None] | None = None
    """While the block is open: adds what has happened; ``settle(True)``: the work, too."""
    now: Callable[[], int] | None = None
    """While the block is open: the bytes alive."""

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
        return by_line(self._part("place"))

    def _part(self, what: str) -> dict[Any, int]:
        if self.settle is not None:
            self.settle()
        parts = self.peak_parts  # another thread may note a higher peak meanwhile
        parts = parts() if callable(parts) else parts
        return {key: n for key, n in parts.get(what, {}).items() if n}


def _by_bytes(part: tuple[str, int]) -> int:
    return -part[1]


def _sizes(parts: Iterable[tuple[str, int]]) -> list[tuple[str, str, str]]:
    return [(name, format_bytes(n), str(n)) for name, n in parts]


class Done(Protocol):
    """Work that was done."""

    def add_to(self, m: Measure, n: int) -> None:
        """Add it, done ``n`` times, to the figures of ``m``."""


class Ran(NamedTuple):
    """A kernel has run, which evaluated nodes of these primitives and moved so many bytes."""

    names: tuple[str, ...]
    moved: int

    def add_to(self, m: Measure, n: int) -> None:
        """See :class:`Done`."""
        figures = m.__dict__
        figures["kernel_runs"] += n
        figures["bytes_moved"] += n * self.moved
        for name in self.names:
            figures["nodes_run"][name] += n


class Costs(NamedTuple):
    """A node was applied, which costs so many units; ``again``: its value had been dropped."""

    cost: int
    again: bool

    def add_to(self, m: Measure, n: int) -> None:
        """See :class:`Done`."""
        figures = m.__dict__
        figures["cost"] += n * self.cost
        if self.again:
            figures["restored_cost"] += n * self.cost


class Change:
    """Bytes that come in one event, and the work that was done.

    ``stays``: sizes and primitives of the values that are there afterwards; ``net``: their sum;
    ``top``: the most bytes that came at once; ``inside``: sizes and primitives of what was there then, unless it is
    what stays.
    """

    __slots__ = ("allocated", "cost", "inside", "kernels", "moved", "names", "net", "stays", "top")

    def __init__(self, run: Run | None = None, nbytes: int = 0, name: str = "") -> None:
        self.names: Counter[str] = Counter()
        self.kernels = self.moved = self.cost = 0
        self.allocated = self.net = self.top = nbytes
        self.stays = [(nbytes, name)]
        self.inside: list[tuple[int, str]] | None = None
        if run is not None:
            self._follow(run)

    def add_to(self, m: Measure, n: int) -> None:
        """See :class:`Done`."""
        figures = m.__dict__
        figures["allocated_bytes"] += n * self.allocated
        if self.kernels and m.detailed:
            figures["kernel_runs"] += n * self.kernels
            figures["bytes_moved"] += n * self.moved
            figures["cost"] += n * self.cost
            for name, times in self.names.items():
                figures["nodes_run"][name] += n * times

    def _follow(self, run: Run) -> None:
        alive: dict[int, tuple[int, str]] = {}
        at_top = alive
        live = 0
        for i, node in enumerate(run.nodes):
            size = rounded(node.nbytes)
            alive[i] = size, node.name
            live += size
            self.allocated += size
            if live > self.top:
                self.top, at_top = live, dict(alive)
            for gone in node.last_read:
                live -= alive.pop(gone)[0]
            self.names[node.name] += 1
            self.moved += node.moved
            self.cost += units(1.0 + node.nbytes)
        self.kernels = len(run.nodes)
        self.net = live
        self.stays = [alive[i] for i in run.results]
        if at_top.keys() != alive.keys():
            self.inside = list(at_top.values())


_MOST_KNOWN = 1024
_of_bytes: dict[tuple[int, str], Change] = {}


def of_bytes(nbytes: int, name: str) -> Change:
    """A primitive of that name has made so many bytes, rounded ones."""
    change = _of_bytes.get((nbytes, name))
    if change is None:
        if len(_of_bytes) >= _MOST_KNOWN:
            _of_bytes.clear()
        change = _of_bytes[nbytes, name] = Change(None, nbytes, name)
    return change


def new_of_run(run: Run) -> Change:
    """What ``run`` is to have as its change from now on."""
    run.change = change = Change(run)
    return change
