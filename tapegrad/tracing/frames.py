"""Where the program is, at which place and in which calls: found by looking at the stack, not by touching the program.

Each frame of the program under which an operation runs gets a number, that of its call.  A frame is known again by a
mark on it: ``f_trace_opcodes``, which a frame object carries for as long as it lives and which means nothing unless
the program is traced.  So a look costs only as many steps as there are frames up to the next known one.
"""

from __future__ import annotations

import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from os.path import dirname, join
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, NamedTuple

from tapegrad.core.state import thread
from tapegrad.tracing.phase import FORWARD, STEPS, phase

_HERE = join(dirname(dirname(__file__)), "")
_OURS_BUT_A_PROGRAM = join(_HERE, "profile", "demo")
_LIBRARY = tuple({join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_TRANSPARENT = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}

# Places: where something was made.


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


class NamedPlace(NamedTuple):
    """A place as a file keeps it: the call's line and columns (in bytes of UTF-8; -1: not known), the calling place."""

    file: str
    line: int
    function: str
    parent: int
    end_line: int
    column: int
    end_column: int


def named(code: CodeType, at: int, parent: int) -> NamedPlace:
    """An instruction as a place of a file."""
    _, *span = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    end_line, column, end_column = (-1 if n is None else n for n in span)
    return NamedPlace(
        code.co_filename, instruction_line(code, at), code.co_qualname, parent, end_line, column, end_column
    )


def by_line(places: dict[Place, int]) -> dict[str, int]:
    """Bytes by line, the most first, from bytes by place."""
    lines: Counter[str] = Counter()
    for place, nbytes in places.items():
        lines[line_of(place)] += nbytes
    return {line: n for line, n in lines.most_common() if n}


class _Ours(dict[str, bool]):
    """Whether a file is this package's, by its name."""

    def __missing__(self, name: str) -> bool:
        found = self[name] = name.startswith(_HERE)
        return found


_ours = _Ours()
_MOST_KNOWN = 4096


class Instructions:
    """Those of one code that were seen, by their offset."""

    __slots__ = ("code", "seen")

    def __init__(self, code: CodeType | None) -> None:
        self.code = code
        self.seen: dict[int, Instruction] = {}


NONE_SEEN = Instructions(None)
known: dict[int, Instructions] = {}
"""Instructions of the user's, by the id of their code, which they keep alive."""


def user_place(inside: int = 1) -> Place:
    """The innermost instruction outside this package, to which the caller and ``inside`` - 1 of its callers belong."""
    frame: Any = _getframe(inside + 1)
    try:
        while _ours[frame.f_code.co_filename]:
            frame = frame.f_back
    except AttributeError:  # there is no frame outside
        return "(unknown)"
    code = frame.f_code
    of_code = known.get(id(code))
    if of_code is None:
        if len(known) >= _MOST_KNOWN:
            forget_places()
        of_code = known[id(code)] = Instructions(code)
    place = of_code.seen.get(frame.f_lasti)
    if place is None:
        place = of_code.seen[frame.f_lasti] = Instruction(code, frame.f_lasti)
    return place


def forget_places() -> None:
    """Hold no code of the user's any more."""
    known.clear()
    _ours.clear()


# Calls.

FUNCTION, LAYER, CHECKPOINT, SCOPE = range(4)
"""Kinds of calls."""

_of_program: dict[str, bool] = {}


def is_program(filename: str) -> bool:
    """Whether code of that file is the user's: neither this package nor Python's own library."""
    known = _of_program.get(filename)
    if known is None:
        ours = filename.startswith(_HERE) and not filename.startswith(_OURS_BUT_A_PROGRAM)
        library = filename.startswith(_LIBRARY) and "site-packages" not in filename
        known = _of_program[filename] = not (ours or library or filename.startswith("<frozen"))
    return known


Description = tuple[int, str, CodeType | None]
"""Of a call: its kind, its name, and the code of what it calls."""
SPECIAL: dict[int, tuple[CodeType, Callable[[FrameType], Description]]] = {}
"""By the id of their code, frames of this package's that count as calls, and what describes such a call."""


def counts_as_call(f: Callable[..., Any], described: Callable[[FrameType], Description]) -> None:
    """Frames of the function ``f``, which is this package's, are calls that ``described`` describes."""
    SPECIAL[id(f.__code__)] = f.__code__, described


class Call:
    """One call during which operations ran."""

    __slots__ = ("code", "file", "first", "kind", "line", "name", "ordinal", "parent", "phase", "site")
    phase: int

    def __init__(
        self, kind: int, name: str, file: str, line: int, parent: int, code: CodeType | None, site: int = -1
    ) -> None:
        self.kind, self.name, self.file, self.line, self.parent, self.code = kind, name, file, line, parent, code
        self.site = site
        """The place of the program's that makes it (-1: another's, or not asked for)."""
        self.ordinal = 0
        self.first = -1

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What it is a call of."""
        return self.kind, self.name, self.file, self.line


class Frames:
    """The calls and places seen so far.

    ``stacks``: "line" (innermost places alone), "full" or "none".  ``began`` is told of every call that begins.
    """

    def __init__(self, stacks: str, began: Callable[[Call], None] = lambda call: None) -> None:
        self.calls: list[Call | None] = []
        """By number; None: forgotten."""
        self.places: list[tuple[CodeType, int, int]] = []
        """Code, instruction, and number of the calling place (-1: not asked for)."""
        self._full = stacks == "full"
        self._lines = stacks != "none"
        self._began = began
        self._call_of: dict[int, int] = {}
        self._place_of: dict[tuple[int, int, int], int] = {}
        self._leaving: set[int] = set()
        """Calls to be forgotten as soon as no frame has their number."""
        self._numbers: dict[tuple[int, int], Ordinals] = {}  # by thread and phase
        _looking.add(self)

    def look(self, frame: FrameType | None) -> tuple[int, int]:
        """The numbers of the place and of the call that ``frame`` is in (-1: none)."""
        place, call, known = -1, -1, False
        new: list[FrameType] = []
        chain: list[FrameType] = []
        special, program, call_of = SPECIAL, _of_program, self._call_of
        while frame is not None:
            code = frame.f_code
            mine = program.get(code.co_filename)
            if mine is None:
                mine = is_program(code.co_filename)
            if mine or id(code) in special:
                if not known:
                    number = call_of.get(id(frame)) if frame.f_trace_opcodes else None
                    if number is None:
                        new.append(frame)
                    else:
                        known, call = True, number
                if mine:
                    chain.append(frame)
                    if not self._full and known or code.co_name == "<module>":
                        break
            frame = frame.f_back
        if self._lines:
            for f in reversed(chain if self._full else chain[:1]):
                place = self._place(f, place)
        for f in reversed(new):
            call = self._enter(f, call)
        return place, call

    def _place(self, frame: FrameType, parent: int) -> int:
        code = frame.f_code
        key = (id(code), frame.f_lasti, parent)
        number = self._place_of.get(key)
        if number is None:
            number = self._place_of[key] = len(self.places)
            self.places.append((code, frame.f_lasti, parent))  # which keeps the code, and so its id
        return number

    def _enter(self, frame: FrameType, parent: int) -> int:
        if not frame.f_trace_opcodes:
            frame.f_trace_opcodes = True
            for other in list(_looking):  # what they know by this id is a frame that is gone
                other._call_of.pop(id(frame), None)
        number = self._call_of[id(frame)] = self._numbered(frame, parent)
        return number

    def _numbered(self, frame: FrameType, parent: int) -> int:
        code = frame.f_code
        if id(code) in SPECIAL:
            kind, name, inner = SPECIAL[id(code)][1](frame)
            file, line = (inner.co_filename, inner.co_firstlineno) if inner is not None else ("", 0)
            return self.begin(Call(kind, name, file, line, parent, inner if kind == LAYER else None, self._site(frame)))
        if code.co_name == "<module>":
            return -1
        outer = self.calls[parent] if parent >= 0 else None
        if code.co_name in _TRANSPARENT or (outer is not None and outer.code is code):
            return parent  # what a layer's ``call`` does is what the layer does
        site = self._site(frame)
        return self.begin(Call(FUNCTION, code.co_qualname, code.co_filename, code.co_firstlineno, parent, None, site))

    def _site(self, frame: FrameType) -> int:
        outer = frame.f_back
        return (
            self._place(outer, -1) if self._lines and outer is not None and is_program(outer.f_code.co_filename) else -1
        )

    def forget(self, numbers: Iterable[int]) -> set[int]:
        """Forget calls, but for those under way and those that they are in; return the calls that are forgotten."""
        needed = set(self._call_of.values())
        for number in sorted(needed, reverse=True):
            call = self.calls[number] if number >= 0 else None
            while call is not None and call.parent not in needed:
                needed.add(call.parent)
                call = self.calls[call.parent] if call.parent >= 0 else None
        leaving = self._leaving.union(numbers)
        for number in leaving - needed:
            self.calls[number] = None
        self._leaving = leaving & needed
        return leaving - needed

    def scope(self, name: str, frame: FrameType) -> Callable[[], None]:
        """From now on what ``frame`` does is done in a call of its own; the result, when called, ends that."""
        _, parent = self.look(frame)
        before = self._call_of.get(id(frame), -1)
        frame.f_trace_opcodes = True
        code = frame.f_code
        self._call_of[id(frame)] = self.begin(Call(SCOPE, name, code.co_filename, frame.f_lineno, parent, None))

        def end() -> None:
            self._call_of[id(frame)] = before

        return end

    def begin(self, call: Call) -> int:
        """The number of a call that begins now."""
        call.phase = phase()
        where = threading.get_ident(), call.phase
        if where not in self._numbers:
            self._numbers[where] = Ordinals(by_step=call.phase != FORWARD)
        call.ordinal = self._numbers[where].next(call.key)
        self.calls.append(call)
        self._began(call)
        return len(self.calls) - 1


_looking: weakref.WeakSet[Frames] = weakref.WeakSet()


def program_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the program's that ``frame`` is in; ``frame`` itself where there is none."""
    outer: FrameType | None = frame
    while outer is not None and not is_program(outer.f_code.co_filename):
        outer = outer.f_back
    return outer or frame


def code_of(f: Any) -> CodeType | None:
    """The code of a function, behind its wrappers."""
    while hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    return getattr(f, "__code__", None)


def caller(depth: int) -> FrameType:
    """The frame ``depth`` calls above the caller's."""
    return _getframe(depth + 1)


# Numbers of calls: the how-many-th call of a function it is in its step, so that a plan can name single calls.
#
# Profiles count with it, and plans that are applied: so both number the same calls alike.


class Ordinals:
    """Counts calls, by key, from 0; anew in every step, and under every new outermost tape; for one thread.

    ``by_step``: anew in every step alone, as calls of reruns are, which have tapes of their own.
    """

    def __init__(self, by_step: bool = False) -> None:
        self._by_step = by_step
        self._seen: Counter[Hashable] = Counter()
        self._step = -1
        self._tape: Any = lambda: None

    def next(self, key: Hashable) -> int:
        """The number of the call of ``key`` that begins now."""
        tape = None if self._by_step else _outermost()
        if self._step != STEPS.count or self._tape() is not tape:
            self._seen.clear()
            self._step = STEPS.count
            self._tape = weakref.ref(tape) if tape is not None else lambda: None
        number = self._seen[key]
        self._seen[key] += 1
        return number


def _outermost() -> Any:
    """The outermost recorder; in a checkpoint, whose look-out hides the tapes outside, the outermost of those."""
    recorders = thread.recorders or thread.hidden
    while recorders:
        recorder = recorders[0]
        recorders = getattr(recorder, "hides", ())
        if not recorders:
            return recorder
    return None
