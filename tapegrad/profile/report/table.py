"""Lines and tables that fit a terminal: long cells are clipped, numbers never are; control characters are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tapegrad.profile.report.escape import clip, plain, shown

_GAP, _NARROWEST, _NARROW = 2, 6, 8
_WIDEST = 120
_ASCII_RULES = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


@dataclass(frozen=True)
class Column:
    """A column: its title; whether it is aligned right, as numbers; may be clipped; holds source lines."""

    title: str
    right: bool = False
    flexible: bool = False
    source: bool = False


@dataclass(frozen=True)
class _Clipped:
    """A cell on one line, however narrow its column; rich wraps text, or clips it by a character that ASCII lacks."""

    text: Text
    source: bool
    dots: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self.text.cell_len).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cut = clip_source if self.source else clip
        yield Text(cut(self.text.plain, options.max_width, self.dots), self.text.style, end="")


class Output:
    """A console; ``plain``: whether it shows ASCII only.  It prints text from a run with control characters escaped."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plain = plain(console.encoding)
        self.dots = "..." if self.plain else "…"

    def text(self, text: str) -> str:
        """``text`` with what the console cannot show, or would obey, as escapes."""
        return shown(text, self.console.encoding)

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(self.text(text), style), soft_wrap=True, highlight=False)

    def table(self, columns: list[Column], cells: Sequence[Sequence[str | Text]], rule: bool = False) -> None:
        """Print a table."""
        for line in self.lines(columns, cells, rule):
            self.console.print(line, soft_wrap=True, highlight=False)

    def lines(self, columns: list[Column], cells: Sequence[Sequence[str | Text]], rule: bool = False) -> list[Text]:
        """Lines of a table with titles that fits the console; with ``rule`` the last row stands below a line."""
        texts = [[c if isinstance(c, Text) else Text(self.text(c)) for c in row] for row in cells]
        texts.insert(0, [Text(column.title, "bold") for column in columns])
        natural = [max(row[i].cell_len for row in texts) for i in range(len(columns))]
        least = lambda flexible: sum(_GAP + min(n, flexible if c.flexible else n) for c, n in zip(columns, natural))
        width = max(least(_NARROWEST) - _GAP, min(self.console.width, _WIDEST))
        spare = width - (least(_NARROW) - _GAP)  # source lines give way only when the others are as narrow as _NARROW
        titles, *rows = [
            [_Clipped(t, c.source, self.dots) if c.flexible else t for c, t in zip(columns, row)] for row in texts
        ]
        totals = rows.pop() if rule else titles
        table = Table(
            box=(_ASCII_RULES if self.plain else SIMPLE) if rule else None, border_style="dim", show_edge=False,
            padding=(0, _GAP - rule, 0, 0), pad_edge=False, show_footer=rule,
        )  # fmt: skip
        for column, n, title, total in zip(columns, natural, titles, totals):
            table.add_column(
                title, total, justify="right" if column.right else "left", no_wrap=not column.flexible,
                width=min(n, max(_NARROWEST, min(n, _NARROW) + spare)) if column.source else None,
            )  # fmt: skip
        for row in rows:
            table.add_row(*row)
        lines = []
        for segments in self.console.render_lines(table, self.console.options.update_width(width), pad=False):
            lines.append(Text.assemble(*((s.text, s.style or "") for s in segments)))
            lines[-1].rstrip()
        return lines


def clip_source(text: str, width: int, dots: str = "…") -> str:
    """``model.py:44 Transf…``: the function gives way first, then the start of the file, the line never."""
    match = re.match(r"(.*:\d+)( .*)$", text, re.DOTALL)
    if match is None or cell_len(text) <= width:
        return clip(text, width, dots, keep_end=True)
    room = width - cell_len(match[1])
    if room < 2 + len(dots):  # not a letter of the function
        return clip(match[1], width, dots, keep_end=True)
    return match[1] + clip(match[2], room, dots)
