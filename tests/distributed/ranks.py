"""Runs the cases of a module on several ranks: one ``mpiexec`` for all of them.

A module of cases holds functions ``case_...(group)``.  Run by ``mpiexec -n 4 python ranks.py MODULE``, each is
called on every rank; rank 0 prints for each what went wrong on which rank.  ``report`` starts that, and reads what it
printed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TIMEOUT = 120
# The primitives with an effect that the cases of each module apply at least once.
TRIED = {
    "collective_cases": {
        "all_reduce", "all_reduce_extreme", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter",
        "all_to_all", "shift",
    },
    "data_parallel_cases": {"all_reduce_start", "all_reduce_finish"},
    "grid_cases": {"send", "recv"},
    "sharding_cases": {"gather_pieces"},
}  # fmt: skip
PATIENT = {"random_cases"}
"""Modules in which a rank computes for seconds while others wait: on a busy machine that takes long."""
PYTHON = os.environ.get("TAPEGRAD_TEST_PYTHON", sys.executable)
"""What ranks run by: another environment's interpreter stands for another MPI library, of which it has the launcher."""


def launcher() -> str | None:
    """The ``mpiexec`` beside ``PYTHON``; None: there is no MPI here."""
    beside = Path(PYTHON).with_name("mpiexec")
    if beside.exists() or PYTHON != sys.executable:
        return str(beside)
    return shutil.which("mpiexec") if importlib.util.find_spec("mpi4py") else None


def missing() -> bool:
    """Whether tests that need ranks are to be skipped: there is no MPI here, and nothing says that there must be."""
    return launcher() is None and os.environ.get("TAPEGRAD_REQUIRE_MPI") != "1"


def environment(**more: str) -> dict[str, str]:
    """What ranks find around them: one thread each, short waits, more ranks than processors allowed."""
    paths = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "TAPEGRAD_TIMEOUT": "20", "PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", **more,
    }  # fmt: skip


def start(ranks: int, *command: str, timeout: float = TIMEOUT, **more: str) -> subprocess.CompletedProcess[str]:
    """``mpiexec -n ranks python command``, finished."""
    return run("-n", str(ranks), PYTHON, *command, timeout=timeout, **more)


def run(*arguments: str, timeout: float = TIMEOUT, **more: str) -> subprocess.CompletedProcess[str]:
    """``mpiexec arguments``, finished.  Raises TimeoutExpired, and ends all of its processes."""
    mpiexec = launcher()
    assert mpiexec is not None, "TAPEGRAD_REQUIRE_MPI is set, but there is no mpi4py or no mpiexec"
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        [mpiexec, *arguments], env=environment(**more), stdin=nothing, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True,
    ) as job:  # fmt: skip
        try:
            out, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)  # a launcher may have ranks, and helpers, that hold the pipes open
            raise
    return subprocess.CompletedProcess(arguments, job.returncode, out, errors)


@functools.cache
def report(module: str, ranks: int, standin: bool = False) -> dict[str, str]:
    """For each case of a module, what went wrong ("": nothing); ``standin``: on GPUs of the stand-in for CuPy."""
    more = {"TAPEGRAD_TEST_STANDIN": "1"} if standin else {}
    if module in PATIENT:
        more["TAPEGRAD_TIMEOUT"] = "60"
    done = start(ranks, str(HERE / "ranks.py"), module, **more)
    results = [json.loads(line.removeprefix("CASE ")) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    found = dict(results)
    found["(the end)"] = "" if done.returncode == 0 else f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return found


def cases(module: str) -> list[str]:
    """The names of a module's cases."""
    text = (HERE / f"{module}.py").read_text(encoding="utf-8")
    return [line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def case_")]


def watch_primitives() -> set[str]:
    """The names of the primitives computed from now on."""
    from tapegrad.core.primitive import REGISTRY, Opaque

    tried: set[str] = set()
    compute = Opaque.compute

    def noted(self: Any) -> Any:
        tried.add(self.name)
        return compute.__get__(self)

    def noted_on_gpu(prim: Opaque) -> Any:
        kernels: Any = prim.cuda

        def call(*args: Any, **params: Any) -> None:
            tried.add(prim.name)
            kernels(*args, **params)

        return call

    Opaque.compute = property(noted)  # which is no caller of it: messages name the line of the caller
    for prim in REGISTRY.values():
        if isinstance(prim, Opaque) and prim.effect is not None and prim.cuda is not None:
            prim.cuda = noted_on_gpu(prim)
    return tried


def main(module: str) -> None:
    standin = os.environ.get("TAPEGRAD_TEST_STANDIN") == "1"
    if standin:  # before anybody looks for CuPy
        from shim import happens
        from shim import standin as cupy

        cupy.install()
    from tapegrad import distributed

    group = distributed.init()
    found = importlib.import_module(module)
    tried = watch_primitives()
    for name in cases(module):
        try:
            getattr(found, name)(group)
            if standin:
                happens.check()
            text = ""
        except Exception:
            text = traceback.format_exc()
            print(f"rank {group.rank}, {name}: {text}", file=sys.stderr, flush=True)  # others may not come to hear it
        told = group.exchange_objects(text)
        if group.rank == 0:
            wrong = "\n".join(f"rank {rank}: {t}" for rank, t in enumerate(told) if t)
            print("CASE " + json.dumps([name, wrong]), flush=True)
    missing = TRIED.get(module, set()) - tried
    if missing:
        raise AssertionError(f"no case applies {sorted(missing)}")


if __name__ == "__main__":
    main(sys.argv[1])
