"""Lines and tables that fit a terminal: long cells are clipped, numbers never are; control characters are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tapegrad.profile.report.escape import clip, plain, shown

_GAP = 2
_NARROWEST = 6
_NARROW = 8  # columns of source lines give way only when the others are as narrow as this
_WIDEST = 120


@dataclass(frozen=True)
class Column:
    """A column: its title; whether it is aligned right, as numbers; may be clipped; holds source lines."""

    title: str
    right: bool = False
    flexible: bool = False
    source: bool = False


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
        width = min(self.console.width, _WIDEST)
        texts = [[c if isinstance(c, Text) else Text(self.text(c)) for c in row] for row in cells]
        widths = _widths(columns, texts, width)
        titles = [Text(clip(c.title, w, self.dots), "bold") for c, w in zip(columns, widths)]
        lines = [_line(columns, row, widths, self.dots) for row in (titles, *texts)]
        if rule:
            dash = Text(("-" if self.plain else "─") * min(width, sum(widths) + _GAP * (len(widths) - 1)), "dim")
            lines[1:1] = [dash]
            lines[-1:-1] = [dash]
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


def _widths(columns: list[Column], cells: list[list[Text]], width: int) -> list[int]:
    """Natural widths; flexible columns give way, the widest first, until all fit."""
    widths = [max([cell_len(c.title), *(cell_len(row[i].plain) for row in cells)]) for i, c in enumerate(columns)]
    over = sum(widths) + _GAP * (len(columns) - 1) - width
    flexible = [i for i, c in enumerate(columns) if c.flexible]
    while over > 0:
        widest = max(flexible, key=lambda i: (widths[i] > _NARROW and not columns[i].source, widths[i]), default=-1)
        if widest < 0 or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        over -= 1
    return widths


def _line(columns: list[Column], row: list[Text], widths: list[int], dots: str) -> Text:
    line = Text()
    for i, (column, cell, width) in enumerate(zip(columns, row, widths)):
        cut = clip_source if column.source else clip
        text = cut(cell.plain, width, dots) if column.flexible else cell.plain
        pad = " " * max(0, width - cell_len(text))
        line.append(" " * _GAP if i else "")
        line.append(pad if column.right else "")
        line.append(text, cell.style)
        line.append("" if column.right else pad)
    line.rstrip()
    return line
