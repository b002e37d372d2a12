"""The figures in the report, in a real browser: the same integers as in the run, whatever is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_runs
import pytest
from report_page import RUNS, cursor, drawn, go, integer, integers, rows

from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.timeline import alive, events, totals

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RUNS)
def test_its_figures_are_the_runs(show: Any, name: str) -> None:
    run = RUNS[name]()
    page = show(run)
    assert integer(page, "#peak") == run.peak["bytes"]
    assert page.inner_text("#peak") == format_bytes(run.peak["bytes"])
    found = list(totals(run))
    assert page.evaluate("Array.from(tapegradReport.run.totals)") == [total for _, _, total, _ in found]
    at_peak = max(((total, -i) for i, (_, _, total, _) in enumerate(found)), default=(0, 1))
    assert cursor(page) == -at_peak[1]
    for e in sorted({-at_peak[1], 0, 63, 64, 65, len(found) // 3, len(found) - 1} & set(range(len(found)))):
        seq, _, total, by = found[e]
        go(page, e)
        assert integer(page, "#cursor-total") == integer(page, "#alive-total") == total
        assert tuple(integers(page, ".chip")) == by and sum(by) == total
        assert integer(page, "#alive-shown") == total
        expected = alive(run, seq)
        shown = page.eval_on_selector_all(
            "#alive tbody tr", "found => found.map((e) => [+e.dataset.alloc, +e.dataset.bytes])"
        )
        sizes = run.allocs["bytes"]
        if len(expected) <= 200:  # more rows are shown on demand
            assert sorted(shown) == [[a, sizes[a]] for a in sorted(expected)]
        assert page.eval_on_selector_all(
            "#alive tbody td.c-category", "found => found.map((e) => e.innerText.trim())"
        ) == [CATEGORIES[expected[a]] for a, _ in shown]


def test_the_smallest_allocations_are_folded_into_rows_that_complete_the_sum(show: Any) -> None:
    run = made_runs.many(1500)
    page = show(run, max_drawn=300)
    note = page.inner_text("#folded")
    assert integer(page, "#folded", "count") == 1200 and "300 largest" in note and "1,200 smaller" in note
    assert page.evaluate("Array.from(tapegradReport.run.totals)") == [total for _, _, total, _ in totals(run)]
    assert integer(page, "#alive-total") == integer(page, "#alive-shown") == run.peak["bytes"]
    assert sum(integers(page, "#alive tbody tr")) == run.peak["bytes"]
    assert sum(
        int(n) for n in page.eval_on_selector_all("#alive tbody tr", "f => f.map((e) => e.dataset.count)")
    ) == len(alive(run, run.peak["seq"]))
    page.select_option("#group", "category")
    drawn(page)
    assert sum(integers(page, "#alive tbody tr")) == run.peak["bytes"]
    assert "folded" not in show(run).content()[-4000:] and page.locator("#folded").count() == 1


def test_filter_by_text_by_category_and_by_line(show: Any) -> None:
    run = made_runs.training(steps=1)
    page = show(run)
    now, sizes = alive(run, run.peak["seq"]), run.allocs["bytes"]
    page.fill("#filter", "model.py:43 MATMUL")
    drawn(page)
    expected = [a for a in now if run.frame_of(run.allocs["stack"][a])[1] == 43]
    assert sorted(integers(page, "#alive tbody tr")) == sorted(sizes[a] for a in expected) and expected
    assert integer(page, "#alive-shown") == sum(sizes[a] for a in expected)
    assert integer(page, "#alive-total") == run.peak["bytes"]
    page.fill("#filter", "no such thing")
    drawn(page)
    assert rows(page).count() == 0 and integer(page, "#alive-shown") == 0
    page.keyboard.press("Escape")
    page.click(".chip[data-category=parameter]")
    drawn(page)
    assert set(page.locator("#alive td.c-category").all_inner_texts()) == {"parameter"}
    assert integer(page, "#alive-shown") == integer(page, ".chip[data-category=parameter]")
    page.click(".chip[data-category=parameter]")
    page.click("#source .line[data-line='44'] button")
    drawn(page)
    assert {text.split()[0] for text in page.locator("#alive td.c-line").all_inner_texts()} == {"model.py:44"}


@pytest.mark.parametrize("group", ["line", "op", "call", "shape", "category"])
def test_groups_have_the_sums_of_their_members(show: Any, group: str) -> None:
    run = made_runs.training(steps=2, checkpointed=1)
    page = show(run)
    page.select_option("#group", group)
    drawn(page)
    now, expected = alive(run, run.peak["seq"]), {}
    for a, category in now.items():
        key = {
            "line": run.frame_of(run.allocs["stack"][a])[:2], "op": run.allocs["op"][a],
            "shape": run.allocs["shape"][a],
            "call": -1 if run.allocs["call"][a] < 0 else run.calls["ordinal"][run.allocs["call"][a]],
            "category": category,
        }[group]  # fmt: skip
        expected[key] = expected.get(key, 0) + run.allocs["bytes"][a]
    assert integers(page, "#alive tbody tr") == sorted(expected.values(), reverse=True)
    first = integers(page, "#alive tbody tr")[0]
    page.locator("#alive tbody button").first.click()
    drawn(page)
    assert page.input_value("#group") == "allocation" and integer(page, "#alive-shown") == first
    page.keyboard.press("Escape")
    drawn(page)
    assert integer(page, "#alive-shown") == run.peak["bytes"]


def test_sorting_by_a_column_and_back(show: Any) -> None:
    page = show(made_runs.many(150))
    by_bytes = integers(page, "#alive tbody tr")
    assert by_bytes == sorted(by_bytes, reverse=True)
    page.click("button[data-sort=bytes]")
    drawn(page)
    assert integers(page, "#alive tbody tr") == sorted(by_bytes)
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("bytes")
    page.click("button[data-sort=op]")
    drawn(page)
    ops = page.locator("#alive td.c-op").all_inner_texts()
    assert ops == sorted(ops) and len(set(ops)) > 1


def test_what_was_computed_again_is_listed(show: Any) -> None:
    run = made_runs.training(steps=3, checkpointed=2)
    page = show(run)
    text = page.inner_text("#lineage")
    assert "6 reruns" in text and format_bytes(12 * made_runs.MIB) in text
    assert page.locator("#lineage table").nth(1).locator("td.number").all_inner_texts() == ["6", "6.00 MiB"] * 2
    page.locator("#lineage button").first.click()
    drawn(page)
    assert page.locator("tr.chosen .c-category").inner_text().strip() == "rematerialized"
    assert show(made_runs.training()).locator("#lineage").count() == 0


def test_a_run_that_ran_out_of_memory_says_so(show: Any) -> None:
    run = made_runs.out_of_memory()
    page = show(run)
    text = page.inner_text("#failure")
    assert "matmul float32[16384,16384] at model.py:11 asked for 1073741824 bytes" in text and "6.00 MiB" in text
    assert integer(page, "#failure-total") == 4 * made_runs.MIB
    page.keyboard.press("Home")
    page.keyboard.press("o")
    drawn(page)
    assert cursor(page) == len(events(run)) - 1 and integer(page, "#alive-total") == 4 * made_runs.MIB
    assert show(made_runs.training(steps=1)).locator("#failure, #oom-mark").count() == 0


def test_the_ledger_tells_whether_it_agrees_with_the_pool(show: Any) -> None:
    run = made_runs.training(steps=1)
    assert "not compared" in show(run).inner_text("#ledger")
    run.checks["checked"] = 40
    assert "ledger = NumPy's allocations, drift 0 B" in show(run).inner_text("#ledger")
    run.meta["device"]["name"] = "cuda:0"
    assert "ledger = pool, drift 0 B" in show(run).inner_text("#ledger")
    run.checks["drift_bytes"] = 1536
    page = show(run)
    assert "differs from the pool by up to 1.50 KiB" in page.inner_text("#ledger")
    assert integer(page, "#ledger") == 1536
    assert "add up to" not in page.inner_text(".badges")
    run.peak["bytes"] += 512
    assert f"{run.peak['bytes']:,} B, its events add up to {run.peak['bytes'] - 512:,} B" in show(run).inner_text(
        ".badges"
    )


def test_without_source_the_lines_still_have_their_bytes(show: Any) -> None:
    page = show(made_runs.training(steps=1), source=False)
    assert "left out" in page.inner_text("section:has(#source)")
    assert set(page.locator("#source code").all_inner_texts()) == {""}
    assert sum(integers(page, "#source .line")) == integer(page, "#alive-total")


def test_the_table_can_be_saved(show: Any) -> None:
    run = made_runs.training(steps=1)
    page = show(run)
    with page.expect_download() as download:
        page.click("text=save as CSV")
    lines = Path(download.value.path()).read_bytes().decode().split("\r\n")
    assert lines[0].startswith("bytes,category,op,line,array")
    assert sum(int(line.split(",")[0]) for line in lines[1:] if line) == run.peak["bytes"]
