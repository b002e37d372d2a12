"""The demo's picture: memory over one step for each way to train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tapegrad.profile.demo_train import Run
from tapegrad.profile.export.png import picture, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_MIB = 2.0**20


def plot(runs: list[Run], labels: list[str], path: Path) -> None:
    """Write a PNG: live bytes over one step per run as a line, those of activations as an area below it.

    Raises OSError, ExportError.
    """
    with picture(path, "png") as figure:
        _draw(runs, labels, figure.add_subplot())


def _draw(runs: list[Run], labels: list[str], axes: Axes) -> None:
    for run, label, colour in zip(runs, labels, _COLOURS, strict=True):
        seconds = [s for s, _, _ in run.samples]
        live = [b / _MIB for _, b, _ in run.samples]
        # Bytes stay what they are until the next event: steps, not ramps.
        axes.step(
            seconds, live, where="post", color=colour, linewidth=1.4, label=f"{label}: at most {max(live):.0f} MiB"
        )
        axes.fill_between(
            seconds, [b / _MIB for _, _, b in run.samples], step="post", color=colour, alpha=0.18, linewidth=0
        )
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("MiB")
    axes.set_title("One training step. Line: all live bytes. Area: of which activations, kept or remade.", loc="left")
    axes.legend(loc="upper right", frameon=False, labelcolor="linecolor")
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    plain_axes(axes)
