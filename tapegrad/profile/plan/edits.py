"""Lines of the program as advice changes them: found by the place of a call, and written anew around it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tapegrad.profile.plan.problem import CallKey, key_of
from tapegrad.profile.plan.step import Step
from tapegrad.remat.program_files import own_name
from tapegrad.tracing.run import Run

_MOST_LINES = 3
_NOT_PYTHON = SyntaxError, ValueError, RecursionError, MemoryError
"""What ``ast`` raises for the text of a file that may come from anywhere."""


@dataclass(frozen=True)
class Edit:
    """What to write at a line of the program in place of ``old``; "" for that: above the line."""

    file: str
    line: int
    old: str
    new: str


class Sites:
    """Where the program makes the calls with these numbers of a function or a layer, in a step."""

    def __init__(self, run: Run, step: Step, key: CallKey, ordinals: Collection[int]) -> None:
        self.run, self.key = run, key
        calls = [i for i in step.sites if key_of(run, i) == key and run.calls["ordinal"][i] in ordinals]
        self.calls = calls
        stacks = Counter(run.calls["site"][i] for i in calls)
        self.known = stacks.pop(-1, 0) == 0
        """Whether all calls are the program's own, at lines that are known."""
        frames = sorted({run.stacks["frame"][s] for s in stacks})
        self.frames = [f for f in frames if not own_name(run.text(run.frames["file"][f]))]
        self.known = self.known and len(self.frames) == len(frames)

    def wrapped(self, before: str, after: str) -> list[Edit]:
        """The calls with ``before`` and ``after`` around what is called: ``before`` + ``f`` + ``after`` + ``(x)``.

        At no more than a few lines; else above the definition, as a decorator.  Nothing if neither is the program's.
        """
        if self.known and 0 < len(self.frames) <= _MOST_LINES:
            edits = [self._edit(frame, before, after) for frame in self.frames]
            if all(edit is not None for edit in edits):
                return list(dict.fromkeys(edit for edit in edits if edit is not None))
        kind, name, file, line = self.key
        if own_name(file) or not file or name.endswith("<lambda>") or kind not in ("function", "layer"):
            return []
        decorator = before.removesuffix("(") if after == ")" else f"functools.partial({before}, {after})"
        return [Edit(file, line, "", f"@{decorator}")] if after == ")" else []

    def _edit(self, frame: int, before: str, after: str) -> Edit | None:
        text = self._text(frame)
        if text is None:
            return None
        line, start, end = text
        called = _called(line[start:end].decode("utf-8", "replace"))
        if called is None:
            return None
        new = line[:start] + f"{before}{called}{after}".encode() + line[start + len(called.encode()) :]
        frames = self.run.frames
        return Edit(self.run.text(frames["file"][frame]), frames["line"][frame], _shown(line), _shown(new))

    def _text(self, frame: int) -> tuple[bytes, int, int] | None:
        """The whole line of a call, and where in it the call begins and ends, in bytes; None: it is not known."""
        frames, run = self.run.frames, self.run
        start, end = frames["column"][frame], frames["end_column"][frame]
        line = run.sources.get(run.text(frames["file"][frame]), {}).get(str(frames["line"][frame]))
        if line is None or start < 0 or end < 0 or frames["end_line"][frame] != frames["line"][frame]:
            return None
        data = line.encode()
        return (data, start, end) if start < end <= len(data) else None

    def loop(self, times: int) -> tuple[Edit, int] | None:
        """``state = f(state)`` as a loop of so many times, and the number of values in the state.

        None if the only call is not of this form.
        """
        text = self._text(self.frames[0]) if self.known and len(self.frames) == 1 else None
        if text is None:
            return None
        line = text[0].decode().strip()
        try:
            statement = ast.parse(line).body[0]
        except (*_NOT_PYTHON, IndexError):
            return None
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target, call = statement.targets[0], statement.value
        if not isinstance(call, ast.Call) or call.keywords or not call.args:
            return None
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        if [ast.unparse(t) for t in targets] != [ast.unparse(a) for a in call.args]:
            return None
        f, state = ast.unparse(call.func), ", ".join(ast.unparse(t) for t in targets)
        one = len(targets) == 1
        step, given = (f, state) if one else (f"lambda state: {f}(*state)", f"({state})")
        frames = self.run.frames
        file, number = self.run.text(frames["file"][self.frames[0]]), frames["line"][self.frames[0]]
        return Edit(file, number, line, f"{state} = tg.checkpointed_loop({step}, {given}, {times})"), len(targets)


def _called(call: str) -> str | None:
    """What the text of a call calls."""
    try:
        parsed = ast.parse(call, mode="eval").body
    except _NOT_PYTHON:
        return None
    if not isinstance(parsed, ast.Call):
        return None
    return ast.get_source_segment(call, parsed.func)


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()
