"""The trace obeys the trace-event format: fields by kind of event, order, slices that nest, counters."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tapegrad.profile.export.perfetto import write
from tapegrad.tracing.names import CATEGORIES, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import totals
from tests.profile.made_runs import MIB, empty, hostile, many, out_of_memory, several, training

FIELDS = {
    "M": {"name", "pid", "args"}, "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"}, "i": {"name", "ts", "pid", "tid", "s", "cat"},
}  # fmt: skip


def trace(run: Run, folder: Path) -> list[dict[str, Any]]:
    write(run, folder / "a.json")
    found = json.loads((folder / "a.json").read_text("utf-8"))
    assert found["displayTimeUnit"] == "ms"
    return found["traceEvents"]


def check(events: list[dict[str, Any]]) -> None:
    """Asserts what the format asks for."""
    last = 0.0
    for event in events:
        ph = event["ph"]
        assert FIELDS[ph] <= event.keys() <= FIELDS[ph] | {"ph", "args", "tid"}, event
        assert isinstance(event["name"], str) and event["name"]
        if ph != "M":
            assert event["ts"] >= last
            last = event["ts"]
        if ph == "C":
            assert event["args"] and all(type(n) is int for n in event["args"].values())
    check_nesting(events)


def check_nesting(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    for slices in tracks.values():
        around: list[tuple[int, int]] = []
        for begin, end in slices:
            while around and around[-1][1] <= begin:
                around.pop()
            assert not around or end <= around[-1][1], "a slice reaches out of the one in which it begins"
            around.append((begin, end))


@pytest.mark.parametrize("run", [training(checkpointed=2), many(300), empty(), hostile(), out_of_memory(), several(3)])
def test_the_format_is_kept(run: Run, tmp_path: Path) -> None:
    events = trace(run, tmp_path)
    check(events)
    assert sum(e["ph"] == "X" for e in events) == run.count("ops") + run.count("calls")
    assert sum(e["ph"] == "i" for e in events) == run.count("marks")


def test_the_checker_can_fail() -> None:
    base = {"ph": "X", "name": "a", "cat": "op", "pid": 1, "tid": 1, "args": {}}
    for events in (
        [base | {"ts": 5, "dur": 1}, base | {"ts": 4, "dur": 1}],
        [base | {"ts": 0, "dur": 5}, base | {"ts": 3, "dur": 5}],
        [base],
    ):
        with pytest.raises(AssertionError):
            check(events)


def test_counters_are_the_bytes_alive(tmp_path: Path) -> None:
    run = training(checkpointed=2)
    run.samples["seq"] += [10, 20]
    run.samples["used_bytes"] += [MIB, -1]
    run.samples["reserved_bytes"] += [2 * MIB, -1]
    run.samples["outside_bytes"] += [0, -1]
    counters = [e for e in trace(run, tmp_path) if e["ph"] == "C"]
    device = [e["args"] for e in counters if e["name"] == "device memory"]
    assert [sum(args.values()) for args in device] == [total for _, _, total, _ in totals(run)]
    assert max(sum(args.values()) for args in device) == run.peak["bytes"]
    names = {name for i, name in enumerate(CATEGORIES) if i in {*run.allocs["category"], *run.changes["category"]}}
    assert all(args.keys() == names for args in device)
    assert [e["args"] for e in counters if e["name"] == "pool"] == [
        {"used": MIB, "reserved": 2 * MIB, "outside": 0}
    ]  # fmt: skip


def test_calls_have_a_track_and_operations_one_for_each_phase(tmp_path: Path) -> None:
    events = trace(training(), tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["calls", *PHASES]
    call = next(e for e in events if e["ph"] == "X" and e["cat"] == "call")
    ops = [e for e in events if e["ph"] == "X" and names[e["tid"]] == call["args"]["phase"]]
    inside = [e["name"] for e in ops if call["ts"] <= e["ts"] <= call["ts"] + call["dur"]]
    assert names[call["tid"]] == "calls" and call["name"] == "block" and inside == ["matmul", "softmax"] * 3


def test_calls_that_overlap_are_cut(tmp_path: Path) -> None:
    run = training(steps=1, blocks=3)
    run.calls["begin_ns"][:3], run.calls["end_ns"][:3] = [0, 0, 5000], [20_000, 10_000, 15_000]
    events = trace(run, tmp_path)
    check(events)
    assert [e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "call"][:3] == [20.0, 10.0, 5.0]
