"""The snapshot for PyTorch's viewer: what its code reads is there, and addresses are sound."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tapegrad.profile.export.memory_viz import document, write
from tapegrad.tracing.atomic import ExportError
from tests.profile.made_runs import MIB, Builder, empty, hostile, many, out_of_memory, training

RUNS = {
    "training": training(checkpointed=2), "many": many(400), "empty": empty(), "hostile": hostile(),
    "out of memory": out_of_memory(),
}  # fmt: skip


def replay(trace: list[dict[str, Any]]) -> tuple[int, dict[int, int], set[str]]:
    """Follows a trace: the most bytes alive, what is alive at its end, and the categories; asserts that it is sound."""
    live: dict[int, int] = {}
    reserved: tuple[int, int] | None = None
    most, going, categories = 0, -1, set[str]()
    for e in trace:
        assert e.keys() >= {"action", "addr", "size", "stream", "time_us", "frames"}
        assert all(0 <= e[key] < 1 << 53 for key in ("addr", "size", "time_us"))
        assert all(f.keys() == {"name", "filename", "line"} for f in e["frames"])
        categories |= {e["category"]} if "category" in e else set()
        if e["action"] == "segment_alloc":
            assert reserved is None and not live
            reserved = (e["addr"], e["addr"] + e["size"])
        elif e["action"] == "alloc":
            assert reserved is not None and e["size"] > 0 and e["frames"]
            assert reserved[0] <= e["addr"] and e["addr"] + e["size"] <= reserved[1]
            assert all(e["addr"] + e["size"] <= a or a + n <= e["addr"] for a, n in live.items()), "overlap"
            live[e["addr"]] = e["size"]
            most = max(most, sum(live.values()))
        elif e["action"] == "free_requested":
            assert live[e["addr"]] == e["size"]
            going = e["addr"]
        elif e["action"] == "free_completed":
            assert e["addr"] == going and live.pop(going) == e["size"]
        else:
            assert e["action"] == "snapshot"
    return most, live, categories


@pytest.mark.parametrize("name", RUNS)
def test_the_trace_and_the_segments_tell_the_same(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    write(run, tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))
    [trace] = found["device_traces"]
    most, live, categories = replay(trace)
    assert most == run.peak["bytes"]
    assert "unknown" in categories and sum(e.get("category") == "unknown" for e in trace) == 1
    assert len(found["segments"]) == bool(run.count("allocs"))
    for segment in found["segments"]:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address  # blocks follow each other without gaps
            address += block["size"]
            assert (block["state"] == "active_allocated") == (block["address"] in live)
            assert block["requested_size"] <= block["size"]
        assert segment["allocated_size"] == segment["active_size"] == sum(live.values())


def test_the_replay_can_fail() -> None:
    frames = [{"name": "a", "filename": "b", "line": 1}]
    base = {"size": 512, "stream": 0, "time_us": 0, "frames": frames}
    reserve = base | {"action": "segment_alloc", "addr": 0, "size": 1024}
    for trace in (
        [reserve, base | {"action": "alloc", "addr": 0}, base | {"action": "alloc", "addr": 256}],
        [reserve, base | {"action": "alloc", "addr": 768}],
        [reserve, base | {"action": "alloc", "addr": 1 << 53}],
        [base | {"action": "alloc", "addr": 0}],
    ):
        with pytest.raises(AssertionError):
            replay(trace)


def test_what_an_allocation_tells() -> None:
    b = Builder()
    b.enter("function", "main", "a.py", 1)
    x = b.alloc(MIB, "temporary", "exp", ("a.py", 3, "f"), shape="(512, 512)", holder="vjp of exp")
    b.change(x, "activation")
    [trace] = document(b.finish())["device_traces"]
    alloc = next(e for e in trace if e["action"] == "alloc")
    assert alloc["category"] == "activation"  # what it served as in the end
    assert alloc["frames"] == [
        {"name": "exp float32(512, 512), held by vjp of exp", "filename": "tapegrad", "line": 0},
        {"name": "f", "filename": "a.py", "line": 3},
        {"name": "main", "filename": "a.py", "line": 1},
    ]


def test_freed_addresses_serve_again() -> None:
    b = Builder()
    for _ in range(10):
        b.free(b.alloc(MIB, "temporary", "exp"))
    [segment] = document(b.finish())["segments"]
    assert segment["total_size"] == MIB and segment["allocated_size"] == 0


def test_each_device_has_its_trace() -> None:
    b = Builder()
    b.alloc(MIB, "user", "exp")
    b.alloc(2 * MIB, "user", "exp")
    run = b.finish()
    run.allocs["device"][1] = b.text("cuda:1")
    found = document(run)
    assert [s["device"] for s in found["segments"]] == [0, 1]
    assert [replay(trace)[0] for trace in found["device_traces"]] == [MIB, 2 * MIB]
    ends = [(s["address"], s["address"] + s["total_size"]) for s in found["segments"]]
    assert ends[0][1] <= ends[1][0]


def test_too_much_to_count_is_said() -> None:
    b = Builder()
    for _ in range(9):
        b.free(b.alloc(1 << 50, "user", "exp"))
    with pytest.raises(ExportError, match="more than 8 PiB"):
        document(b.finish())


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_reads_it() -> None:
    from torch.cuda import _memory_viz

    for run in RUNS.values():
        snapshot = document(run)
        assert "segments" in _memory_viz.segsum(snapshot)
        assert _memory_viz.trace(snapshot) and "snapshot" in _memory_viz.trace_plot(snapshot)
