"""Tables for notebooks: what an object's ``_repr_html_`` is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LEFT, _RIGHT = "text-align:left", "text-align:right"


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; numbers, which begin with a digit, stand to the right; nothing if there are no rows."""
    body = "".join("<tr>" + "".join(_cell("td", text) for text in row) + "</tr>" for row in rows)
    head = "".join(_cell("th", text) for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def _cell(tag: str, text: str) -> str:
    return f'<{tag} style="{_RIGHT if text[:1].isdigit() else _LEFT}">{escape(text)}</{tag}>'
