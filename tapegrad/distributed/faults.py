"""Faults: one process that fails ends all of them, with its message, within seconds.

MPI alone does not: at the end of a process it waits for all others, who wait for that one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from tapegrad.distributed.waiting import Home


def install(home: Home) -> None:
    """From now on an exception that nobody catches, in any thread, ends all processes; so does leaving too early."""
    pid = os.getpid()  # of this process: one that is forked from it is no rank

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            traceback.print_exception(kind, error, trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        told = "".join(f"[rank {home.rank}] {line}\n" for line in text.splitlines())
        sys.stdout.flush()
        sys.stderr.write(told)
        sys.stderr.flush()
        home.engine.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def failed_in_thread(args: Any) -> None:
        if args.exc_type is not SystemExit:
            failed(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = failed
    threading.excepthook = failed_in_thread

    def leave() -> None:
        if os.getpid() == pid:
            home.leave()

    atexit.register(leave)
