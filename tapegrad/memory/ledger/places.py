"""Places in the user's program: where something was made."""

from __future__ import annotations

import sys
from collections import Counter
from os.path import dirname, join
from types import CodeType, FrameType

_HERE = join(dirname(dirname(dirname(__file__))), "")


class Instruction:
    """An instruction of the user's program: there is one object for each, since the hash of a code takes long."""

    __slots__ = ("at", "code")

    def __init__(self, code: CodeType, at: int) -> None:
        self.code = code
        self.at = at


Place = Instruction | str
"""Where something was made: an instruction, or a note in brackets."""


def line_of(place: Place) -> str:
    """``file:line``."""
    if isinstance(place, str):
        return place
    return f"{place.code.co_filename}:{instruction_line(place.code, place.at)}"


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
"""By file name: whether it is this package's."""
_MOST_KNOWN = 4096
_known: dict[tuple[int, int], Instruction] = {}
"""By the id of its code, which the instruction keeps alive, and its offset."""


def user_place(inside: int = 1) -> Place:
    """The innermost instruction outside this package, to which the caller and ``inside`` - 1 of its callers belong."""
    frame: FrameType | None = sys._getframe(inside + 1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        ours = _inside.get(name)
        if ours is None:
            ours = _inside[name] = name.startswith(_HERE)
        if not ours:
            key = id(code), frame.f_lasti
            place = _known.get(key)
            if place is None:
                if len(_known) >= _MOST_KNOWN:
                    forget_places()
                place = _known[key] = Instruction(code, frame.f_lasti)
            return place
        frame = frame.f_back
    return "(unknown)"


def forget_places() -> None:
    """Hold no code of the user's any more."""
    _known.clear()
