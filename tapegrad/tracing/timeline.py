"""Live bytes over time: the events of a run in order, and sums over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run

ALLOC, FREE, CHANGE = 0, 1, 2


@dataclass(frozen=True)
class Event:
    """A change of the category of allocation ``alloc`` from ``before`` to ``after`` (-1: not live)."""

    seq: int
    ns: int
    alloc: int
    before: int
    after: int


def events(run: Run) -> list[Event]:
    """Return all events that change bytes or categories, in order."""
    a, c = run.allocs, run.changes
    category = list(a["category"])
    marks: list[tuple[int, int, int, int]] = [
        (seq, ALLOC, i, cat) for i, (seq, cat) in enumerate(zip(a["begin_seq"], category))
    ]
    marks += [(seq, FREE, i, -1) for i, seq in enumerate(a["end_seq"]) if seq >= 0]
    marks += [(seq, CHANGE, i, cat) for seq, i, cat in zip(c["seq"], c["alloc"], c["category"])]
    marks.sort()
    changes, now = [], 0
    for seq, kind, i, to in marks:
        if kind == ALLOC:
            now = a["begin_ns"][i]
            changes.append(Event(seq, now, i, -1, to))
        elif kind == FREE:
            now = a["end_ns"][i]
            changes.append(Event(seq, now, i, category[i], -1))
        else:
            changes.append(Event(seq, now, i, category[i], to))
            category[i] = to
    return changes


def totals(run: Run) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Yield ``(seq, ns, live bytes, live bytes by category)`` after every event."""
    by, total, sizes = [0] * len(CATEGORIES), 0, run.allocs["bytes"]
    for e in events(run):
        n = sizes[e.alloc]
        if e.before >= 0:
            by[e.before] -= n
            total -= n
        if e.after >= 0:
            by[e.after] += n
            total += n
        yield e.seq, e.ns, total, tuple(by)


def alive(run: Run, seq: int) -> dict[int, int]:
    """Return the category of each allocation that is live at ``seq``, by its row."""
    a, c = run.allocs, run.changes
    lives = enumerate(zip(a["begin_seq"], a["end_seq"], a["category"]))
    live = {i: category for i, (begin, end, category) in lives if begin <= seq and not 0 <= end <= seq}
    for at, i, category in sorted(zip(c["seq"], c["alloc"], c["category"])):
        if at <= seq and i in live:
            live[i] = category
    return live


def last_categories(run: Run) -> list[int]:
    """Return the last category of each allocation."""
    last = list(run.allocs["category"])
    for _, alloc, category in sorted(zip(run.changes["seq"], run.changes["alloc"], run.changes["category"])):
        last[alloc] = category
    return last


def peak(run: Run, begin: int = 0, end: int | None = None) -> tuple[int, int]:
    """Return ``(bytes, seq)`` of the highest peak in ``begin <= seq <= end``, the first of several; (0, -1) if none."""
    best, at, last = 0, -1, 0
    for seq, _, total, _ in totals(run):
        if end is not None and seq > end:
            break
        if seq >= begin:
            if last > best:  # what was alive when the range began
                best, at = last, begin
            if total > best:
                best, at = total, seq
        last = total
    return (last, begin) if at < 0 and last else (best, at)


def peaks(run: Run, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """:func:`peak` of several ranges of seq, which are in order and do not overlap, in one pass."""
    highest = [(0, -1)] * len(ranges)
    at, last = 0, 0
    for seq, _, total, _ in totals(run):
        while at < len(ranges) and seq > ranges[at][1]:
            highest[at] = _at_least(highest[at], last, ranges[at][0])
            at += 1
        if at == len(ranges):
            return highest
        begin, _ = ranges[at]
        if seq >= begin:
            highest[at] = _at_least(highest[at], last, begin)
            if total > highest[at][0]:
                highest[at] = total, seq
        last = total
    for i in range(at, len(ranges)):
        highest[i] = _at_least(highest[i], last, ranges[i][0])
    return highest


def _at_least(highest: tuple[int, int], nbytes: int, begin: int) -> tuple[int, int]:
    """Return the highest of a range, in which bytes that were live when it began count, too."""
    return highest if highest[1] >= 0 or not nbytes else (nbytes, begin)


def _peak_of_step(run: Run, step: int) -> int:
    seq = run.steps["peak_seq"][step]
    kept = sum(run.allocs["bytes"][i] for i in alive(run, seq))
    if run.checks["dropped"] and kept < run.steps["peak_bytes"][step]:
        raise ValueError(f"the events of step {step} were not kept: there were too many; see --at peak")
    return seq


def last_seq(run: Run) -> int:
    """Return the seq of the last event that is no operation."""
    return max([*run.allocs["begin_seq"], *run.allocs["end_seq"], *run.marks["seq"], 0])


def at(run: Run, moment: str) -> int:
    """Return the seq of ``"peak"``, ``"end"``, ``"oom"``, ``"step:3"`` (its peak; steps count from 0) or ``"seq:123"``.

    Raises ValueError with a line that says what there is instead.
    """
    kind, _, number = moment.partition(":")
    last = last_seq(run)
    if kind == "peak" and not number:
        return run.peak["seq"]
    if kind == "end" and not number:
        return last
    if kind == "oom" and not number:
        seqs = [seq for seq, mark in zip(run.marks["seq"], run.marks["kind"]) if mark == 1]
        if seqs:
            return seqs[-1]
        raise ValueError("the run did not run out of memory; see --at peak")
    steps = run.count("steps")
    if kind == "step" and number.isdecimal():
        if int(number) < steps:
            return _peak_of_step(run, int(number))
        raise ValueError(f"there is no step {number}: the run has {steps}, counted from 0")
    if kind == "seq" and number.isdecimal():
        return min(int(number), last)
    raise ValueError(f"{moment!r} is no moment; use peak, end, oom, step:N or seq:N")
