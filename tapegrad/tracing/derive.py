"""Derive from the events of a recording what follows from them: steps, ends of calls, the peak."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from tapegrad.tracing.names import MARKS, PHASES
from tapegrad.tracing.run import COLUMNS, Run
from tapegrad.tracing.timeline import peak, peaks

_COUNTS = ("reruns", "restored", "evictions", "offloads")
_STEP, _FORWARD = MARKS.index("step"), PHASES.index("forward")


def derive(run: Run) -> None:
    """Fill in the steps of ``run``, the step of each row, ends of calls, walks of collectives, and the peak.

    Every step follows the one before; the first begins with the first operation or call that a tape records.  Ends of
    steps are known by several means; those of the highest kind in the run count (see ``tracing/phase.py``).
    """
    boundaries = [dict(zip(run.boundaries, row)) for row in zip(*run.boundaries.values())]
    boundaries.sort(key=lambda b: b["seq"])
    highest = max((b["kind"] for b in boundaries), default=0)
    ends = [b for b in boundaries if b["kind"] == highest]
    bounds = _bounds(run, ends)
    starts = [begin for begin, _ in bounds]

    def step_of(seq: int) -> int:
        step = bisect_right(starts, seq) - 1
        return step if step >= 0 and seq <= bounds[step][1] else -1

    for table in ("calls", "allocs", "replays", "gradients"):
        columns = run.tables[table]
        columns["step"] = list(map(step_of, columns["begin_seq" if "begin_seq" in columns else "seq"]))
    _leave_out_marks(run, {b["seq"] for b in boundaries} - {b["seq"] for b in ends})
    _add_steps(run, bounds, ends, boundaries)
    _end_calls(run)
    _find_walks(run)
    best, seq = peak(run)
    reserved = max(run.samples["reserved_bytes"], default=-1)
    run.peak = {"bytes": best, "seq": seq, "step": step_of(seq), "reserved_bytes": max(best, reserved)}


def _bounds(run: Run, ends: list[dict[str, int]]) -> list[tuple[int, int]]:
    """Return the first and last seq of each step, with one that has not ended."""
    recorded = [seq for seq, phase in zip(run.ops["seq"], run.ops["phase"]) if phase == _FORWARD]
    recorded += [seq for seq, phase in zip(run.calls["begin_seq"], run.calls["phase"]) if phase == _FORWARD]
    recorded.sort()
    bounds: list[tuple[int, int]] = []
    after = 0
    for end in ends:
        at = bisect_left(recorded, after)
        begin = recorded[at] if not bounds and at < len(recorded) else after
        bounds.append((min(begin, end["seq"]), end["seq"]))
        after = end["seq"] + 1
    if (at := bisect_left(recorded, after)) < len(recorded):
        a = run.allocs
        last = max([*a["begin_seq"], *a["end_seq"], *run.ops["seq"], *run.changes["seq"]])
        bounds.append((after if bounds else recorded[at], last))
    return bounds


def _leave_out_marks(run: Run, seqs: set[int]) -> None:
    """Leave out the ends of steps that do not count."""
    marks = zip(run.marks["seq"], run.marks["kind"])
    keep = [i for i, (seq, kind) in enumerate(marks) if kind != _STEP or seq not in seqs]
    run.tables["marks"] = {name: [values[i] for i in keep] for name, values in run.marks.items()}


def _add_steps(
    run: Run, bounds: list[tuple[int, int]], ends: list[dict[str, int]], boundaries: list[dict[str, int]]
) -> None:
    steps: dict[str, list[int]] = {name: [] for name in COLUMNS["steps"]}
    highest = peaks(run, bounds)
    seqs = [b["seq"] for b in boundaries]
    before = {"ns": 0, "cpu_ns": 0} | dict.fromkeys(_COUNTS, 0)
    for i, (begin, end) in enumerate(bounds):
        ended = ends[i] if i < len(ends) else None
        now: dict[str, Any] = ended or {**before, "ns": _ns_at(run, end)}
        begin_ns = before["ns"] if i and ended else _ns_at(run, begin)
        peak_bytes, peak_seq = highest[i]
        if i and ended:  # events of the step may have been dropped
            within = boundaries[bisect_left(seqs, begin) : bisect_right(seqs, end)]
            peak_bytes = max([peak_bytes, *(b["peak_bytes"] for b in within)])
        row = {
            "begin_seq": begin, "end_seq": end, "begin_ns": begin_ns, "end_ns": max(begin_ns, now["ns"]),
            "cpu_ns": now["cpu_ns"] - before["cpu_ns"], "peak_bytes": peak_bytes, "peak_seq": max(0, peak_seq),
            **{name: now[name] - before[name] for name in _COUNTS},
        }  # fmt: skip
        for name, value in row.items():
            steps[name].append(value)
        before = now
    run.tables["steps"] = steps


def _ns_at(run: Run, seq: int) -> int:
    """Return about when the event ``seq`` was: the time of the last operation up to then."""
    at = bisect_right(run.ops["seq"], seq) - 1
    return run.ops["ns"][at] if at >= 0 else 0


def _end_calls(run: Run) -> None:
    """Let every call end no earlier than those it has made."""
    calls = run.calls
    for call in reversed(range(run.count("calls"))):
        if (parent := calls["parent"][call]) >= 0:
            if calls["end_seq"][call] > calls["end_seq"][parent]:
                for name in ("end_seq", "end_ns"):
                    calls[name][parent] = calls[name][call]


def _find_walks(run: Run) -> None:
    """Sort the backward passes, and find the one that each collective was entered in."""
    rank = run.meta.get("rank", 0)
    rows = sorted(zip(run.walks["begin_ns"], run.walks["end_ns"]))
    run.tables["walks"] = {"rank": [rank] * len(rows), "begin_ns": [b for b, _ in rows], "end_ns": [e for _, e in rows]}
    walks, communication = run.walks, run.communication
    communication["rank"] = [rank] * len(communication["rank"])
    for row, entered in enumerate(communication["entered_ns"]):
        walk = bisect_right(walks["begin_ns"], entered) - 1
        communication["walk"][row] = walk if walk >= 0 and entered <= walks["end_ns"][walk] else -1
