"""Lines of the program as advice changes them: found by the place of a call, and written anew around it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tapegrad.profile.plan.loops import Loop
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

    def loop(self, times: int) -> Edit | None:
        """``state = f(state)`` as a loop of so many times; None if the only call is not of this form."""
        text = self._text(self.frames[0]) if self.known and len(self.frames) == 1 else None
        if text is None:
            return None
        line = text[0].decode().strip()
        statement = next(iter(_parsed(line)), None)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target, call = statement.targets[0], statement.value
        if not isinstance(call, ast.Call) or call.keywords or not call.args:
            return None
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        if [ast.unparse(t) for t in targets] != [ast.unparse(a) for a in call.args]:
            return None
        frames = self.run.frames
        file, number = self.run.text(frames["file"][self.frames[0]]), frames["line"][self.frames[0]]
        return Edit(file, number, line, _loop_of(ast.unparse(call.func), [ast.unparse(t) for t in targets], times))


class Body:
    """The lines of a loop, which advice makes a function of the state."""

    def __init__(self, run: Run, step: Step, loop: Loop) -> None:
        self.times = len(loop.sites)
        frames = [run.stacks["frame"][place] for place in loop.places]
        self.lines = sorted({(run.text(run.frames["file"][f]), run.frames["line"][f]) for f in frames})
        self.file, self.first = self.lines[0]
        last = self.lines[-1][1]
        self._where = f"line {self.first}" if self.first == last else f"lines {self.first} to {last}"
        self.name = f"each of {self.times} iterations of the loop at {self._where}"
        self._own = own_name(self.file) or not self.file
        names = _carried([run.sources.get(file, {}).get(str(line), "") for file, line in self.lines])
        # a line without an operation, such as previous = u, is not in the run: then names are missing
        complete = len(names) == len(loop.state_of[-1])
        self._state = names if complete else ["state"]
        self._body = self._where if complete else f"the whole body of the loop at {self._where}"

    def wrapped(self, before: str, after: str) -> list[Edit]:
        """The body as a function with ``before`` and ``after`` around it; nothing if it is not the program's."""
        if self._own:
            return []
        state = ", ".join(self._state)
        return [self._edit(f"{state} = {before}body{after}({state})")]

    def loop(self) -> Edit | None:
        """The body as the step of ``checkpointed_loop``."""
        if self._own:
            return None
        return self._edit(_loop_of("body", self._state, self.times))

    def _edit(self, code: str) -> Edit:
        state = ", ".join(self._state)
        return Edit(self.file, self.first, "", f"{code}  # def body({state}): {self._body}; return {state}")


def _loop_of(f: str, state: list[str], times: int) -> str:
    """The code of a loop of so many calls ``state = f(state)``."""
    if len(state) == 1:
        return f"{state[0]} = tg.checkpointed_loop({f}, {state[0]}, {times})"
    values = ", ".join(state)
    return f"{values} = tg.checkpointed_loop(lambda state: {f}(*state), ({values}), {times})"


def _carried(lines: list[str]) -> list[str]:
    """The names that the lines of a loop read before they assign them; none if a line does not stand by itself."""
    free: list[str] = []
    assigned: list[str] = []
    for line in lines:
        statements = _parsed(line.strip())
        if not statements:
            return []
        for statement in statements:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            free += [n.id for n in names if isinstance(n.ctx, ast.Load) and n.id not in assigned]
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                free.append(statement.target.id)
            assigned += [n.id for n in names if isinstance(n.ctx, ast.Store)]
    return [name for name in dict.fromkeys(assigned) if name in free]


def _parsed(line: str) -> list[ast.stmt]:
    """The statements of a line; none if it is no Python by itself."""
    try:
        return ast.parse(line).body
    except _NOT_PYTHON:
        return []


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
