"""CSV: one line per allocation, nothing that a spreadsheet computes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tapegrad.profile.export.csv import HEADER, write
from tapegrad.tracing.run import Run
from tests.profile.made_runs import Builder, empty, hostile, many, training


def table(run: Run, folder: Path) -> list[dict[str, str]]:
    write(run, folder / "a.csv")
    with (folder / "a.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in found)
    return found


@pytest.mark.parametrize("run", [training(checkpointed=2), many(300), empty(), hostile()])
def test_every_allocation_is_a_line(run: Run, tmp_path: Path) -> None:
    found = table(run, tmp_path)
    assert (tmp_path / "a.csv").read_bytes().split(b"\r\n")[0].decode().split(",") == list(HEADER)
    assert [int(row["id"]) for row in found] == list(range(run.count("allocs")))
    assert [int(row["bytes"]) for row in found] == run.allocs["bytes"]
    assert [int(row["end_seq"] or -1) for row in found] == run.allocs["end_seq"]
    assert sum(int(row["bytes"]) for row in found if row["alive_at_peak"] == "1") == run.peak["bytes"]


def test_what_a_line_holds(tmp_path: Path) -> None:
    run = training(checkpointed=2)
    found = table(run, tmp_path)
    again = next(row for row in found if row["remat_of"])
    old = found[int(again["remat_of"])]
    assert again["category"] == "rematerialized" and again["phase"] == "recompute" and again["scope"] == "block"
    assert (old["file"], old["line"], old["function"], old["op"]) == ("model.py", again["line"], "block", "matmul")
    kept = next(row for row in found if row["last_category"] == "activation")
    assert kept["category"] == "temporary" and kept["holder"] == "vjp of matmul" and kept["idle_ns"] == ""


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'x", "a,b", 'a"b', "a\nb"])
def test_no_cell_is_a_formula(name: str, tmp_path: Path) -> None:
    b = Builder()
    b.alloc(512, "user", name, (name, 1, name), holder=name)
    [row] = table(b.finish(), tmp_path)
    for column in ("op", "file", "function", "holder"):
        assert not row[column].startswith(("=", "+", "-", "@", "\t", "\r"))
        assert row[column].lstrip("'").endswith(name.lstrip("'\t\r\n")[-1])


def test_control_characters_are_escapes(tmp_path: Path) -> None:
    [row] = table(hostile(), tmp_path)
    assert row["function"] == "f</script>\\x1b[31m\\u202e" and "zoë" in row["file"]
