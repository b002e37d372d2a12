"""Cards of what would help: beside the peak, with figures to the byte, copied by a button, at their lines of source."""

from __future__ import annotations

from typing import Any

import made_runs
from report_page import drawn, integer

from tapegrad.profile.plan.advice import Advice, Card
from tapegrad.profile.plan.edits import Edit
from tapegrad.sizes import format_bytes

MIB = made_runs.MIB
EDITS = (Edit("model.py", 43, "y = <b>f</b>(x)", "y = tg.recompute_grad(<b>f</b>)(x)"), Edit("model.py", 40, "", "@f"))
ADVICE = Advice(
    (Card("recompute <i>f()</i>", 8 * MIB, 3 * MIB + 1, 0.27, EDITS, "about"), Card("less", 8 * MIB, 7 * MIB)),
    (("other mixes", "tapegrad plan r.json --pareto"),),
).to_json()


def shown(show: Any) -> Any:
    return show(made_runs.training(steps=1), advice=ADVICE)


def test_a_card_says_what_to_write_where_and_what_that_gives(show: Any) -> None:
    page = shown(show)
    assert page.locator("#page > *").nth(1).get_attribute("id") == "advice"  # right below the peak
    assert page.locator("#advice .card").count() == 2
    text = page.inner_text("#advice")
    for wanted in (
        "recompute <i>f()</i>", f"8.00 MiB → about {format_bytes(3 * MIB + 1)}", "−62 %", "work +27 %", "model.py:43",
        "y = <b>f</b>(x)", "y = tg.recompute_grad(<b>f</b>)(x)", "above it", "tapegrad plan r.json --pareto",
    ):  # fmt: skip
        assert wanted in text, wanted
    effect = "#advice .card:first-child .effect"
    assert integer(page, effect) == 3 * MIB + 1 and integer(page, effect, "before") == 8 * MIB
    assert show(made_runs.training(steps=1)).locator("#advice").count() == 0


def test_the_button_copies_the_code(show: Any) -> None:
    page = shown(show)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert page.locator("#advice .card button:text('copy')").count() == 1  # none without code
    page.click("#advice .card button:text('copy')")
    page.wait_for_selector("#advice button:text('copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "y = tg.recompute_grad(<b>f</b>)(x)\n@f"


def test_without_a_clipboard_the_code_is_copied_the_old_way(show: Any) -> None:
    page = shown(show)
    page.evaluate("""() => {
        navigator.clipboard.writeText = () => Promise.reject(new Error("no"));
        document.addEventListener("copy", () => { window.copiedText = document.getSelection().toString()
            || document.activeElement.value; });
    }""")
    page.click("#advice .card button:text('copy')")
    page.wait_for_selector("#advice button:text('copied')")
    assert page.evaluate("copiedText") == "y = tg.recompute_grad(<b>f</b>)(x)\n@f"
    assert page.locator("textarea").count() == 0


def test_the_source_shows_the_lines_that_cards_speak_of(show: Any) -> None:
    page = shown(show)
    lines = page.eval_on_selector_all("#source .line.advised", "found => found.map((e) => Number(e.dataset.line))")
    assert lines == [43]
    assert page.locator("#source .line.shown").count() == 0
    page.click("#advice button:text('model.py:43')")
    drawn(page)
    assert page.locator("#source .line.shown").get_attribute("data-line") == "43"
    assert page.locator("#source .line.shown").is_visible()
