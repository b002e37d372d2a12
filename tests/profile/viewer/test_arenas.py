"""The pictures and tables of captured programs' arenas, in a real browser."""

from __future__ import annotations

from typing import Any

import made_runs

from tapegrad.profile.report.arenas import arenas
from tapegrad.sizes import format_bytes

HEIGHT = 96


def test_the_tables_have_the_figures_of_the_report(show: Any) -> None:
    run = made_runs.captured()
    (arena,) = arenas(run)
    page = show(run)
    categories, lines = page.eval_on_selector_all(
        "#arenas table",
        "found => found.map((t) => [...t.tBodies[0].rows].map((r) => [...r.cells].map((c) => c.innerText)))",
    )
    assert [row[:2] for row in categories] == [[g.key, format_bytes(g.bytes)] for g in arena.categories]
    assert [(row[0], row[1], row[3]) for row in lines] == [(g.key, g.op, format_bytes(g.bytes)) for g in arena.lines]
    assert page.inner_text("#arenas h3") == "train: 7.00 MiB, 2 replays"
    assert "task 3 of 4, tanh, add, train.py:12, backward" in page.inner_text("#arenas .readout")


def test_the_picture_shows_what_lies_there_at_each_task(show: Any) -> None:
    page = show(made_runs.captured())
    shades = page.evaluate(
        """([tasks, height, arena]) => {
          const canvas = document.querySelector("#arenas canvas"), ratio = window.devicePixelRatio;
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const at = (x, y) => pixels[4 * (Math.floor(y) * canvas.width + Math.floor(x)) + 3];
          return Array.from({length: tasks + 1}, (_, i) => {
            const x = (i + 0.5) * canvas.width / (tasks + 1);
            let rows = 0;
            for (let y = 0; y < height; y++) rows += at(x, (y + 0.5) * ratio) > 0;
            return Math.round(rows / height * arena);
          });
        }""",
        [4, HEIGHT, 7],
    )
    assert shades == [1, 2, 3, 6, 5]  # MiB: the argument before the first task, then what is there at each


def test_a_program_that_replays_nothing_has_no_such_panel(show: Any) -> None:
    assert show(made_runs.training()).locator("#arenas").count() == 0
