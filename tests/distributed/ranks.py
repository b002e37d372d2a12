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


def launcher() -> str | None:
    """The ``mpiexec`` of this environment; None: there is no MPI here."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


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
    mpiexec = launcher()
    assert mpiexec is not None, "TAPEGRAD_REQUIRE_MPI is set, but there is no mpi4py or no mpiexec"
    line = [mpiexec, "-n", str(ranks), sys.executable, *command]
    return subprocess.run(line, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False)


@functools.cache
def report(module: str, ranks: int) -> dict[str, str]:
    """For each case of a module, what went wrong ("": nothing)."""
    done = start(ranks, str(HERE / "ranks.py"), module)
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
    from tapegrad.core.primitive import Opaque

    tried: set[str] = set()
    compute = Opaque.compute

    def noted(self: Any, *args: Any) -> Any:
        tried.add(self.name)
        return compute(self, *args)

    Opaque.compute = noted
    return tried


def main(module: str) -> None:
    from tapegrad import distributed

    group = distributed.init()
    found = importlib.import_module(module)
    tried = watch_primitives()
    for name in cases(module):
        try:
            getattr(found, name)(group)
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
