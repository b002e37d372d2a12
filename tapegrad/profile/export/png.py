"""A picture of memory over time, with matplotlib: areas stacked by category, stepped, the peak marked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tapegrad.profile.report.escape import clip, shown
from tapegrad.profile.report.units import iec, unit_of
from tapegrad.profile.runs import CATEGORIES, Run
from tapegrad.profile.runs.timeline import totals
from tapegrad.profile.runs.whole import ExportError, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Those of the HTML page in daylight.
COLOURS = {
    "parameter": "#279d62", "optimizer": "#dc9100", "gradient": "#045395", "activation": "#bf4b00",
    "rematerialized": "#8bc8ff", "communication": "#7800d2", "temporary": "#bb7cb8", "input": "#2d2636",
    "user": "#f3e15d", "unattributed": "#b2b1af",
}  # fmt: skip
_COLUMNS = 4000
"""More moments than a picture has columns of dots are thinned to this many, each the fullest of its neighbours."""

Moment = tuple[int, int, tuple[int, ...]]
"""Nanoseconds, bytes, and bytes by category."""


def write(run: Run, path: str | os.PathLike[str], kind: str = "png") -> None:
    """Write the picture to ``path`` as ``kind``, "png" or "svg".

    Raises OSError; ExportError, which says what to install, where matplotlib is missing.
    """
    with picture(path, kind) as figure:
        draw(run, figure)


def require_matplotlib(kind: str) -> None:
    """Raises ExportError, which says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ExportError(f"--{kind} needs matplotlib: pip install 'tapegrad[plot]'") from error


@contextmanager
def picture(path: str | os.PathLike[str], kind: str) -> Iterator[Figure]:
    """A figure to draw on, which is written to ``path`` at the end.  Raises OSError, ExportError."""
    require_matplotlib(kind)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Names from a run are no formulas, and text in an SVG stays text.
    settings: Any = {"text.usetex": False, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "tapegrad"}
    with whole(path) as part, rc_context(settings):
        figure = Figure(figsize=(10, 5), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(part, dpi=150, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})


def plain_axes(axes: Axes) -> None:
    """Bytes from 0 on, horizontal lines, no frame at the top and the right."""
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def draw(run: Run, figure: Figure) -> None:
    """Draw the run on a figure of matplotlib's."""
    axes = figure.add_subplot()
    moments = thinned([(ns, total, by) for _, ns, total, by in totals(run)], _COLUMNS)
    highest = max((total for _, total, _ in moments), default=0)
    unit, divisor = unit_of(highest)
    times = [ns / 1e6 for ns, _, _ in moments]
    if len(moments) > 1:
        _areas(axes, times, moments, divisor)
    top = max(moments, key=lambda m: m[1], default=None)
    if top is not None:
        text = f"peak {iec(run.peak['bytes'])}"
        axes.plot([top[0] / 1e6], [top[1] / divisor], "o", color="black", markersize=4)
        near_end = top[0] > (moments[0][0] + moments[-1][0]) / 2
        axes.annotate(
            text, (top[0] / 1e6, top[1] / divisor), xytext=(-6 if near_end else 6, 6), textcoords="offset points",
            ha="right" if near_end else "left",
        )  # fmt: skip
    axes.set_xlabel("ms since the recording began")
    axes.set_ylabel(unit)
    names = (run.meta["program"], 48), (run.meta["device"]["name"], 24)
    program, device = (clip(shown(name, "ascii"), width, "...", keep_end=True) for name, width in names)
    axes.set_title(f"{program} on {device}: bytes alive", loc="left")
    axes.margins(x=0, y=0.12)
    plain_axes(axes)


def _areas(axes: Axes, times: list[float], moments: list[Moment], divisor: int) -> None:
    below = [0.0] * len(moments)
    for i, name in enumerate(CATEGORIES):
        largest = max(by[i] for _, _, by in moments)
        if not largest:
            continue
        above = [b + by[i] / divisor for b, (_, _, by) in zip(below, moments)]
        # Bytes stay what they are until the next event: steps, not ramps.
        label = f"{name}, at most {iec(largest)}"
        axes.fill_between(times, below, above, step="post", color=COLOURS[name], linewidth=0, label=label)
        below = above
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)


def thinned(moments: list[Moment], columns: int) -> list[Moment]:
    """At most ``columns`` moments: of neighbours the one with most bytes, at the time of the first of them."""
    if len(moments) <= columns:
        return moments
    begin, length = moments[0][0], max(1, moments[-1][0] - moments[0][0])
    kept: dict[int, Moment] = {}
    for moment in moments:
        column = (moment[0] - begin) * (columns - 1) // length
        known = kept.get(column)
        if known is None:
            kept[column] = moment
        elif moment[1] > known[1]:
            kept[column] = (known[0], moment[1], moment[2])
    return list(kept.values())
