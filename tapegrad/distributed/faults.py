"""Faults: one process that fails ends all of them, with its message, within seconds.

MPI alone does not: at the end of a process it waits for all others, who wait for that one.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from tapegrad.distributed.waiting import Home

INTERRUPTED = 130
_FOR_OUTPUT = 0.2
"""Seconds in which the launcher passes on what was printed: it does not once it ends the processes."""


class Labelled(io.TextIOBase):
    """A stream of text whose every line begins with a rank's number; lines of several ranks do not mix."""

    def __init__(self, stream: Any, rank: int) -> None:
        self._stream, self._label, self._begun = stream, f"[rank {rank}] ", ""

    def write(self, text: str, /) -> int:
        """Whole lines only; the rest waits for more, or for :meth:`flush`."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._label}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Write what has begun, too, as a line."""
        if self._begun:
            self.write("\n")
        self._stream.flush()

    def fileno(self) -> int:
        """The stream's."""
        number: int = self._stream.fileno()
        return number


class _Exit(SystemExit):
    """What ``sys.exit`` raises.  If nobody catches it, it is freed when no Python code runs any more."""

    ends_with = 0

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            _Exit.ends_with = status(self.code)


def _exit(code: Any = None, /) -> NoReturn:
    raise _Exit(code)


def status(code: object) -> int:
    """The exit status that Python gives a program for the ``code`` of its SystemExit."""
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def install(home: Home) -> None:
    """From now on an exception that nobody catches, in any thread, ends all processes; so does leaving too early."""
    pid = os.getpid()  # of this process: one that is forked from it is no rank

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            traceback.print_exception(kind, error, trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        end(home, text, INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    def failed_in_thread(args: Any) -> None:
        if args.exc_type is not SystemExit:
            failed(args.exc_type, args.exc_value, args.exc_traceback)

    def leave() -> None:
        if os.getpid() != pid:
            return
        if _Exit.ends_with:
            end(home, f"sys.exit: the program ends with status {_Exit.ends_with}, and so all ranks do", _Exit.ends_with)
        if getattr(sys, "last_value", None) is not None:  # printed by a hook that the program has set after ours
            end(home, "an exception has ended the program, and so it ends all ranks", 1)
        home.leave()

    sys.excepthook, threading.excepthook = failed, failed_in_thread
    sys.exit = _exit
    atexit.register(leave)


def end(home: Home, text: str, code: int) -> NoReturn:
    """End all ranks with a status, and say why."""
    sys.stdout.flush()
    errors = sys.stderr if isinstance(sys.stderr, Labelled) else Labelled(sys.stderr, home.rank)
    errors.flush()
    errors.write(text.rstrip("\n") + "\n")
    errors.flush()
    time.sleep(_FOR_OUTPUT)
    home.engine.abort(code)
    os._exit(code)  # some MPIs come back, and end this process a moment later
