"""Where things were made, as stacks of frames from the outermost to the innermost."""

from __future__ import annotations

from tapegrad.tracing.run import Run

Frame = tuple[str, int, str]
"""File, line and function."""


class Stacks:
    """The stacks of a run; where only the innermost frame was recorded, the calls around it stand for the others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: dict[tuple[int, int], tuple[Frame, ...]] = {}

    def of(self, stack: int, call: int) -> tuple[Frame, ...]:
        """The frames of what was made at ``stack`` in ``call`` (-1: not known)."""
        key = (stack, call)
        if key not in self._found:
            frames = self._recorded(stack)
            self._found[key] = frames if len(frames) > 1 else (*self._calls(call, frames), *frames)
        return self._found[key]

    def _recorded(self, stack: int) -> tuple[Frame, ...]:
        frames: list[Frame] = []
        while stack >= 0:
            frames.append(self._run.frame_of(stack))
            stack = self._run.stacks["parent"][stack]
        return tuple(reversed(frames))

    def _calls(self, call: int, innermost: tuple[Frame, ...]) -> tuple[Frame, ...]:
        calls, frames = self._run.calls, []
        while call >= 0:
            file, name = self._run.text(calls["file"][call]), self._run.text(calls["name"][call])
            frames.append((file, calls["line"][call], name))
            call = calls["parent"][call]
        if frames and innermost and frames[0][0] == innermost[0][0] and frames[0][2] == innermost[0][2]:
            del frames[0]  # the same function, by its definition
        return tuple(reversed(frames))
