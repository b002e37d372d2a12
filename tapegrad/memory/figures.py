"""The figures of a measurement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tapegrad.memory.places import by_line

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "temporary", "input", "user",
)  # fmt: skip
GRAIN = 512


def rounded(nbytes: int) -> int:
    """``nbytes`` rounded up to the grain of CuPy's pool."""
    return -(-nbytes // GRAIN) * GRAIN


@dataclass
class Measure:
    """Figures of one ``measure`` block; read them in the block or after it."""

    live_bytes: int = 0
    """Bytes alive now (or at the end of the block), whenever they were allocated."""
    peak_bytes: int = 0
    """The most bytes alive at once in the block."""
    allocated_bytes: int = 0
    """Bytes allocated in the block, freed or not."""
    scratch_bytes: int = 0
    """The largest workspace of one kernel on the CPU (registers, on a GPU); not part of the bytes above."""
    kernel_runs: int = 0
    """Kernels and barriers run: a region counts as one."""
    bytes_moved: int = 0
    """Bytes read plus written by them; what one kernel reads twice counts once."""
    nodes_run: Counter[str] = field(default_factory=Counter)
    """How often nodes of each primitive were evaluated."""
    reruns: int = 0
    """Reruns of functions under ``recompute_grad``."""
    cost: float = 0.0
    """What all nodes cost by the estimate of ``memory/costs.py``, in bytes moved."""
    evictions: int = 0
    """Values dropped under pressure."""
    restored_cost: float = 0.0
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
    peak_parts: dict[str, dict[Any, int]] = field(default_factory=dict, repr=False)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """With ``timeline=True``: (seconds since the start, live bytes, of which kept for rules) after every change."""
    timeline: bool = False
    started: float = field(default_factory=time.perf_counter)
    detailed: bool = True
    """Whether work, and the bytes by category, primitive and line, are counted; without, bytes alone, in less time."""
    settle: Callable[[], None] | None = field(default=None, repr=False)
    now: Callable[[], int] | None = field(default=None, repr=False)
    """While the block is open: the bytes alive."""

    @property
    def peak_by_category(self) -> dict[str, int]:
        """What was alive, by category, when the peak was reached."""
        return dict(self._part("category"))

    @property
    def peak_by_primitive(self) -> dict[str, int]:
        """What was alive then, by the primitive that had made it."""
        return dict(self._part("primitive"))

    @property
    def peak_by_line(self) -> dict[str, int]:
        """What was alive then, by the line of the program that had made it."""
        return by_line(self._part("place"))

    def _part(self, what: str) -> dict[Any, int]:
        if self.settle is not None:
            self.settle()
        return self.peak_parts.get(what, {})


def _live_bytes(m: Measure) -> int:
    return m.__dict__.get("live_bytes", 0) if m.__dict__.get("now") is None else m.__dict__["now"]()


# What dies is noted late, when somebody asks.
setattr(Measure, "live_bytes", property(_live_bytes, lambda m, n: m.__dict__.update(live_bytes=n)))  # noqa: B010
