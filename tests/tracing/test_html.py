"""Tables in notebooks: every row and cell, numbers to the right, and nothing of a text is taken for HTML."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

import tapegrad as tg
from tapegrad.tracing import html

RIGHT, LEFT = 'style="text-align:right"', 'style="text-align:left"'


def test_a_table_has_its_cells_in_order() -> None:
    assert html.table(("name", "1st"), [("a<b", "12 B"), ("", "x")]) == (
        f"<table><thead><tr><th {LEFT}>name</th><th {RIGHT}>1st</th></tr></thead><tbody>"
        f"<tr><td {LEFT}>a&lt;b</td><td {RIGHT}>12 B</td></tr>"
        f"<tr><td {LEFT}></td><td {LEFT}>x</td></tr></tbody></table>"
    )
    assert html.table(("name",), []) == "" and html.paragraph("a & b") == "<p>a &amp; b</p>"


def cells(page: str) -> list[list[str]]:
    return [re.findall(r"<t[hd] [^>]*>([^<]*)<", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_what_is_kept_and_what_is_predicted_are_a_line_and_a_table() -> None:
    x = tg.asarray(np.ones((20, 20)))
    with tg.GradientTape() as tape:
        tape.watch(x)
        tg.sum(tg.softmax(x))
        report = tg.memory.saved(tape)
    page = report._repr_html_()
    first = "saved: 3.50 KiB"
    assert page.startswith(f"<p>{first}</p><table>") and len(cells(page)) == 1 + len(report.rows)
    shape = tg.memory.ShapeDtype((64, 64))
    found = tg.memory.predict_peak(lambda u: tg.tanh(u @ u) @ u, shape, budgets=["1KiB", "10MiB"], least=False)
    page = found._repr_html_()
    assert page.startswith("<p>") and [row[0] for row in cells(page)] == ["budget", "1.00 KiB", "10.00 MiB"]
    assert cells(page)[0] == ["budget", "peak", "evictions", "recomputed", "extra work"]
    assert cells(page)[1][1].startswith("too small: some operation needs ") and cells(page)[2][2:] == ["0", "0", "0.0%"]


SIZES = {"input": 512, "gradient": 4096, "user": 1024}


def test_a_measure_shows_the_largest_categories_first() -> None:
    parts = Counter({(category, "add", "a line"): n for category, n in SIZES.items()})
    page = tg.memory.Measure(0, 5632, peak_parts=parts, detailed=False)._repr_html_()
    assert [row[0] for row in cells(page)][:4] == ["at the peak", "gradient", "user", "input"]
