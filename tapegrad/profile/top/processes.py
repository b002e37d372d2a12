"""Processes: what those of tapegrad have published, checked, and what psutil knows of any."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tapegrad.profile.top.publish import folder, require_ours
from tapegrad.tracing.processes import runs

MOST_BYTES = 1 << 16
"""A file of more is none of ours."""
_LARGEST = 1 << 62
_NUMBERS = ("step", "live_bytes", "peak_bytes", "reserved_bytes")


def published() -> list[dict[str, Any]]:
    """What every living process of ours says, by pid; files of dead ones are removed.  Raises OSError."""
    directory = folder()
    try:
        require_ours(directory)
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    entries = []
    for name in names:
        pid, file = name.lstrip(".").partition(".")[0], directory / name
        if not (pid.isascii() and pid.isdecimal() and 0 < int(pid[:10]) < 1 << 31 and _ours(name, pid)):
            continue
        figures = _read(file) if name.endswith(".json") else None
        if not runs(int(pid), None if figures is None else figures["updated"]):
            with suppress(OSError):
                file.unlink()
        elif figures is not None and figures["pid"] == int(pid):
            entries.append({**figures, "rss_bytes": rss(int(pid))})
    return sorted(entries, key=lambda entry: entry["pid"])


def _ours(name: str, pid: str) -> bool:
    return name in (f"{int(pid)}.json", f".{int(pid)}.part")


def _read(file: Path) -> dict[str, Any] | None:
    """The figures in a file, or None if it is not one of ours."""
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as open_file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            data = open_file.read(MOST_BYTES + 1)
        return _checked(json.loads(data)) if len(data) <= MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _checked(data: object) -> dict[str, Any] | None:
    """Known keys with values of their types; whatever else is there is left out."""
    if not isinstance(data, dict) or _whole(data.get("pid")) is None:
        return None
    categories = data.get("categories")
    named = list(categories.items())[:32] if isinstance(categories, dict) else []
    return {
        "pid": data["pid"],
        "program": _text(data.get("program")) or "?",
        "device": _text(data.get("device")) or "?",
        **{key: _whole(data.get(key)) for key in _NUMBERS},
        "categories": {_text(name): n for name, n in named if _whole(n) is not None},
        "started": _seconds(data.get("started")),
        "updated": _seconds(data.get("updated")),
    }


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _LARGEST else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _LARGEST else None


def _text(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""


def rss(pid: int) -> int | None:
    """Bytes of memory that a process has resident; None where the system does not say."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def name_of(pid: int) -> str:
    """What a process is called; nothing where the system does not say."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
