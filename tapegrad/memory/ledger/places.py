"""Places in the user's program: where something was made."""

from __future__ import annotations

import sys
from collections import Counter
from os.path import dirname, join
from types import CodeType, FrameType

_HERE = join(dirname(dirname(dirname(__file__))), "")
Place = tuple[CodeType, int] | str
"""Where something was made: an instruction of the user's program, or a note in brackets."""


def line_of(place: Place) -> str:
    """``file:line``."""
    if isinstance(place, str):
        return place
    code, at = place
    return f"{code.co_filename}:{instruction_line(code, at)}"


def instruction_line(code: CodeType, at: int) -> int:
    """The line of an instruction."""
    line = next((line for start, end, line in code.co_lines() if start <= at < end), None)
    return line or code.co_firstlineno


def by_line(places: dict[Place, int]) -> dict[str, int]:
    """Bytes by line, the most first, from bytes by place."""
    lines: Counter[str] = Counter()
    for place, nbytes in places.items():
        lines[line_of(place)] += nbytes
    return {line: n for line, n in lines.most_common() if n}


_inside: dict[str, bool] = {}
"""By file name: a code object's hash is computed from all its parts, each time."""


def user_place() -> Place:
    """The innermost instruction outside this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        inside = _inside.get(name)
        if inside is None:
            inside = _inside[name] = name.startswith(_HERE)
        if not inside:
            return code, frame.f_lasti
        frame = frame.f_back
    return "(unknown)"
