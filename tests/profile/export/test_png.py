"""Pictures: stepped areas that stack to the total, the peak where it is, nothing cut off."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tapegrad.profile.export.png import COLOURS, draw, thinned, write
from tapegrad.profile.runs import CATEGORIES, Run
from tapegrad.profile.runs.timeline import totals
from tests.profile.made_runs import MIB, Builder, empty, hostile, many, out_of_memory, training


def drawn(run: Run) -> Figure:
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(run, figure)
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize("run", [training(checkpointed=2), many(300), empty(), hostile(), out_of_memory()])
def test_files(run: Run, tmp_path: Path) -> None:
    write(run, tmp_path / "a.png", "png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    write(run, tmp_path / "a.svg", "svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert "<script" not in text and "\x1b" not in text
    assert len(list(tmp_path.iterdir())) == 2
    write(run, tmp_path / "b.svg", "svg")
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_areas_are_steps() -> None:
    b = Builder()
    x = b.alloc(MIB, "user", "exp")
    for _ in range(8):
        b.tick()
    b.alloc(2 * MIB, "activation", "exp")
    b.free(x)
    run = b.finish()
    for area in drawn(run).axes[0].collections:
        edges = {
            (a[0] == b[0]) or (a[1] == b[1])
            for path in area.get_paths()
            for a, b in zip(path.vertices, path.vertices[1:])
        }
        assert edges == {True}  # every edge is level or upright


def test_the_areas_stack_to_the_total() -> None:
    run = training(checkpointed=2)
    axes = drawn(run).axes[0]
    top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
    assert top == pytest.approx(run.peak["bytes"] / MIB)
    names = [re.sub(",.*", "", str(area.get_label())) for area in axes.collections]
    assert names == [c for c in CATEGORIES if c in names] and len(names) == 7
    assert all(area.get_facecolor()[0, 3] == 1 for area in axes.collections)
    assert axes.get_ylabel() == "MiB" and axes.texts[0].get_text() == "peak 13.00 MiB"
    [marker] = axes.lines
    peak_ns = next(ns for _, ns, total, _ in totals(run) if total == run.peak["bytes"])
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (peak_ns / 1e6, 13)


def test_the_legend_is_inside_the_picture_and_long_names_leave_room() -> None:
    run = many(300)
    run.meta["program"] = run.meta["device"]["name"] = "$x_1$" + "ü" * 300
    figure = drawn(run)
    assert figure.axes[0].get_window_extent().width > figure.bbox.width / 2
    [legend] = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= 0 and box.x1 <= whole.x1 and box.y0 >= 0 and box.y1 <= whole.y1
    assert box.x0 >= figure.axes[0].get_window_extent().x1  # beside the areas, not on them


def test_thinning_keeps_the_peak() -> None:
    moments = [(i, i % 97 if i != 5003 else 1000, (i,)) for i in range(20_000)]
    found = thinned(moments, 100)
    assert len(found) <= 100 and max(total for _, total, _ in found) == 1000
    assert [ns for ns, _, _ in found] == sorted(ns for ns, _, _ in found)
    assert thinned(moments[:50], 100) == moments[:50]


def test_categories_have_the_colours_of_the_page() -> None:
    css = resources.files("tapegrad.profile.viewer").joinpath("assets", "viewer.css").read_text("utf-8")
    of_page = dict(reversed(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", css)))  # the first of a name is by day
    assert {name: of_page[name] for name in CATEGORIES} == COLOURS
    assert len(set(COLOURS.values())) == len(CATEGORIES)
