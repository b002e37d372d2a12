"""The trace obeys the trace-event format: fields by kind of event, order, slices that nest, arrows between slices."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tapegrad.profile.export.perfetto import Slice, nested, write
from tapegrad.profile.runs import CATEGORIES, PHASES, Run
from tapegrad.profile.runs.timeline import totals
from tests.profile.made_runs import MIB, Builder, empty, hostile, many, out_of_memory, several, training

FIELDS = {
    "M": {"name", "pid", "args"}, "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"}, "i": {"name", "ts", "pid", "tid", "s", "cat"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"}, "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"}, "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
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
    check_flows(events)


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


def check_flows(events: list[dict[str, Any]]) -> None:
    begins = {(e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    flows = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            assert (e["tid"], e["ts"]) in begins, "an arrow that is bound to no slice"
            flows[e["id"]].append(e["ph"])
    assert all(phs[0] == "s" and phs[-1] == "f" and set(phs[1:-1]) <= {"t"} for phs in flows.values())


@pytest.mark.parametrize("run", [training(checkpointed=2), many(300), empty(), hostile(), out_of_memory()])
def test_the_format_is_kept(run: Run, tmp_path: Path) -> None:
    events = trace(run, tmp_path)
    check(events)
    assert sum(e["ph"] == "X" for e in events) == run.count("ops") + run.count("calls")
    assert sum(e["ph"] == "i" for e in events) == run.count("marks")


def test_each_rank_is_a_process_with_its_walks_and_collectives(tmp_path: Path) -> None:
    run = several(3, steps=2)
    run.communication["done_ns"][0] = -1  # of rank 0
    events = trace(run, tmp_path)
    check(events)
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] > 1}
    assert list(ranks.values()) == ["rank 0", "rank 1", "rank 2"]
    for pid, name in ranks.items():
        mine = [e for e in events if e["pid"] == pid]
        whole = 1 if name == "rank 0" else 2
        assert sum(e["name"] == "gradient walk" for e in mine) == 2
        assert [e["dur"] for e in mine if e["name"] == "wait for all_reduce"] == [50.0] * whole
        assert [e["ph"] for e in mine if e["name"] == "all_reduce under way"] == ["b", "e"] * whole
        waits = [e for e in mine if e["name"] == "all_reduce"]
        assert [e["dur"] for e in waits] == [50.0 if name == "rank 1" else 100.0] * 2
        assert [e["args"]["others_us"] for e in waits] == [0.0 if name == "rank 1" else 50.0] * 2
        assert waits[0]["args"]["line"] == "train.py:30" and waits[0]["args"]["bytes"] == 4


def test_a_program_without_collectives_has_no_ranks(tmp_path: Path) -> None:
    assert {e["pid"] for e in trace(training(), tmp_path)} == {1}


def test_the_checker_can_fail() -> None:
    base = {"ph": "X", "name": "a", "cat": "op", "pid": 1, "tid": 1, "args": {}}
    for events in (
        [base | {"ts": 5, "dur": 1}, base | {"ts": 4, "dur": 1}],
        [base | {"ts": 0, "dur": 5}, base | {"ts": 3, "dur": 5}],
        [base],
        [{"ph": "s", "name": "r", "cat": "flow", "id": 1, "ts": 0, "pid": 1, "tid": 1}],
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


def test_arrows_lead_from_forward_over_recompute_to_backward(tmp_path: Path) -> None:
    b = Builder()
    b.phase = "forward"
    old = b.alloc(512, "activation", "exp")
    b.free(old)
    b.phase = "recompute"
    new = b.alloc(512, "rematerialized", "exp", remat_of=old)
    b.phase = "backward"
    b.alloc(512, "temporary", "multiply")
    run = b.finish()
    run.allocs["next_backward_seq"][new] = run.ops["seq"][-1]
    events = trace(run, tmp_path)
    check(events)
    arrows = [(e["ph"], PHASES[e["tid"] - 1]) for e in events if e["ph"] in "stf"]
    assert arrows == [("s", "forward"), ("t", "recompute"), ("f", "backward")]


def test_tracks_are_phases_and_calls_hold_their_operations(tmp_path: Path) -> None:
    events = trace(training(), tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {i + 1: phase for i, phase in enumerate(PHASES)}
    call = next(e for e in events if e["ph"] == "X" and e["cat"] == "call")
    ops = [e for e in events if e["ph"] == "X" and e["cat"] == "op" and e["tid"] == call["tid"]]
    inside = [e["name"] for e in ops if call["ts"] <= e["ts"] <= call["ts"] + call["dur"]]
    assert call["name"] == "block" and inside == ["matmul", "softmax"] * 3


def test_slices_that_overlap_are_cut() -> None:
    def slice_(begin: int, end: int) -> Slice:
        return Slice(begin, end, "a", "op", 0, {})

    found = nested([slice_(5, 15), slice_(0, 10), slice_(0, 20), slice_(20, 30)])
    assert [(s.begin, s.end) for s in found] == [(0, 20), (0, 10), (5, 10), (20, 30)]
