"""Output about one run: how files, operations and times are called."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from tapegrad.profile.report import rows as r
from tapegrad.profile.report.escape import clip
from tapegrad.profile.report.table import Output
from tapegrad.profile.report.units import ms
from tapegrad.tracing.run import Run

_BAR = 14


class RunOutput(Output):
    """Output about one run: it knows how to call files and operations."""

    def __init__(self, console: Console, run: Run) -> None:
        super().__init__(console)
        self.files = r.short_names(run)

    def source(self, key: str) -> str:
        """``folder/model.py:41 attention()`` with as little of the folder as tells files apart, escaped."""
        return self.text(r.short_source(key, self.files))

    def op(self, name: str) -> str:
        """The name of an operation, escaped."""
        return self.text(r.op_name(name))

    def ms(self, ns: int) -> str:
        return ms(ns, self.plain)

    def file(self, path: str) -> str:
        """A path as it can be pasted into a shell."""
        return self.text(shlex.quote(path))

    def panel(self, title: str, lines: list[str]) -> None:
        width = min(self.console.width, 100)
        heading = Text(clip(title, max(8, width - 6), self.dots), "bold red")
        body = Text("\n".join(lines))
        self.console.print(
            Panel(body, title=heading, title_align="left", width=width, border_style="red"), highlight=False
        )

    def bar(self, part: int, whole: int, style: str) -> Text:
        """A bar as long as ``part`` of ``whole``, in eighths of a cell, or whole cells of ASCII."""
        cells, eighths = divmod(part * _BAR * 8 // whole if whole else 0, 8)
        return Text("#" * cells if self.plain else "█" * cells + " ▏▎▍▌▋▊▉"[eighths].strip(), style)
