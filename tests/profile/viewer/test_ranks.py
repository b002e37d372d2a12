"""The lanes and tables of several ranks, in a real browser."""

from __future__ import annotations

from typing import Any

import made_runs
from report_page import colour, drawn

from tapegrad.profile.report.communication import line_rows, rank_rows
from tapegrad.sizes import format_bytes

LANE, TOP = 30, 4


def shade(page: Any, name: str) -> str:
    return page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")


def place(page: Any, us: float) -> float:
    """Where a moment lies: the picture is as wide as the timeline, which has the same axis."""
    return page.evaluate(f"tapegradReport.charts.timeline.px({us * 1000})")


def run_of(ranks: int) -> Any:
    run = made_runs.several(ranks, steps=1)
    run.marks["ns"][-1] = run.steps["end_ns"][-1] = 1_000_000  # the axis shows all of the step
    return run


def test_a_lane_shows_walks_waits_and_what_is_under_way(show: Any) -> None:
    page = show(run_of(3))
    walk, bad, accent, way = [shade(page, name) for name in ("band-backward", "bad", "accent", "communication")]
    for rank in range(3):
        top = TOP + LANE * rank
        assert colour(page, "lanes", place(page, 130), top + 15) == walk
        assert colour(page, "lanes", place(page, 400), top + LANE - 7) == way
        assert colour(page, "lanes", place(page, 570), top + 9) == accent  # the last 50 us of the sum under way
        assert colour(page, "lanes", place(page, 500), top + 9) == walk
        assert colour(page, "lanes", place(page, 825), top + 9) == (bad if rank != 1 else "")  # nothing is drawn there
        assert colour(page, "lanes", place(page, 880), top + 9) == accent


def test_the_lanes_follow_the_range_and_tell_what_is_there(show: Any) -> None:
    page = show(run_of(2))
    page.evaluate("tapegradReport.store.set({range: [780000, 920000]})")
    drawn(page)
    assert colour(page, "lanes", place(page, 801), TOP + 9) == shade(page, "bad")
    page.locator("#lanes").scroll_into_view_if_needed()
    page.locator("#lanes").hover(position={"x": place(page, 825), "y": TOP + 9})
    text = page.inner_text("#lane-readout")
    assert text == (
        "rank 0: all_reduce at train.py:30, 4 B: 50.0 µs for others, 50.0 µs transfer; 100.0 µs exposed, 0 ns hidden"
    )
    page.locator("#lanes").hover(position={"x": place(page, 825), "y": TOP + LANE + 9})
    assert page.inner_text("#lane-readout") == ""  # rank 1 had not come


def test_the_tables_have_the_figures_of_the_report(show: Any) -> None:
    run = made_runs.several(3)
    page = show(run)
    cells = page.eval_on_selector_all(
        "#ranks table",
        "found => found.map((t) => [...t.tBodies[0].rows].map((r) => [...r.cells].map((c) => c.innerText)))",
    )
    ranks, lines = cells
    assert [row[:2] for row in ranks] == [[str(r.rank), format_bytes(r.peak_bytes)] for r in rank_rows(run)]
    assert [row[3] for row in ranks] == [format_bytes(r.sent_bytes) for r in rank_rows(run)]
    assert [row[:4] for row in lines] == [
        [r.kind, f"{r.file}:{r.line}", str(r.calls), format_bytes(r.bytes)] for r in line_rows(run)
    ]
    assert "of rank 2" in page.inner_text("#ranks .hint")


def test_a_program_alone_has_no_lanes(show: Any) -> None:
    page = show(made_runs.training())
    assert page.locator("#ranks").count() == page.locator("#lanes").count() == 0
