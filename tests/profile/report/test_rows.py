"""What was alive, in groups: the sums are those of the run, and known figures come out."""

from __future__ import annotations

import pytest

from tapegrad.profile.report import rows as r
from tapegrad.profile.report.chart import chart
from tapegrad.profile.report.escape import clip, shown
from tapegrad.profile.report.units import ms
from tapegrad.sizes import format_bytes
from tapegrad.tracing.timeline import alive
from tests.profile.made_runs import MIB, Builder, empty, many, training


@pytest.mark.parametrize("by", r.BY)
@pytest.mark.parametrize("sort", r.SORTS)
def test_groups_are_all_of_what_was_alive(by: str, sort: str) -> None:
    for run in (training(checkpointed=2), many(500)):
        live = alive(run, run.peak["seq"])
        found = r.rows(run, run.peak["seq"], by, sort)
        assert sum(row.bytes for row in found) == run.peak["bytes"]
        assert sum(row.count for row in found) == len(live)
        assert len({row.key for row in found}) == len(found)
        for row in found:
            assert row.size < 0 or row.size * row.count == row.bytes


def test_a_group_by_line() -> None:
    run = training(checkpointed=0)
    [row] = [row for row in r.rows(run, run.peak["seq"], "line") if row.key == "model.py:42 block()"]
    assert (row.bytes, row.count, row.size) == (4 * MIB, 4, MIB)
    assert (row.category, row.op, row.holder) == ("activation", "matmul", "vjp of matmul")


def test_orders() -> None:
    def row(key: str, nbytes: int, count: int, idle: int) -> r.Row:
        return r.Row(key, nbytes, nbytes, count, -1, idle, "user", "", "")

    found = [row("b", 5, 1, 9), row("a", 5, 3, -1), row("c", 7, 2, 4)]
    keys = {sort: "".join(x.key for x in r.ordered(found, sort)) for sort in r.SORTS}
    assert keys == {"bytes": "cab", "count": "acb", "idle": "bca", "name": "abc"}


def test_scopes_are_paths_of_calls() -> None:
    b = Builder()
    b.phase = "forward"
    b.enter("function", "main")
    b.enter("layer", "Block.call")
    inner = b.alloc(512, "activation", "exp")
    b.leave()
    b.leave()
    b.alloc(1024, "user", "exp")
    run = b.finish()
    assert [row.key for row in r.rows(run, run.peak["seq"], "scope")] == ["(no call)", "main > Block.call"]
    assert r.call_path(run, run.allocs["call"][inner]) == "main > Block.call"


def test_idle_is_the_time_between_the_passes() -> None:
    b = Builder()
    x = b.alloc(512, "activation", "exp")
    for _ in range(4):
        b.alloc(512, "temporary", "sin")
    run = b.finish()
    seqs, ns = run.ops["seq"], run.ops["ns"]
    run.allocs["last_forward_seq"][x], run.allocs["next_backward_seq"][x] = seqs[1], seqs[4]
    assert r.idle_ns(run, x, r.Clock(run)) == ns[4] - ns[1] > 0
    run.allocs["next_backward_seq"][x] = seqs[4] + 1  # a kernel that reads later is no operation of its own
    assert r.idle_ns(run, x, r.Clock(run)) == ns[4] - ns[1]
    run.allocs["next_backward_seq"][x] = -1
    assert r.idle_ns(run, x, r.Clock(run)) == -1


def test_the_origin_of_a_peak_is_the_allocation_that_made_it() -> None:
    b = Builder()
    b.begin_step()
    b.phase = "forward"
    b.alloc(512, "user", "exp", ("a.py", 1, "f"))
    b.alloc(MIB, "user", "tan", ("a.py", 2, "g"))
    b.free(0)
    b.alloc(512, "user", "sin", ("a.py", 3, "h"))
    b.end_step()
    run = b.finish()
    assert r.origin(run, run.peak["seq"]) == r.Origin(0, "forward", "tan", "a.py", 2, "g")
    assert r.origin(empty(), -1) is None


def test_what_reruns_brought_back_and_spared() -> None:
    run = training(steps=2, blocks=4, checkpointed=3)
    for step in (0, 1):
        seq = run.steps["peak_seq"][step]
        [found] = r.reruns(run, seq, step)
        assert (found.name, found.file, found.line, found.count) == ("block", "model.py", 40, 3)
        assert found.bytes == 3 * 2 * MIB and found.ns > 0
        # the peak is before the first rerun: nothing that they bring back was alive then
        assert found.spared_bytes == 6 * MIB
    assert r.reruns(run, run.peak["seq"])[0].count == 6  # of the whole run
    # inside the last rerun of the first step some of it is alive
    a = run.allocs
    inside = max(a["begin_seq"][i] for i, old in enumerate(a["remat_of"]) if old >= 0 and a["step"][i] == 0)
    assert 0 <= r.reruns(run, inside, 0)[0].spared_bytes < 6 * MIB
    assert r.reruns(training(), 10) == []


def test_single_values_that_came_back_are_counted_apart() -> None:
    b = Builder()
    old = b.alloc(MIB, "activation", "exp")
    b.free(old)
    b.alloc(MIB, "rematerialized", "exp", remat_of=old)
    run = b.finish()
    [found] = r.reruns(run, run.peak["seq"])
    assert (found.name, found.count, found.bytes) == ("(single values)", 1, MIB)


def test_a_rerun_within_a_rerun_counts_once() -> None:
    b = Builder()
    first = b.enter("checkpoint", "outer")
    b.alloc(512, "user", "exp")
    b.leave()
    b.enter("checkpoint", "outer", first=first)
    b.enter("checkpoint", "inner", first=first)
    b.alloc(512, "rematerialized", "exp", remat_of=0)
    b.leave()
    b.leave()
    run = b.finish()
    assert r.rerun_roots(run) == [-1, 1, 1]
    [found] = r.reruns(run, run.peak["seq"])
    assert (found.name, found.count, found.bytes) == ("outer", 1, 512)


@pytest.mark.parametrize("width", [20, 80, 300])
@pytest.mark.parametrize("plain", [False, True])
def test_a_chart_fits_and_points_at_the_peak(width: int, plain: bool) -> None:
    run = training(checkpointed=2)
    lines = chart(run, run.peak["step"], width, plain, run.peak["seq"])
    assert all(len(line) <= max(width, 24) for line in lines)
    assert all(line.isascii() for line in lines) == plain
    column = lines[0].index("v" if plain else "↓")
    full = "#" if plain else "█"
    assert all(line[column] == full for line in lines[1:5])  # the peak reaches the top
    assert "forward" in lines[-1] or width == 20


def test_a_chart_never_loses_a_short_peak() -> None:
    b = Builder()
    b.alloc(MIB, "user", "exp")
    for _ in range(500):
        b.free(b.alloc(512, "temporary", "sin"))
    b.free(b.alloc(MIB, "temporary", "sin"))
    for _ in range(500):
        b.free(b.alloc(512, "temporary", "sin"))
    lines = chart(b.finish(), -1, 60)
    assert lines[0].count("█") == 1 and lines[0].startswith("2.00 MiB")
    assert lines[2].count("█") == 49  # a half, all the time


def test_the_axis_names_phases_and_reruns_do_not_cut_them() -> None:
    run = training(checkpointed=4)
    assert chart(run, 1, 80)[-1].split()[1:4:2] == ["forward", "backward"]


def test_no_chart_of_nothing() -> None:
    assert chart(empty(), -1, 80) == []


@pytest.mark.parametrize(
    ("text", "encoding", "safe"),
    [
        ("a\x1b[31mb", "utf-8", "a\\x1b[31mb"),
        ("a\u202eb\ud800", "utf-8", "a\\u202eb\\ud800"),
        ("zoë ☃", "utf-8", "zoë ☃"),
        ("zoë ☃", "latin-1", "zoë \\u2603"),
        ("zoë", "ascii", "zo\\xeb"),
        ("a\nb\tc\x7f\x9b", "utf-8", "a\\x0ab\\x09c\\x7f\\x9b"),
        ("zoë", "no such encoding", "zo\\xeb"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(text: str, encoding: str, safe: str) -> None:
    assert shown(text, encoding) == safe


def test_clipping_counts_cells() -> None:
    assert clip("abcdef", 4) == "abc…" and clip("abcdef", 4, keep_end=True) == "…def"
    assert clip("日本語", 5) == "日本…" and clip("日本語", 4, "...") == "..."
    assert clip("abc", 3) == "abc" and clip("abc", 0) == ""


def test_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 6893338624, (1 << 20) - 1)] == [
        "0 B", "1023 B", "1.00 KiB", "6.42 GiB", "1.00 MiB",
    ]  # fmt: skip
    assert [ms(n) for n in (310_000, 12_340_000, 189_000_000, 12_300_000_000)] == [
        "0.31 ms", "12.3 ms", "189 ms", "12.3 s",
    ]  # fmt: skip
