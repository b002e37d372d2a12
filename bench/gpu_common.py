"""What the GPU scripts share: a device or, for a dry run, the stand-in for CuPy; timing; facts; results.

Only :func:`begin` may be called before NumPy, tapegrad and its peers are imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

TURN = 5e-3
"""Seconds that one turn of a library takes at least, so that waiting for the device at its end does not count."""
MOST_CALLS = 200


@dataclass
class Run:
    """What is measured with, and until when."""

    options: argparse.Namespace
    tg: Any
    cupy: Any
    torch: Any
    jax: Any
    ends: float

    @property
    def dry(self) -> bool:
        return self.options.dry_run

    @property
    def where(self) -> str:
        """PyTorch's name of the device."""
        return "cpu" if self.dry else "cuda"

    def wait(self) -> None:
        """Until the device has done everything, whichever library asked for it."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def late(self) -> bool:
        """Whether the script's time is used up."""
        return time.monotonic() > self.ends


def parser(doc: str | None, *, seconds: float, rounds: int) -> argparse.ArgumentParser:
    """A command line with what every GPU script takes."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--dry-run", action="store_true", help="tiny sizes, the stand-in for CuPy: nothing is measured")
    found.add_argument("--rounds", type=int, default=rounds, help="each library runs once a round (%(default)s)")
    found.add_argument("--seconds", type=float, default=seconds, help="no part begins after that time (%(default)s)")
    found.add_argument("--peers", help="of torch, compile, jax (default: all, and in a dry run none)")
    return found


def begin(options: argparse.Namespace) -> Run:
    """Import what is there.  Ends the script where there is neither a device nor ``--dry-run``."""
    ends = time.monotonic() + options.seconds
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the memory
    sys.path.insert(0, str(common.HERE.parent))
    if options.peers is None:
        options.peers = "" if options.dry_run else "torch,compile,jax"
    if options.dry_run:
        sys.path.insert(0, str(common.HERE.parent / "tests"))
        from shim import standin

        standin.install()
        options.rounds = 1
    import tapegrad as tg
    from tapegrad.device import asdevice

    cupy = asdevice("cuda").xp  # says what is missing
    tg.set_default_device("cuda")
    wanted = options.peers.split(",")
    torch = common.load("torch", 1) if {"torch", "compile"} & set(wanted) else None
    jax = common.load("jax", 1) if "jax" in wanted else None
    # In a dry run peers that were asked for run on the CPU: what is tested is the script.
    if torch is not None and not (options.dry_run or torch.cuda.is_available()):
        print("torch: this build has no CUDA device")
        torch = None
    if jax is not None and not (options.dry_run or jax.default_backend() == "gpu"):
        print("jax: this build has no CUDA device")
        jax = None
    return Run(options, tg, cupy, torch, jax, ends)


def timed(run: Run, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of one call by library, one entry a round; libraries take turns, each round beginning with another.

    A turn is as many calls as fill ``TURN``, then a wait for the device.  All calls were made once before (compiling).
    """
    number = {}
    for name, call in calls.items():
        call()
        run.wait()
        start = time.perf_counter()
        call()
        run.wait()
        seconds = time.perf_counter() - start
        number[name] = 1 if run.dry else max(1, min(MOST_CALLS, round(TURN / max(seconds, 1e-7))))
    names, times = list(calls), {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for turn in range(run.options.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                run.wait()
                start = time.perf_counter()
                for _ in range(number[name]):
                    call = calls[name]()
                run.wait()
                times[name].append((time.perf_counter() - start) / number[name])
                del call
    finally:
        gc.enable()
    return times


def each(run: Run, part: str, cases: Iterable[Any], measure: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each case, in their order, from ``measure(case)``; an error of a case is its row.

    A line of JSON is printed as soon as a case is done, and appended to ``PART.jsonl`` in the folder that
    ``TAPEGRAD_RESULTS`` names, so a script that is killed leaves all that it has measured.  One that is started anew
    with the same folder goes on after the case in which it was killed, of which the row says so.
    """
    folder = os.environ.get("TAPEGRAD_RESULTS")
    path = None if folder is None else Path(folder) / f"{part}.jsonl"
    known = _known_rows(path)
    rows = []
    for case in cases:
        if case.name in known:
            rows.append(known[case.name])
            continue
        if run.late():
            row = {"case": case.name, "not_run": "no time left"}
        else:
            _append(path, {"case": case.name, "begun": True})
            start = time.monotonic()
            try:
                row = measure(case)
            except (Exception, SystemExit) as e:  # a disagreement ends no other case either
                row = {"case": case.name, "error": f"{type(e).__name__}: {e}"[:500]}
            row["took"] = round(time.monotonic() - start, 2)
        row["measured"] = not run.dry
        _append(path, row)
        print(json.dumps(row), flush=True)
        rows.append(row)
        run.cupy.get_default_memory_pool().free_all_blocks()
    return rows


def _known_rows(path: Path | None) -> dict[str, dict[str, Any]]:
    """The rows of an earlier process by case; that of a case which was begun and not ended says that it was killed."""
    known: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        row = json.loads(line)
        if row.get("begun"):
            row = {"case": row["case"], "error": "the process was killed in this case"}
        known[row["case"]] = row
    return {name: row for name, row in known.items() if "not_run" not in row}


def _append(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def cells_of_others(row: dict[str, Any]) -> tuple[str, str] | None:
    """What the table says of a case without figures; None if it has some."""
    if "error" in row:
        return row["case"], f"failed: {row['error'][:100]}"
    return (row["case"], f"not run: {row['not_run']}") if "not_run" in row else None


def end(rows: list[dict[str, Any]]) -> None:
    """End the script, with status 1 if a case has failed."""
    failed = [row["case"] for row in rows if "error" in row]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def host(x: Any) -> Any:
    """A NumPy array of any library's array."""
    import numpy as np

    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() and x.element_size() == 2 else x  # NumPy has no bfloat16 of its own
    for method in ("numpy", "get"):
        if hasattr(x, method):
            return np.asarray(getattr(x, method)())
    return np.asarray(x)


def about(run: Run) -> dict[str, Any]:
    """Device, driver, versions and commit."""
    runtime = run.cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    name = properties["name"]
    facts = common.about(1)
    facts["versions"]["cupy"] = run.cupy.__version__
    if run.torch is not None and run.torch.backends.cudnn.is_available():
        facts["versions"]["cudnn"] = str(run.torch.backends.cudnn.version())
    facts["cudnn_of_tapegrad"] = _cudnn()
    return {
        "measured": not run.dry,
        "device": name.decode() if isinstance(name, bytes) else name,
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory": properties["totalGlobalMem"],
        "driver": driver(),
        "cuda_of_driver": runtime.driverGetVersion(),
        "cuda_of_runtime": runtime.runtimeGetVersion(),
        **facts,
    }


def _cudnn() -> str:
    """Whether tapegrad convolves by cuDNN, and by which."""
    from tapegrad.device import asdevice, cudnn

    return cudnn.said(asdevice("cuda"))


def driver() -> str | None:
    """The driver's version, of nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None


def deliver(run: Run, name: str, title: str, columns: list[str], cells: list[Any], rows: Any, **more: Any) -> None:
    """The table, and the same as JSON: to ``bench/results/`` if it was measured, to the terminal's end if not."""
    facts = about(run)
    common.show(title, columns, cells, facts)
    print(f"{facts['device']}, driver {facts['driver']}, measured: {facts['measured']}")
    if run.dry:
        json.dumps({**facts, "rows": rows, **more})  # it could have been written
        print("dry run: these are no figures of a GPU, and they are not kept")
    else:
        common.write(name, facts, rows, rounds=run.options.rounds, **more)
