"""What the peers.py of the gallery share: results compared, times taken by turns, memory of processes of their own.

The libraries take turns with one thread each, after a warm-up; the median of the times, and of the ratios within a
round, is printed (see bench/README.md); ``--processor-time`` takes the processor's in place of the clock's.  Memory is
by how much a process of its own, in which one library does the work once, grew at its largest over what it held with
everything loaded, built and compiled (JAX compiles ahead); Linux only.
Of tapegrad, which captures functions at their first calls and keeps their arenas, it is what the fourth call takes and
the first three have kept.
"""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import common

Works = dict[str, Callable[[], Any]]
CLEAR = Path("/proc/self/clear_refs")


def compare(
    doc: str | None, works: Callable[..., Works], tolerance: float, *, rounds: int = 7, warm_up: int = 2
) -> None:
    """Run the command line of a ``peers.py``.

    ``works(tg, torch, jax, np)`` makes functions of no arguments by name, the first of them tapegrad's; a library that
    is not installed is None there.  Each gives arrays, which must agree within ``tolerance`` of the largest value.
    """
    parser = common.parser(doc, threads=1, rounds=rounds)
    parser.add_argument("--memory-of", help="do one work once, and print by how much the process grew")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of all threads, in place of the clock's, which a busy machine spoils more",
    )
    options = parser.parse_args()
    common.begin(options.threads)
    import numpy as np

    only = options.memory_of
    names = [name for name in ("torch", "jax") if only is None or name in only.lower().replace("pytorch", "torch")]
    loaded = {name: common.load(name, options.threads) if name in names else None for name in ("torch", "jax")}
    if loaded["jax"] is not None:
        loaded["jax"].config.update("jax_enable_x64", True)  # every program states its dtype
    runs = works(common.load("tapegrad", options.threads), loaded["torch"], loaded["jax"], np)
    if only is not None:
        grew = growth(runs[only], calls=3 if only.startswith("tapegrad") else 0)
        print(f"grew by {grew} bytes")
        return
    ours, *_ = found = {who: run() for who, run in runs.items()}
    for who, results in found.items():
        for i, (got, want) in enumerate(zip(results, found[ours], strict=True)):
            common.must_agree(who, f"result {i}", got, want, tolerance)
    clock = time.process_time if options.processor_time else time.perf_counter
    times = common.by_turns(runs, options.rounds, warm_up=warm_up, clock=clock)
    rows = [
        (who, f"{common.median(t) * 1e3:.1f}", f"{common.ratio(times[ours], t):.2f}", in_a_process(who))
        for who, t in times.items()
    ]
    facts = common.about(options.threads)
    common.show((doc or "").splitlines()[0], ("", "ms", "tapegrad is x faster", "grew by, MiB"), rows, facts)


def status(key: str) -> int:
    """Bytes that the kernel tells of this process."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def trimmed() -> int:
    """What the process holds; what it took and gave back is with the system again."""
    from tapegrad.device.pool import POOL

    gc.collect()
    POOL.free_all_blocks()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def growth(run: Callable[[], Any], calls: int) -> int:
    """By how many bytes this process has grown at its largest while it ran once, after so many ``calls``."""
    before = trimmed()
    for _ in range(calls):
        run()
    trimmed()
    CLEAR.write_text("5")  # forgets the largest so far
    run()
    return status("VmHWM") - before


def in_a_process(who: str) -> str:
    if not CLEAR.exists():
        return "-"
    command = [sys.executable, *sys.argv, "--memory-of", who]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"{int(said.split('grew by ')[1].split()[0]) / 2**20:.1f}"
