"""An exception at the n-th call that the package, or a program, makes or takes, whichever that is.

CPython looks for signals where a Python function begins and where a call of a C function has returned: there Ctrl-C
raises KeyboardInterrupt.
"""

from __future__ import annotations

import inspect
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tapegrad as tg

PACKAGE = str(Path(tg.__file__).parent)
BEFORE_HANDLERS = ("__exit__", "__del__")
"""At whose beginning an interrupt keeps any block from being left, or is swallowed by the interpreter."""


class Calls:
    """Counts the calls of files that begin with ``files`` while a function runs; raises ``error`` at call ``at``."""

    def __init__(self, at: int = 0, files: str = PACKAGE, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.files, self.error = at, files, error
        self.count, self.where = 0, ""

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(self.files):
            return
        if code.co_flags & inspect.CO_GENERATOR or (event == "call" and code.co_name in BEFORE_HANDLERS):
            return
        self.count += 1
        if self.count == self.at:
            self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}, {event}"
            raise self.error

    def during(self, f: Callable[[], Any]) -> None:
        """Run ``f``; its error ends here.  Where a finalizer is interrupted the interpreter goes on."""
        before, hook = sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = lambda unraisable: None
        sys.setprofile(self._note)
        try:
            f()
        except self.error:
            pass
        finally:
            sys.setprofile(before)
            sys.unraisablehook = hook


def interrupted(f: Callable[[], Any], times: int, seed: int = 0, **options: Any) -> Iterator[str]:
    """Interrupt ``f`` at ``times`` calls drawn from all of a run; yields after each where it was."""
    calls = Calls(**options)
    calls.during(f)
    for at in sorted(random.Random(seed).sample(range(1, calls.count + 1), min(times, calls.count))):
        calls = Calls(at, **options)
        calls.during(f)
        yield f"call {at}, {calls.where}"


def by_timer(step: Callable[[], Any], times: int) -> tuple[int, int]:
    """Send ``times`` interrupts while ``step`` is repeated: how many were sent, and how many ended it."""
    sent = raised = 0

    def handler(*_: Any) -> None:
        nonlocal sent
        sent += 1
        raise KeyboardInterrupt

    former, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # is told of those that a finalizer loses
    try:
        for i in range(times):
            aim = sent + 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + i * 1e-6)
                while sent < aim:
                    step()
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        sys.unraisablehook = hook
    return sent, raised
