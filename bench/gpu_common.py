"""What the GPU scripts share: a device or, for a dry run, the stand-in for CuPy; timing; facts; results.

    python bench/gpu_common.py DIR              # the table of everything in DIR
    python bench/gpu_common.py --facts DIR      # write DIR/facts.json: device, driver, versions, commit

A script's results are ``DIR/PART.jsonl``, one line a case, written as soon as the case has ended: with its seconds or
its error.  The cases run in a child process.  If a case ends or hangs that process, or leaves CUDA unusable, another
process runs the remaining cases.  The exit status is 1 if any case failed.

Only :func:`begin` may be called before NumPy, tapegrad and its peers are imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import common

TURN = 5e-3
"""Seconds that one turn of a library takes at least, so that waiting for the device at its end does not count."""
MOST_CALLS = 200
CASE_SECONDS = 20
"""A case that takes longer is stopped, since a kernel may hang; three times that where something slow compiles."""
GRACE = 3
"""Seconds after the script's time in which the last case may end."""
RESTART = 75
"""The exit status of a process that leaves the remaining cases to a new one: CUDA is unusable, or each has its own."""


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
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, the stand-in for CuPy: nothing is measured")
    parser.add_argument("--rounds", type=int, default=rounds, help="each library runs once a round (%(default)s)")
    parser.add_argument("--seconds", type=float, default=seconds, help="no part begins after that time (%(default)s)")
    parser.add_argument("--peers", help="of torch, compile, jax (default: all, and in a dry run none)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=os.environ.get("TAPEGRAD_RESULTS"),
                       help="folder of the results (default: $TAPEGRAD_RESULTS, else a new one in bench/results; a dry "
                       "run keeps nothing without it)")  # fmt: skip
    parser.add_argument("--part", help="name of the file of results (default: the script's)")
    parser.add_argument("--child", type=float, metavar="END", help=argparse.SUPPRESS)
    return parser


def begin(options: argparse.Namespace) -> Run:
    """Import what is there.  Ends the script where there is neither a device nor ``--dry-run``."""
    ends = time.monotonic() + options.seconds if options.child is None else options.child
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the memory
    sys.path.insert(0, str(common.HERE.parent))
    if options.peers is None:
        options.peers = "" if options.dry_run else "torch,compile,jax"
    if options.dry_run:
        sys.path.insert(0, str(common.HERE.parent / "tests"))
        from shim import standin
        from shim.standin import libcudnn

        standin.install()
        libcudnn.offer()
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


_LIBRARIES = (
    "cupy-cuda12x", "cupy-cuda13x", "ml-dtypes", "triton", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin",
    "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of what is installed for CUDA."""
    installed = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def about(run: Run) -> dict[str, Any]:
    """Device, driver, versions and commit."""
    runtime = run.cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    name = properties["name"]
    facts = common.about(1)
    if run.torch is not None and run.torch.backends.cudnn.is_available():
        facts["versions"]["cudnn"] = str(run.torch.backends.cudnn.version())
    facts["cudnn_of_tapegrad"] = _cudnn()
    facts["versions"] |= {"cupy": run.cupy.__version__, **versions()}
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Report:
    """The rows of a part by case, each written as soon as its case has ended."""

    def __init__(self, run: Run, path: Path, isolated: bool = False) -> None:
        self._run, self._path, self._isolated = run, path, isolated
        self.rows = {row["case"]: row for row in _read(path)}

    def case(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row of a case: the one there is, else what ``measure`` returns, or its error."""
        if name in self.rows:
            return self.rows[name]
        if self._run.late():
            return self._add({"case": name, "not_run": "no time left"})
        self._path.with_suffix(".running").write_text(name)
        start = time.monotonic()
        try:
            row = measure()
        except (Exception, SystemExit) as e:
            row = {"error": message(e)}
        row = self._add({"case": name, **row, "wall_seconds": round(time.monotonic() - start, 2)})
        self._path.with_suffix(".running").unlink()
        try:
            gc.collect()
            self._run.wait()
            self._run.cupy.get_default_memory_pool().free_all_blocks()
        except Exception:  # CUDA is unusable in this process
            sys.exit(RESTART)
        if self._isolated:
            sys.exit(RESTART)
        return row

    def _add(self, row: dict[str, Any]) -> dict[str, Any]:
        _append(self._path, row)
        print(line(row, not self._run.dry), flush=True)
        self.rows[row["case"]] = row
        return row


def message(e: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(e).__name__}: {e}".replace("\n", " ")[:300]


def measured(run: Run, makers: dict[str, Callable[[], Callable[[], Any]]]) -> dict[str, Any]:
    """Return seconds and errors by library.  A maker checks the results of its library and returns the call to time.

    Errors of peers (a missing compiler, too little memory) fail no case; a Disagreement does.
    """
    calls, row = {}, {"failed": {}, "differs": {}}
    for who, make in makers.items():
        try:
            calls[who] = make()
        except common.Disagreement as e:
            row["differs"][who] = str(e)
        except (Exception, SystemExit) as e:
            row["failed"][who] = message(e)
            if who in OURS:
                row.setdefault("error", f"{who}: {message(e)}")
    try:
        times = timed(run, calls)
    except Exception as e:
        row.setdefault("error", message(e))
        times = {}
    row["seconds"] = {who: common.median(t) for who, t in times.items()}
    ours = times.get("tapegrad")
    row["times_faster"] = {who: common.ratio(ours, t) for who, t in times.items() if ours and who != "tapegrad"}
    return row


OURS = ("tapegrad", "function", "own kernels")
"""tapegrad eager, by ``tg.function``, and its convolutions without cuDNN."""


def line(row: dict[str, Any], is_measured: bool) -> str:
    """Return a row as text, without the numbers of a dry run."""
    parts = []
    seconds = row.get("seconds", {})
    if not is_measured:
        parts += [f"{', '.join(seconds)}: not measured"] if seconds else []
    else:
        for who, s in seconds.items():
            shares = [f"{row[key][who]:.0%} {key.replace('_', ' ')}" for key in ("of_copy", "of_products")
                      if who in row.get(key, ()) and who in OURS]  # fmt: skip
            ratio = [f"x{row['times_faster'][who]:.2f}"] if who in row.get("times_faster", ()) else []
            parts.append(" ".join([who, f"{s * 1e6:.0f} us", *ratio, *shares]))
        parts += [f"{key} {row[key]:.4g}" for key in ("rate",) if key in row]
    parts += [f"{key}: {row[key]}" for key in ("error", "not_run") if key in row]
    for key in ("failed", "differs"):
        parts += [f"{who} {key}: {text}" for who, text in row.get(key, {}).items() if not row.get("error")]
    return f"{row['case']}: " + "; ".join(parts or ["passed"])


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_facts(run: Run, out: Path) -> dict[str, Any]:
    """Write ``facts.json``, unless it is there."""
    path = out / "facts.json"
    if not path.exists():
        path.write_text(json.dumps(about(run), indent=1) + "\n")
    return json.loads(path.read_text())


def heading(facts: dict[str, Any]) -> str:
    """Return the facts to print above figures."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['device']}, driver {facts['driver']}, CUDA {facts['cuda_of_runtime']}; tapegrad {facts['tapegrad']} "
        f"({facts['commit']}), Python {facts['python']}, {versions}\n"
        f"cuDNN of tapegrad: {facts['cudnn_of_tapegrad']}; measured: {facts['measured']}"
    )


def conduct(
    options: argparse.Namespace, part: str, work: Callable[[Run, Report], None], *, isolated: bool = False
) -> None:
    """Run ``work``, which calls :meth:`Report.case`, in child processes, and end the script.

    ``isolated``: each case has a process of its own.
    """
    part = options.part or part
    if options.child is not None:
        path = options.out / f"{part}.jsonl"
        try:
            run = begin(options)
            facts = heading(write_facts(run, options.out))
        except Exception as e:
            _append(path, {"case": "begin", "error": message(e)})
            raise
        if not path.exists():
            print(facts, flush=True)
        work(run, Report(run, path, isolated))
        sys.exit(0)
    with tempfile.TemporaryDirectory() as temporary:
        if options.out is None:
            default = common.RESULTS / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
            options.out = Path(temporary) if options.dry_run else default
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{part}.jsonl"
        path.unlink(missing_ok=True)
        slow = options.dry_run or {"compile", "jax"} & set((options.peers or "compile").split(","))
        status = _run_children(path, time.monotonic() + options.seconds, CASE_SECONDS * (3 if slow else 1))
        rows = _read(path)
        failed = [row["case"] for row in rows if "error" in row or row.get("differs")]
        print(f"{part}: {len(rows)} cases, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
        if options.dry_run:
            print("dry run: these are no figures of a GPU")
        sys.exit(status or bool(failed))


def _run_children(path: Path, ends: float, case_seconds: float) -> int:
    """Run this script's children until one has been through all cases, or time is up; return its exit status."""
    running = path.with_suffix(".running")
    command = [sys.executable, *sys.argv, "--out", str(path.parent), "--child", str(ends)]
    running.unlink(missing_ok=True)
    while True:
        child, stopped = subprocess.Popen(command), False
        while child.poll() is None and not stopped:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
            with suppress(FileNotFoundError):
                seconds = time.time() - running.stat().st_mtime
                if child.poll() is None and (seconds > case_seconds or time.monotonic() > ends + GRACE):
                    _append_killed(path, f"stopped after {seconds:.0f} s")  # first, for a hung driver delays its end
                    stopped = True
                    child.kill()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=GRACE)
        if not stopped:
            code = child.returncode
            if running.exists():
                _append_killed(path, signal.Signals(-code).name if code < 0 else f"exit status {code}")
            elif code != RESTART:
                return code
        if time.monotonic() > ends:
            print("no time left for the remaining cases")
            return 0


def _append_killed(path: Path, cause: str) -> None:
    """Append the row of the case in which a child has ended."""
    running = path.with_suffix(".running")
    row = {"case": running.read_text(), "error": f"the process ended: {cause}"}
    _append(path, row)
    print(line(row, True), flush=True)
    running.unlink()


def table(out: Path, most: int = 10_000) -> str:
    """Return all results in a folder as text of at most so many characters."""
    path = out / "facts.json"
    facts = json.loads(path.read_text()) if path.exists() else {"measured": False}
    lines = [heading(facts) if path.exists() else "no device"]
    for path in sorted(out.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines += ["", f"{path.stem}:", *(f"  {line(row, facts['measured'])}" for row in _read(path))]
    text = "\n".join(lines)
    return text if len(text) <= most else text[: most - 40] + "\n... the rest is in the files"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--facts", action="store_true", help="write facts.json instead of printing the table")
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("out", type=Path, metavar="DIR")
    given = options.parse_args()
    if given.facts:
        print(platform.platform(), *(f"{name} {number}" for name, number in versions().items()), sep="\n", flush=True)
        for command in ("nvidia-smi", "nvcc --version"):
            with suppress(OSError):
                subprocess.run(command.split(), timeout=20, check=False)
        run = begin(argparse.Namespace(dry_run=given.dry_run, peers="", seconds=0, child=None))
        given.out.mkdir(parents=True, exist_ok=True)
        print(heading(write_facts(run, given.out)))
    else:
        print(table(given.out))


if __name__ == "__main__":
    main()
