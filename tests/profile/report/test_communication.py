"""What ranks did together, in a report: right numbers, and lines that fit."""

from __future__ import annotations

import json
import re

import pytest

from tapegrad.profile.report.communication import line_rows, rank_rows
from tapegrad.profile.report.outputs import View
from tests.profile.made_runs import MIB, several, training
from tests.profile.report.test_text import printed


def test_each_rank_has_its_peak_and_its_waiting() -> None:
    rows = rank_rows(several(3, steps=2))
    assert [(r.rank, r.peak_bytes, r.sent_bytes) for r in rows] == [(i, (4 + i) * MIB, 3 * MIB) for i in range(3)]
    assert [r.ns for r in rows] == [2_000_000] * 3
    # in each step 50 us in the first sum, and until 100 us after 800 in the second
    assert [r.waited_ns for r in rows] == [300_000, 200_000, 300_000]
    assert [r.delayed_ns for r in rows] == [0, 100_000, 0]  # 50 us a step, for each of the two others


def test_each_line_has_the_mean_of_its_ranks() -> None:
    last, walking = line_rows(several(3, steps=2))
    assert (walking.kind, walking.file, walking.line, walking.ranks, walking.calls) == (
        "all_reduce",
        "train.py",
        20,
        3,
        2,
    )
    assert (walking.bytes, walking.unfinished) == (2 * MIB, 0)
    assert (walking.others_ns, walking.transfer_ns) == (0, 800_000)
    assert (walking.exposed_ns, walking.hidden_ns) == (100_000, 700_000)
    assert (last.line, last.calls, last.bytes) == (30, 2, 8)
    assert (last.others_ns, last.transfer_ns) == (66_667, 100_000)
    assert (last.exposed_ns, last.hidden_ns) == (166_667, 0)


def test_the_tables_are_in_the_summary() -> None:
    out = printed(several(3))
    assert out.splitlines()[0].startswith("Peak 1.00 MiB (1048576 bytes) on cpu of rank 2")
    assert re.search(r"^Rank +peak +time +sent +waited +waited for$", out, re.M)
    assert re.search(r"^0 min  4\.00 MiB  2\.00 ms  3\.00 MiB  0\.30 ms +0 ms$", out, re.M)
    assert re.search(r"^1      5\.00 MiB  2\.00 ms  3\.00 MiB  0\.20 ms +0\.10 ms$", out, re.M)
    assert re.search(r"^2 max  6\.00 MiB", out, re.M)
    assert re.search(r"^Mean of ranks +at +calls +bytes +others +transfer +exposed +hidden$", out, re.M)
    assert re.search(r"^all_reduce +train\.py:20 +2  2\.00 MiB +0 ms +0\.80 ms  0\.10 ms  0\.70 ms$", out, re.M)
    assert not re.search("^Rank|Mean of ranks", printed(training()), re.M)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [80, 70])
def test_it_fits(width: int, encoding: str) -> None:
    run = several(2)
    run.strings[run.communication["file"][0]] = "a/very/long/folder/of_a_program/" + "x" * 60 + ".py"
    run.meta["outcome"]["message"] = "nothing was heard of rank 5"
    run.meta["collectives_left_out"] = 12
    lines = printed(run, width=width, encoding=encoding, path=None).splitlines()
    assert max(map(len, lines[2:])) <= width
    assert "nothing was heard of rank 5" in lines and "12 collectives came later and were not noted" in lines


def test_of_many_ranks_those_that_stand_out_are_shown() -> None:
    run = several(40)
    out = printed(run, rows=5)
    shown = re.findall(
        r"^(\d+)(?: max| min)? +\d+\.\d\d MiB +\d.* ms +[\d.]+ ms$|^(\d+)(?: max| min)? +\d+\.\d\d MiB", out, re.M
    )
    numbers = [int(a or b) for a, b in shown]
    assert {0, 1, 39} <= set(numbers) and len(numbers) == 8, numbers
    assert "32 more (-n 0 shows all)" in out
    assert "more" not in printed(run, rows=0).split("Rank")[1]


def test_what_was_never_done_is_counted() -> None:
    run = several(2)
    run.communication["done_ns"][1] = -1
    assert {r.line: r.unfinished for r in line_rows(run)} == {20: 0, 30: 1}
    assert "(1 not done)" in printed(run, width=100)


def test_json_holds_the_same_rows() -> None:
    run = several(3)
    shown = json.loads(json.dumps(View("peak", run.peak["seq"], "line", "bytes", 0, True).to_json(run)))
    assert [row["peak_bytes"] for row in shown["ranks"]] == [r.peak_bytes for r in rank_rows(run)]
    assert shown["communication"][0]["exposed_ns"] == line_rows(run)[0].exposed_ns
