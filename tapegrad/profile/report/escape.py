"""What a terminal can show: text from a run, whose names may hold any character."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

# Control characters, marks that reorder text, surrogates, private and unassigned ones, line separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def shown(text: str, encoding: str = "utf-8") -> str:
    """``text`` with every character that controls a terminal, or that ``encoding`` lacks, as its escape (``\\x1b``)."""
    if text.isascii() and text.isprintable():
        return text
    safe = "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in text)
    try:
        return safe.encode(encoding, "backslashreplace").decode(encoding)
    except (LookupError, UnicodeError):  # an encoding that Python does not know
        return safe.encode("ascii", "backslashreplace").decode("ascii")


def _escaped(c: str) -> str:
    return c.encode("ascii", "backslashreplace").decode("ascii") if ord(c) > 127 else f"\\x{ord(c):02x}"


def plain(encoding: str) -> bool:
    """Whether a terminal of this encoding lacks the characters that charts are drawn with."""
    try:
        "▁█▏…─│┤└↓×".encode(encoding)
    except (LookupError, UnicodeError):
        return True
    return False


def clip(text: str, width: int, dots: str = "…", keep_end: bool = False) -> str:
    """``text`` in at most ``width`` terminal cells; ``dots`` stand for what was left out, at the end or the start."""
    if cell_len(text) <= width:
        return text
    room = width - len(dots)
    if room <= 0:
        return dots[:width]
    kept = ""
    for c in reversed(text) if keep_end else text:
        if cell_len(kept + c) > room:
            break
        kept += c
    return dots + kept[::-1] if keep_end else kept + dots
