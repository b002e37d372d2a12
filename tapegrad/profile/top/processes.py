"""Processes: what those of tapegrad have published, checked, and what the system knows of any."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tapegrad.profile.top.publish import folder, require_ours

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
        said = _read(file) if name.endswith(".json") else None
        if not _alive(int(pid), said):
            with suppress(OSError):
                file.unlink()
        elif said is not None and said["pid"] == int(pid):
            entries.append({**said, "rss_bytes": rss(int(pid))})
    return sorted(entries, key=lambda one: one["pid"])


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


def _alive(pid: int, said: dict[str, Any] | None) -> bool:
    """Whether the process that wrote the file still runs."""
    if os.name == "nt":  # os.kill would end it there
        return said is not None and said["updated"] is not None and time.time() - said["updated"] < 60
    return runs(pid, None if said is None else said["updated"])


def runs(pid: int, seen: float | None) -> bool:
    """Whether a process runs that did at the time ``seen`` (None: any): another may have its number by now."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):  # gone, or another user's
        return False
    began = _began(pid)
    return seen is None or began is None or began <= seen + 2


def _began(pid: int) -> float | None:
    """When a process began, in seconds since 1970; None where /proc does not say."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def rss(pid: int) -> int | None:
    """Bytes of memory that a process has resident; None where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def name_of(pid: int) -> str:
    """What a process is called; nothing where the system does not say."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu() -> dict[str, int | None]:
    """Bytes of this machine's memory: ``total_bytes``, and ``available_bytes`` without swapping."""
    lines: dict[str, str] = {}
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    except OSError:
        pass
    sizes = {key: int(lines[key].split()[0]) * 1024 if key in lines else None for key in ("MemTotal", "MemAvailable")}
    total = sizes["MemTotal"]
    if total is None and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"total_bytes": total, "available_bytes": sizes["MemAvailable"]}
