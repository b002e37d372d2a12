"""Columns of text that fit a terminal: long cells are clipped, numbers never are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from tapegrad.profile.report.escape import clip

_GAP = 2
_NARROWEST = 6
_NARROW = 8  # columns of places give way only when the others are as narrow as this


@dataclass(frozen=True)
class Column:
    """A column: its title; whether numbers stand to the right; whether it may be clipped; whether it holds places."""

    title: str
    right: bool = False
    flexible: bool = False
    place: bool = False


def table(columns: list[Column], cells: list[list[Any]], width: int, plain: bool, rule: bool = False) -> list[Text]:
    """Lines of a table with a title, at most ``width`` cells wide; with ``rule`` the last row stands below a line."""
    texts = [[c if isinstance(c, Text) else Text(str(c)) for c in row] for row in cells]
    widths = _widths(columns, texts, width)
    dots = "..." if plain else "…"
    titles = [Text(clip(c.title, w, dots), "bold") for c, w in zip(columns, widths)]
    lines = [_line(columns, titles, widths, dots)]
    lines += [_line(columns, row, widths, dots) for row in texts]
    if rule:
        dash = Text(("-" if plain else "─") * min(width, sum(widths) + _GAP * (len(widths) - 1)), "dim")
        lines[1:1] = [dash]
        lines[-1:-1] = [dash]
    return lines


def clip_place(text: str, width: int, dots: str = "…") -> str:
    """``model.py:44 Transf…``: the function gives way first, then the start of the file, the line never."""
    found = re.match(r"(.*:\d+)( .*)$", text, re.DOTALL)
    if found is None or cell_len(text) <= width:
        return clip(text, width, dots, keep_end=True)
    room = width - cell_len(found[1])
    if room < 2 + len(dots):  # not a letter of the function
        return clip(found[1], width, dots, keep_end=True)
    return found[1] + clip(found[2], room, dots)


def _widths(columns: list[Column], cells: list[list[Text]], width: int) -> list[int]:
    """Natural widths; flexible columns give way, the widest first, until all fit."""
    widths = [max([cell_len(c.title), *(cell_len(row[i].plain) for row in cells)]) for i, c in enumerate(columns)]
    over = sum(widths) + _GAP * (len(columns) - 1) - width
    flexible = [i for i, c in enumerate(columns) if c.flexible]
    while over > 0:
        widest = max(flexible, key=lambda i: (widths[i] > _NARROW and not columns[i].place, widths[i]), default=-1)
        if widest < 0 or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        over -= 1
    return widths


def _line(columns: list[Column], row: list[Text], widths: list[int], dots: str) -> Text:
    line = Text()
    for i, (column, cell, width) in enumerate(zip(columns, row, widths)):
        cut = clip_place if column.place else clip
        text = cut(cell.plain, width, dots) if column.flexible else cell.plain
        pad = " " * max(0, width - cell_len(text))
        line.append(" " * _GAP if i else "")
        line.append(pad if column.right else "")
        line.append(text, cell.style)
        line.append("" if column.right else pad)
    line.rstrip()
    return line
