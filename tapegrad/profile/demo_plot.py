"""The demo's picture: memory over one step for each way to train."""

from __future__ import annotations

from pathlib import Path

from tapegrad.errors import TapegradError
from tapegrad.profile.demo_train import Run
from tapegrad.profile.report.writable import problem_of
from tapegrad.profile.runs.whole import whole

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_MIB = 2.0**20


class MissingMatplotlibError(TapegradError, ImportError):
    """The package matplotlib is not installed."""


def require_writable(path: Path) -> None:
    """Fail early: raises MissingMatplotlibError, which says what to install, and OSError if it cannot be written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlibError("--png needs matplotlib: pip install 'tapegrad[plot]'") from error
    problem = problem_of("--png", path)
    if problem is not None:
        raise OSError(problem)


def plot(runs: list[Run], labels: list[str], path: Path) -> None:
    """Write a PNG: live bytes over one step per run as a line, those of activations as an area below it.

    Raises OSError; call ``require_writable`` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
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
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    with whole(path) as part:
        figure.savefig(part, dpi=150, format="png")
