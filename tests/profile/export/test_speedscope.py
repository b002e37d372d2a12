"""speedscope: the structure its format asks for, and weights that are the bytes alive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapegrad.profile.export.speedscope import document, write
from tapegrad.profile.report.rows import rows
from tapegrad.tracing.run import Run
from tests.profile.made_runs import Builder, empty, hostile, many, out_of_memory, training


def check(found: dict[str, Any]) -> None:
    """Asserts what the format asks of a file with sampled profiles."""
    assert found.keys() >= {"$schema", "shared", "profiles"}
    frames = found["shared"]["frames"]
    for frame in frames:
        assert frame.keys() <= {"name", "file", "line", "col"} and isinstance(frame["name"], str) and frame["name"]
        assert type(frame.get("line", 1)) is int and isinstance(frame.get("file", ""), str)
    assert 0 <= found["activeProfileIndex"] < len(found["profiles"])
    for profile in found["profiles"]:
        assert profile["type"] == "sampled" and profile["unit"] == "bytes"
        assert profile.keys() == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        for stack in profile["samples"]:
            assert stack and all(0 <= i < len(frames) for i in stack)


@pytest.mark.parametrize("run", [training(checkpointed=2), many(300), empty(), hostile(), out_of_memory()])
def test_the_format_is_kept_and_the_weights_are_bytes(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))
    check(found)
    ends = [profile["endValue"] for profile in found["profiles"]]
    assert ends == [run.peak["bytes"], *run.steps["peak_bytes"]]


def test_the_checker_can_fail() -> None:
    for harm in (
        lambda d: d["profiles"][0]["weights"].append(1),
        lambda d: d["profiles"][0]["samples"][0].append(99),
        lambda d: d["shared"]["frames"][0].pop("name"),
    ):
        found = document(training())
        harm(found)
        with pytest.raises((AssertionError, KeyError)):
            check(found)


def test_a_moment_comes_first() -> None:
    run = training()
    found = document(run, 7)
    check(found)
    assert found["profiles"][0]["name"] == "alive at seq 7"
    assert found["profiles"][0]["endValue"] == sum(row.bytes for row in rows(run, 7))


def test_stacks_are_calls_or_recorded_frames() -> None:
    b = Builder()
    b.enter("function", "main", "a.py", 1)
    b.enter("function", "f", "a.py", 10)
    b.alloc(512, "activation", "exp", ("a.py", 12, "f"))
    outer = b.stack("z.py", 1, "run")
    inner = b.stack("a.py", 30, "g")
    b.run.stacks["parent"][inner] = outer
    b.alloc(1024, "user", "sin", ("a.py", 30, "g"))
    found = document(b.finish())
    names = [[found["shared"]["frames"][i]["name"] for i in stack] for stack in found["profiles"][0]["samples"]]
    assert names == [["run", "g", "sin", "user"], ["main", "f", "exp", "activation"]]
    assert found["shared"]["frames"][names[1].index("f")].keys() == {"name", "file", "line"}
