"""What the scripts of bench/ share: threads, timing by turns, tables, JSON.

Only this module may be imported before :func:`begin`: thread counts must be set before any numerical library loads, so
the scripts import NumPy, tapegrad and its peers inside their functions.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "TAPEGRAD_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip
_DISTRIBUTIONS = ("numpy", "scipy", "autograd", "torch", "jax", "tensorflow-cpu", "tensorflow")


def parser(doc: str | None, *, threads: int, rounds: int) -> argparse.ArgumentParser:
    """A command line with what every script takes; ``doc`` is the module's docstring, shown by --help."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--threads", type=int, default=threads, help="of every library (default: %(default)s)")
    found.add_argument(
        "--rounds", type=int, default=rounds, help="each library runs once a round (default: %(default)s)"
    )
    found.add_argument("--json", action="store_true", help="also write the rows to bench/results/")
    return found


def begin(threads: int) -> None:
    """Give every library ``threads`` threads.  Call it before any of them is imported.

    JAX has no setting of its own: it starts as many threads as the process has cores, so the process is bound to cores.
    """
    sys.path.insert(0, str(HERE.parent))  # what is measured is this checkout, whose commit is reported
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < threads:
            raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores")
        os.sched_setaffinity(0, cores[:threads])


def load(name: str, threads: int) -> Any:
    """The library ``name`` with its thread count set, or None where it is not installed."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name in ("torch", "tapegrad"):
        module.set_num_threads(threads)
    elif name == "tensorflow":
        module.config.threading.set_intra_op_parallelism_threads(threads)
        module.config.threading.set_inter_op_parallelism_threads(1)
    return module


def by_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, *, warm_up: int = 3, number: int = 1, pause: float = 0.0,
    prepare: Callable[[str], Any] | None = None, clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of one call, for each name a list with one entry a round (the mean of ``number`` calls).

    All take their turn within a round, each round beginning with another, so that a busy machine slows all alike.
    The results of a call are dropped inside the measured time.  ``pause``: seconds of sleep before each turn, in which
    worker threads of the library that had the last one stop spinning.  ``prepare(name)`` is called, untimed, before it.
    ``clock``: what tells seconds; ``time.thread_time`` leaves out the time in which a busy machine does other things.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            call = calls[name]
            if prepare is not None:
                prepare(name)
            gc.collect()
            gc.disable()
            try:
                if pause:
                    time.sleep(pause)
                start = clock()
                for _ in range(number):
                    call()
                seconds = (clock() - start) / number
            finally:
                gc.enable()
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster than ``theirs`` we are: the median of the ratios within a round."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def best_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of the fastest rounds: what is left when nothing else disturbs the machine."""
    return min(theirs) / min(ours)


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The middle half of those ratios."""
    found = sorted(t / o for o, t in zip(ours, theirs, strict=True))
    return found[len(found) // 4], found[-1 - len(found) // 4]


def worst_difference(got: Any, want: Any, floor: float = 0.0) -> float:
    """The largest difference over the largest value of ``want`` (or ``floor``); infinite for a NaN or another shape."""
    import numpy as np

    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return float("inf")
    difference = np.abs(got - want).max() / max(np.abs(want).max(), floor, np.finfo(np.float64).tiny)
    return float(difference) if np.isfinite(difference) else float("inf")


class Disagreement(SystemExit):
    """Results of two libraries differ: ends the script, unless it goes on with the others."""


def must_agree(who: str, what: str, got: Any, want: Any, tolerance: float, floor: float = 0.0) -> float:
    """Return ``worst_difference``.  Raises Disagreement if it is above ``tolerance``."""
    worst = worst_difference(got, want, floor)
    if worst > tolerance:
        raise Disagreement(f"{who}: {what} differs by {worst:.2e} of its largest value; tolerance {tolerance:.0e}")
    return worst


def about(threads: int) -> dict[str, Any]:
    """Machine, versions and commit."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name.removesuffix("-cpu")] = version(name)
        except PackageNotFoundError:
            pass
    import tapegrad

    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "tapegrad": tapegrad.__version__,
        "commit": _commit(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit measured, with "+" where the working tree differs from it."""
    try:
        run = lambda *words: subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        )
        changed = run("status", "--porcelain", "--untracked-files=no").stdout.strip()
        return run("rev-parse", "--short", "HEAD").stdout.strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], facts: dict[str, Any]) -> None:
    """Print a table with the machine under it; the first column is text, the others are aligned right."""
    lines = [
        list(columns),
        *[["" if c is None else str(c) for c in row] + [""] * (len(columns) - len(row)) for row in rows],
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}\n")
    for number, line in enumerate(lines):
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip())
        if number == 0:
            print("  ".join("-" * w for w in widths))
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    print(
        f"\n{facts['machine']}, {facts['cores']} cores, {facts['threads']} used, load {facts['load']}; "
        f"tapegrad {facts['tapegrad']} ({facts['commit']}), Python {facts['python']}, {versions}"
    )


def write(name: str, facts: dict[str, Any], rows: Any, **settings: Any) -> None:
    """Write ``results/NAME-TIME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {"bench": name, "settings": settings, **facts, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path.relative_to(HERE.parent)}")
