"""What a run file holds about the machine, the versions and the program."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psutil

import tapegrad
from tapegrad.device import current_device
from tapegrad.device.threads import get_num_threads
from tapegrad.profile.recorder.program import Program


def facts(program: Program) -> dict[str, Any]:
    """The ``meta`` of a run of ``program``, but for its outcome."""
    return {
        "tapegrad": tapegrad.__version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cupy": getattr(sys.modules.get("cupy"), "__version__", None),
        "platform": platform.platform(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "program": program.title,
        "module": program.name if program.is_module else None,
        "argv": [program.name, *program.args],
        "threads": get_num_threads(),
        "device": device_facts(),
    }


def device_facts() -> dict[str, Any]:
    """Of the default device: its name, model, memory, and where its arrays come from."""
    device = current_device()
    if device.kind == "cpu":
        return {
            "name": device.name,
            "model": _processor(),
            "total_bytes": psutil.virtual_memory().total,
            "pool": "HostPool",
        }
    with device.active():
        runtime, index = device.xp.cuda.runtime, int(device.name.partition(":")[2] or 0)
        name = runtime.getDeviceProperties(index)["name"]
        pool = type(device.xp.get_default_memory_pool()).__name__
        return {
            "name": device.name, "model": name.decode() if isinstance(name, bytes) else str(name),
            "total_bytes": int(runtime.memGetInfo()[1]), "pool": pool,
        }  # fmt: skip


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
