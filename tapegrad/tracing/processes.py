"""Processes of this machine."""

from __future__ import annotations

import psutil


def runs(pid: int, seen: float | None) -> bool:
    """Return whether a process runs that ran at the time ``seen`` (None: any): pids are used again."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and nobody has asked how
            return False
        return process.is_running() and (seen is None or process.create_time() <= seen + 2)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
