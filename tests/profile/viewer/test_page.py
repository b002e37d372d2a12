"""The report as a page, in a real browser: keys, names of controls, narrow windows, hostile names, damage."""

from __future__ import annotations

from typing import Any

import made_runs
import pytest
from report_page import RUNS, cursor, drawn, integer, rows

from tapegrad.tracing.timeline import events, totals


def test_the_keyboard_alone_reaches_everything(show: Any) -> None:
    run = made_runs.training(checkpointed=1)
    page = show(run)
    count, peak = len(events(run)), cursor(page)
    for key, expected in (
        ("ArrowRight", peak + 1), ("ArrowLeft", peak), ("ArrowLeft", peak - 1), ("Home", 0), ("ArrowLeft", 0),
        ("End", count - 1), ("ArrowRight", count - 1), ("p", peak),
    ):  # fmt: skip
        page.keyboard.press(key)
        drawn(page)
        assert cursor(page) == expected, key
        assert integer(page, "#cursor-total") == list(totals(run))[expected][2]
    seqs = [e.seq for e in events(run)]
    page.keyboard.press("Home")
    for step in range(3):
        page.keyboard.press("]")
        drawn(page)
        assert seqs[cursor(page)] == run.steps["peak_seq"][step]
    page.keyboard.press("[")
    drawn(page)
    assert seqs[cursor(page)] == run.steps["peak_seq"][1]
    page.keyboard.press("Shift+ArrowRight")
    drawn(page)
    assert cursor(page) > seqs.index(run.steps["peak_seq"][1]) + 1
    page.keyboard.press("/")
    page.keyboard.type("softmax px[]?")
    assert page.input_value("#filter") == "softmax px[]?"
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.getElementById('filter').value === ''")
    page.keyboard.press("?")
    page.wait_for_selector("#help", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#help", state="hidden")
    page.keyboard.press("g")
    page.wait_for_function("() => document.getElementById('group').value === 'line'")


def test_tab_visits_every_control(show: Any) -> None:
    page = show(made_runs.out_of_memory())
    visited = set()
    for _ in range(90):
        page.keyboard.press("Tab")
        visited |= set(
            page.evaluate(
                "[document.activeElement.id, document.activeElement.className, document.activeElement.innerText]"
            )
        )
    for wanted in (
        "theme",
        "timeline",
        "peak-mark",
        "oom-mark",
        "filter",
        "group",
        "chip",
        "file",
        "source",
        "whole run",
        "show what was alive then",
    ):
        assert any(wanted in text for text in visited if text), wanted
    # what has the focus is drawn with an outline
    page.focus("#timeline")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_every_control_has_a_name(show: Any) -> None:
    page = show(made_runs.training(checkpointed=1))
    page.evaluate("tapegradReport.store.set({selected: 9})")
    drawn(page)
    nameless = page.eval_on_selector_all(
        "button, select, input, [tabindex], [role=img]",
        """found => found.filter((e) => !(e.ariaLabel || e.innerText || e.title || e.labels?.[0]?.innerText))
                         .map((e) => e.outerHTML)""",
    )
    assert nameless == []


def test_hostile_names_are_shown_as_they_are_and_hidden_characters_spelt_out(show: Any) -> None:
    page = show(made_runs.hostile())
    assert page.inner_text("h1") == "</script><b>x</b> ☃ [red]markup[/red]"
    assert page.locator("h1 b, td img, td i, #source script").count() == 0
    line = page.inner_text("#alive td.c-line")
    assert "<img src=x onerror=alert(1)>.py:3" in line and "f</script>\\u001b[31m\\u202e()" in line
    assert page.inner_text("#source code") == "y = '</script><script>alert(2)</script>'  # 💥 \\u001b[2J"
    assert page.inner_text("#alive td.c-holder") == '"quoted" & <held>'
    page.click("#alive td.c-op button")
    drawn(page)
    details = page.inner_text("#details")
    assert "C:\\Users\\zoë\\<img src=x onerror=alert(1)>.py:3" in details and "function ünïcödé 💥 <i>" in details
    page.click("#source .line button")
    drawn(page)
    assert rows(page).count() == 1  # the path of the line finds it, with its blanks and backslashes


@pytest.mark.parametrize("name", ["training", "oom", "one", "empty"])
def test_nothing_is_cut_off_in_a_narrow_window(show: Any, name: str) -> None:
    page = show(RUNS[name](), width=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    page.set_viewport_size({"width": 500, "height": 900})
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
    assert page.evaluate("tapegradReport.charts.timeline.base.clientWidth") < 500


def test_a_damaged_payload_says_so(show: Any) -> None:
    page = show(made_runs.empty())
    html = page.content().replace('id="payload">', 'id="payload">AAAA')
    assert "AAAA" in html
    other = page.context.browser.new_page()
    other.set_content(html.replace('<div id="page">', '<p id="loading"></p><div id="page" hidden>', 1))
    other.wait_for_function(
        "() => document.getElementById('loading').textContent.startsWith('This report cannot be shown')"
    )
    other.close()
