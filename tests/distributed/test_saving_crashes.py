"""Whatever ends a save, a whole checkpoint is there: the old one or the new one, and nothing half done is seen."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import ranks
from distributed.saved_values import on_ranks, part_of

from tapegrad import distributed as D
from tapegrad.distributed.saving import shards

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for each crash")


def outcomes(tmp_path: Path, scenario: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ranks.HERE / "saving_crashes.py"), str(tmp_path / "runs"), scenario]
    done = subprocess.run(
        command, env=ranks.environment(), capture_output=True, text=True, timeout=ranks.TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_new_folder_appears_at_once(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "new-kill")
    assert len(found) > 15
    for o in found:
        there = o["step-2"] is not None
        assert o["step-1"] == 1 and o["step-2"] in (None, 2)
        assert o["visible"] == (["step-1", "step-2"] if there else ["step-1"])
        assert o["after"] == [True, 3, ["step-1", "step-2"]]
    values = [o["step-2"] for o in found]
    assert values == sorted(values, key=lambda v: v is not None)  # from some call on it is there
    assert values[-3:] == [None, 2, 2]  # the last call, after the rename, waits for the disk
    assert found[-1]["all"] == ["step-1", "step-2"]


def test_a_folder_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "over-kill")
    assert len(found) > 20
    values = [o["step-1"] for o in found]
    assert set(values) == {1, 2} and values == sorted(values)
    unseen = [o for o in found if o["visible"] == []]
    assert len(unseen) == 1 and unseen[0]["step-1"] == 1  # between two renames only load sees it
    again = [o for o in found if "again" in o]  # each state that a killed process may leave
    assert [(o["visible"], o["step-1"]) for o in again].count(([], 1)) == 1 and len(again) >= 6
    for o in again:
        assert set(o["again"]) == {o["step-1"], 4} and o["again"] == sorted(o["again"]) and len(o["again"]) > 20
    for o in found:
        assert o["visible"] in (["step-1"], [])
        assert o["after"] == [True, 3, ["step-1"]]
    assert found[-1]["all"] == ["step-1"]


@pytest.mark.parametrize("scenario", ["new-fail", "over-fail"])
def test_what_the_system_refuses_leaves_nothing(tmp_path: Path, scenario: str) -> None:
    found = outcomes(tmp_path, scenario)
    told = [f"{name} {errno.ENOSPC}" for name in ("SaveFileError", "SaveFileError")]
    refused = [o for o in found if o["told"] == told]
    assert len(refused) > 15 and all(o["told"] in (told, ["", ""]) for o in found)
    assert refused == found[: len(refused)]
    for o in found:
        assert o["after"] == [True, 3, ["step-1", "step-2"] if scenario == "new-fail" else ["step-1"]]
    for o in refused:
        assert (o["step-1"], o["step-2"], o["all"]) == (1, None, ["step-1"])
    for o in found[len(refused) :]:
        assert (o["step-1"], o["step-2"]) == ((1, 2) if scenario == "new-fail" else (2, None))
    assert found[-1]["all"] == found[-1]["visible"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
@pytest.mark.parametrize("overwrite", [False, True])
def test_all_is_on_the_disk_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    if overwrite:
        D.save(tmp_path / "s", {"old": 1})
    monkeypatch.setattr(shards, "BLOCK_BYTES", 24)
    journal: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(number: int) -> None:
        fsync(number)
        path = os.readlink(f"/proc/self/fd/{number}")
        size = str(os.path.getsize(path)) if os.path.isfile(path) else ",".join(sorted(os.listdir(path)))
        journal.append((f"sync {os.path.basename(path)}", size))

    def renamed(old: str, new: str) -> None:
        inside = {name: str(os.path.getsize(os.path.join(old, name))) for name in os.listdir(old)}
        journal.append((f"rename to {os.path.basename(new)}", json.dumps([os.path.basename(old), inside])))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    x = np.arange(12, dtype="f4")
    results = on_ranks(2, lambda g: D.save(tmp_path / "s", {"x": part_of(x, g.rank, 2)}, overwrite=overwrite, group=g))
    assert results == [None, None]
    done = [what for what, _ in journal]
    at = done.index("rename to s")
    made, inside = json.loads(journal[at][1])
    assert len(inside) == 3
    for name, size in inside.items():  # all bytes of every file
        assert (f"sync {name}", size) in journal[:at]
    assert (f"sync {made}", ",".join(sorted(inside))) in journal[:at]  # their names
    assert journal[at + 1][0] == f"sync {tmp_path.name}" and "s" in journal[at + 1][1].split(",")  # the folder's name
    assert len([what for what in done if what.startswith("rename to .s.old-")]) == overwrite
    assert len(done) == at + 2 + overwrite
