"""What the browser tests ask of a report that is open in a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import made_runs

from tapegrad.tracing.run import Run

RUNS: dict[str, Callable[[], Run]] = {
    "training": lambda: made_runs.training(checkpointed=2),
    "many": lambda: made_runs.many(1500),
    "oom": made_runs.out_of_memory,
    "one": made_runs.hostile,
    "empty": made_runs.empty,
    "several": made_runs.several,
}
# Two frames: what was set is drawn in the first.
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def drawn(page: Any) -> None:
    page.evaluate(DRAWN)


def integer(page: Any, selector: str, name: str = "bytes") -> int:
    return int(page.locator(selector).get_attribute(f"data-{name}"))


def integers(page: Any, selector: str) -> list[int]:
    return page.eval_on_selector_all(selector, "found => found.map((e) => Number(e.dataset.bytes))")


def cursor(page: Any) -> int:
    return page.evaluate("tapegradReport.store.state.cursor")


def go(page: Any, event: int) -> None:
    page.evaluate(f"tapegradReport.store.set({{cursor: {event}}})")
    drawn(page)


def rows(page: Any) -> Any:
    return page.locator("#alive tbody tr")


def box_of(page: Any, alloc: int) -> dict[str, float]:
    """The rectangle of an allocation, in the pixels of the window."""
    page.locator("#strips").scroll_into_view_if_needed()
    return page.evaluate(f"tapegradReport.charts.boxOf({alloc})")


def colour(page: Any, plot: str, x: float, y: float) -> str:
    """The colour of the picture at a point in CSS pixels of the plot, as in the style sheet."""
    return page.evaluate(
        """([plot, x, y]) => {
            const ratio = window.devicePixelRatio, probe = new OffscreenCanvas(1, 1).getContext("2d");
            probe.drawImage(document.querySelector(`#${plot} canvas`), -Math.floor(x * ratio), -Math.floor(y * ratio));
            const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data;
            return a ? "#" + [r, g, b].map((c) => c.toString(16).padStart(2, "0")).join("") : "";
        }""",
        [plot, x, y],
    )


def palette(page: Any) -> list[str]:
    return page.evaluate("tapegradReport.charts.colours.category")
