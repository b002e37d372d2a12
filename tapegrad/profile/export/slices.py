"""Slices of a trace: spans of time that nest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Slice:
    """A span of time on a track of a process."""

    begin: int
    end: int
    name: str
    kind: str
    track: int
    args: Mapping[str, object]


def nested(slices: list[Slice]) -> list[Slice]:
    """Slices of one track, cut where they would reach out of the one in which they begin."""
    cut, around = [], list[Slice]()
    for s in sorted(slices, key=lambda s: (s.begin, -s.end, s.kind == "op")):
        while around and around[-1].end <= s.begin:
            around.pop()
        if around:
            s.end = min(s.end, around[-1].end)
        around.append(s)
        cut.append(s)
    return cut


def slice_event(s: Slice, pid: int) -> dict[str, object]:
    """The event of a slice of a process; times in microseconds."""
    return {
        "ph": "X", "name": s.name, "cat": s.kind, "ts": s.begin / 1000, "dur": (s.end - s.begin) / 1000, "pid": pid,
        "tid": s.track + 1, "args": s.args,
    }  # fmt: skip
