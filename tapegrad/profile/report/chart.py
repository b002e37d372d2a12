"""A small chart of bytes over time, in the characters of a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.cells import cell_len

from tapegrad.profile.report.escape import clip
from tapegrad.profile.report.rows import curve, span
from tapegrad.profile.report.units import ms
from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import PHASES
from tapegrad.tracing.run import Run

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ...:::##"  # as many levels, fewer of them different
_HEIGHT = 4
_RECOMPUTE = PHASES.index("recompute")


def chart(run: Run, step: int, width: int, plain: bool = False, at: int = -1) -> list[str]:
    """Lines of a chart of the bytes alive over a step (-1: the whole run), ``width`` cells wide; none without bytes.

    Each column shows the most that was alive in its time, so the peak is never lost.  ``at``: a seq to point at.
    """
    begin, end = span(run, step)
    points = curve(run, begin, end)
    highest = max((total for _, _, total in points), default=0)
    if not highest:
        return []
    label = format_bytes(highest)
    columns = max(10, width - len(label) - 3)
    first, last = points[0][1], max(points[-1][1], points[0][1] + 1)
    column = lambda ns: max(0, min(columns - 1, (ns - first) * columns // (last - first)))
    heights = _heights(points, columns, column)
    marked = next((column(ns) for seq, ns, _ in points if seq == at), -1)
    lines = _bars(heights, highest, _PLAIN if plain else _BLOCKS)
    upright, tick, corner, dash, arrow = "|++-v" if plain else "│┤└─↓"
    margin = " " * len(label)
    drawn = [f"{label} {tick}{lines[0]}", *(f"{margin} {upright}{bar}" for bar in lines[1:])]
    if marked >= 0:
        drawn.insert(0, f"{margin}  {' ' * marked}{arrow}")
    axis = _phases(run, begin, end, columns, column, dash)
    duration = f" {ms(last - first, plain)}"
    axis = axis[: max(0, columns - len(duration))] + duration if len(duration) < columns else axis
    return [*(line.rstrip() for line in drawn), f"{margin} {corner}{axis}"]


def _heights(points: list[tuple[int, int, int]], columns: int, column: Callable[[int], int]) -> list[int]:
    """The most bytes in the time of each column: what was alive when it began counts."""
    heights, now, at = [0] * columns, points[0][2], 0
    for _, ns, total in points:
        last = column(ns)
        for i in range(at, last + 1):
            heights[i] = max(heights[i], now)
        at, now = last, total
    for i in range(at, columns):
        heights[i] = max(heights[i], now)
    return heights


def _bars(heights: list[int], highest: int, blocks: str) -> list[str]:
    levels = len(blocks) - 1
    eighths = [-(-h * levels * _HEIGHT // highest) for h in heights]
    return ["".join(blocks[max(0, min(levels, e - levels * row))] for e in eighths) for row in reversed(range(_HEIGHT))]


def _phases(run: Run, begin: int, end: int, columns: int, column: Callable[[int], int], dash: str) -> str:
    """The axis: the names of phases below their columns, where there is room for a name."""
    seen: list[Counter[int]] = [Counter() for _ in range(columns)]
    phase, axis = -1, ""
    for seq, ns, now in sorted(zip(run.ops["seq"], run.ops["ns"], run.ops["phase"])):
        # reruns are short and many: they count as part of what they interrupt
        phase = phase if now == _RECOMPUTE and phase >= 0 else now
        if begin <= seq <= end:
            seen[column(ns)][phase] += 1
    phase = -1
    spans: list[tuple[int, int]] = []  # (phase, columns)
    for counts in seen:
        phase = min(counts, key=lambda p: (-counts[p], p)) if counts else phase
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1] + 1)
        else:
            spans.append((phase, 1))
    for phase, length in spans:
        name = f" {PHASES[phase]} " if phase >= 0 else ""
        axis += (clip(name, length) if cell_len(name) < length else "").ljust(length, dash)
    return axis
