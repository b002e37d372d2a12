"""The pictures of the report, in a real browser: what is drawn where, and what the pointer finds there."""

from __future__ import annotations

from typing import Any

import made_runs
import pytest
from report_page import box_of, colour, cursor, drawn, integer, palette

from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import events, totals

pytestmark = pytest.mark.slow


def test_hovering_a_rectangle_tells_of_its_allocation(show: Any) -> None:
    run = made_runs.training(steps=1, checkpointed=1)
    page = show(run)
    rematerialized = run.allocs["category"].index(CATEGORIES.index("rematerialized"))
    for a in (0, 9, 12, rematerialized):
        box = box_of(page, a)
        page.mouse.move((box["left"] + box["right"]) / 2, (box["top"] + box["bottom"]) / 2)
        drawn(page)
        file, line, function = run.frame_of(run.allocs["stack"][a])
        card = page.inner_text("#card")
        assert page.get_attribute("#card", "data-alloc") == str(a)
        for text in (
            f"{file}:{line}",
            f"{function}()",
            run.text(run.allocs["op"][a]),
            "float32",
            format_bytes(run.allocs["bytes"][a]),
        ):
            assert text in card, (a, text, card)
    assert f"repeats\n#{run.allocs['remat_of'][rematerialized]} matmul at model.py:42" in card
    assert "layer block" in card and "recompute" in card
    page.mouse.move(5, 5)
    drawn(page)
    assert page.locator("#card").is_hidden()


def test_the_details_of_a_chosen_allocation_link_what_it_repeats(show: Any) -> None:
    run = made_runs.training(steps=1, checkpointed=1)
    page = show(run)
    again = run.allocs["category"].index(CATEGORIES.index("rematerialized"))
    old = run.allocs["remat_of"][again]
    box = box_of(page, again)
    page.mouse.click((box["left"] + box["right"]) / 2, (box["top"] + box["bottom"]) / 2)
    drawn(page)
    assert f"#{again}" in page.inner_text("#details")
    page.locator("#details ul button").click()
    drawn(page)
    assert page.inner_text("#details .title").startswith(f"matmul #{old}")
    assert cursor(page) == next(i for i, e in enumerate(events(run)) if e.alloc == old)
    assert "Computed again once" in page.inner_text("#details")
    assert page.locator("#source .line.chosen").get_attribute("data-line") == "42"


def test_a_click_moves_the_cursor_and_the_mark_brings_it_back_to_the_peak(show: Any) -> None:
    run = made_runs.training()
    page = show(run)
    box, peak = page.locator("#timeline").bounding_box(), cursor(page)
    page.mouse.click(box["x"] + 200, box["y"] + 200)
    drawn(page)
    moved = cursor(page)
    assert moved != peak and integer(page, "#alive-total") == list(totals(run))[moved][2]
    page.click("#peak-mark")
    drawn(page)
    assert cursor(page) == peak and integer(page, "#alive-total") == run.peak["bytes"]


def test_the_x_axis_is_time_events_or_operations(show: Any) -> None:
    run = made_runs.training(steps=1)
    page = show(run)
    ops = run.ops["seq"]
    expected = {
        "time": [e.ns for e in events(run)],
        "event": [e.seq for e in events(run)],
        "op": [sum(seq <= e.seq for seq in ops) for e in events(run)],
    }
    seen = {}
    for axis in ("time", "event", "op"):
        assert page.locator("#toolbar input:checked").get_attribute("value") == axis
        assert page.evaluate("Array.from(tapegradReport.charts.timeline.xs).slice(0, -1)") == expected[axis]
        seen[axis] = page.locator("#timeline").screenshot()
        page.keyboard.press("x")
        drawn(page)
    assert len(set(seen.values())) == 3
    page.locator("#toolbar label", has_text="operation").click()
    drawn(page)
    assert page.locator("#timeline").screenshot() == seen["op"]


def test_colours_of_the_stack_at_the_peak(show: Any) -> None:
    page = show(made_runs.training())
    known, base, seen = palette(page), 0, 0
    at = page.evaluate(
        """() => { const {run, charts: {timeline: t}} = tapegradReport, e = run.peakEvent;
            return {x: (t.px(t.xs[e]) + t.px(t.xs[e + 1])) / 2, top: t.top, height: t.innerHeight, most: t.most,
                    sums: [...run.sums(e)]}; }"""
    )
    for category, nbytes in enumerate(at["sums"]):
        if nbytes / at["most"] * at["height"] >= 3:
            y = at["top"] + at["height"] * (1 - (base + nbytes / 2) / at["most"])
            assert colour(page, "timeline", at["x"], y) == known[category], CATEGORIES[category]
            seen += 1
        base += nbytes
    assert seen >= 4


def test_edges_are_steps_and_not_ramps(show: Any) -> None:
    page = show(made_runs.out_of_memory())
    filled = palette(page)[CATEGORIES.index("activation")]
    for event, rises in ((1, True), (2, True), (4, False), (6, False)):
        # Halfway up the edge, all is as before left of it, and as after right of it.
        x, y = page.evaluate(
            """(e) => { const {run, charts: {timeline: t}} = tapegradReport;
                const middle = (run.total(e) + run.total(e - 1)) / 2;
                return [t.px(t.xs[e]), t.top + t.innerHeight * (1 - middle / t.most)]; }""",
            event,
        )
        sides = [colour(page, "timeline", x + d, y) == filled for d in (-1.5, 1.5)]
        assert sides == [not rises, rises], event
    colours = page.evaluate(
        """() => { const t = tapegradReport.charts.timeline, found = new Set();
            const probe = new OffscreenCanvas(t.inner, t.innerHeight / 2).getContext("2d");
            probe.drawImage(t.base, -t.left - 1, -t.top - t.innerHeight / 2);
            const {data} = probe.getImageData(0, 0, t.inner - 2, t.innerHeight / 2 - 2);
            for (let i = 0; i < data.length; i += 4) if (data[i + 3]) found.add(data.slice(i, i + 3).join());
            return [...found]; }"""
    )
    assert len(colours) == 2, colours  # that of the category and that of the grid: no mixed ones


def test_dragging_zooms_and_the_scale_fits_what_is_shown(show: Any) -> None:
    run = made_runs.training()
    page = show(run)
    box = page.locator("#timeline").bounding_box()
    whole = page.evaluate("tapegradReport.charts.timeline.most")
    page.mouse.move(box["x"] + 80, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 200, steps=3)
    page.mouse.up()
    drawn(page)
    low, high = page.evaluate("tapegradReport.charts.timeline.range")
    shown = [total for _, ns, total, _ in totals(run) if low <= ns <= high]
    assert 0 < len(shown) < len(events(run)) / 4
    most = page.evaluate("tapegradReport.charts.timeline.most")
    assert most < whole and max(shown) <= most <= max(shown) * 1.06
    page.mouse.dblclick(box["x"] + 300, box["y"] + 200)
    drawn(page)
    assert page.evaluate("tapegradReport.store.state.range") is None
    page.keyboard.press("p")
    drawn(page)
    page.keyboard.press("+")
    drawn(page)
    low, high = page.evaluate("tapegradReport.charts.timeline.range")
    assert low <= run.peak["seq"] * 1000 <= high and high - low < events(run)[-1].ns * 0.6
    page.keyboard.press("0")
    drawn(page)
    assert page.evaluate("tapegradReport.charts.timeline.most") == whole


def test_light_and_dark(show: Any) -> None:
    run = made_runs.training()
    light, dark = show(run), show(run, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    shades = light.evaluate(background), dark.evaluate(background)
    assert shades[0] != shades[1] and palette(light) != palette(dark)
    assert light.screenshot() != dark.screenshot()
    light.click("#theme")
    drawn(light)
    assert light.evaluate(background) == shades[1] and palette(light) == palette(dark)
    assert light.locator("#strips").screenshot() == dark.locator("#strips").screenshot()
    dark.keyboard.press("t")
    drawn(dark)
    assert dark.evaluate(background) == shades[0]


def tiled(part: Run, times: int) -> Run:
    """``part`` ``times`` over, one after the other: as many allocations, made faster."""
    run = made_runs.many(0)
    for name, table in part.tables.items():
        shift = {"seq": part.checks["events"], "ns": part.checks["events"] * 1000}
        for column, values in table.items():
            by = shift.get(column.rpartition("_")[2], 0)
            run.tables[name][column] = [v + k * by if v >= 0 else v for k in range(times) for v in values]
    run.strings, run.sources, run.peak = part.strings, part.sources, part.peak
    for table in ("frames", "stacks"):
        run.tables[table] = part.tables[table]
    return run


def test_two_hundred_thousand_allocations_are_drawn_at_once(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiled(made_runs.many(10_000), 20)
    assert run.count("allocs") == 200_000
    page = show(run)
    marks = dict(page.evaluate("performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"))
    with capsys.disabled():
        print(
            "\n200,000 allocations: "
            f"read after {marks['tapegrad-read']:.0f} ms, drawn after {marks['tapegrad-drawn']:.0f} ms"
        )
    assert marks["tapegrad-drawn"] < 6000  # alone on the machine it is a tenth of this
    assert page.locator("#folded").count() == 0
    assert integer(page, "#alive-total") == run.peak["bytes"]
