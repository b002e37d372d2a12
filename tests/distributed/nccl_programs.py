"""Programs of ``test_nccl.py``: each rank runs one, with a stand-in for CuPy, and prints what it has found."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np
from shim import happens, standin

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed.collectives.under_way import finish, help_on, start

TOLD = 4711
"""Tag of the message that rank 0 has been told: none of the library's has it."""


def calls() -> list[Any]:
    return [entry for entry in standin.events if entry.kind == "nccl"]


def engine(group: dist.Group) -> dict[str, Any]:
    standin.events.clear()
    x = tg.asarray(np.arange(3000.0) + group.rank)
    total = dist.all_reduce(x)
    np.testing.assert_array_equal(total.numpy(), 2 * np.arange(3000.0) + 1)
    happens.check()
    return {"engine": group.engine.name, "device": str(x.device), "kinds": sorted({c.name for c in calls()})}


def mixed(group: dist.Group) -> dict[str, Any]:
    with tg.device("cpu" if group.rank else "cuda"):
        x = tg.asarray(np.ones(3))
    try:
        dist.all_reduce(x)
    except tg.errors.DistributedError as e:
        return {"error": str(e)}
    return {}


def absent(group: dist.Group) -> dict[str, Any]:
    """Rank 1 agrees to a sum and does not come to it: it is there until rank 0 has said what it was told."""
    from mpi4py import MPI

    if group.rank == 1:
        print("FOUND " + json.dumps({"rank": 1}), flush=True)
        MPI.COMM_WORLD.recv(source=0, tag=TOLD)
        os._exit(0)
    # Not that of `init`: a busy machine may take longer to start MPI.
    group.line.timeout = 2.0
    x = tg.asarray(np.ones(3))
    found: dict[str, Any] = {"rank": 0}
    for key in ("error", "afterwards"):
        try:
            dist.all_reduce(x)
        except tg.errors.DistributedError as e:
            found[key] = f"{type(e).__name__}: {e}"
    print("FOUND " + json.dumps(found), flush=True)
    MPI.COMM_WORLD.send(None, dest=1, tag=TOLD)
    os._exit(0)


def overlap(group: dist.Group) -> dict[str, Any]:
    """Between the start of a sum and its end the computing stream waits for nothing."""
    y = tg.asarray(np.ones(5000)) * 2
    y.numpy()
    standin.events.clear()
    flat = start(tg.asarray(np.arange(5000.0) + group.rank), group)
    group.line.begin_all()
    z = tg.sqrt(y)
    z.numpy()
    entries = list(standin.events)
    streams = {entry.stream for entry in entries if entry.kind == "nccl"}
    waits = [entry for entry in entries if entry.kind == "wait" and entry.stream not in streams]
    total = finish(flat, group)
    right = bool(np.array_equal(total.numpy(), 2 * np.arange(5000.0) + 1))
    happens.check()
    return {"right": right, "streams": len(streams), "waits_of_home": len(waits)}


def buckets(group: dist.Group) -> dict[str, Any]:
    """Ranks help their sums on at different times, and do something else in between."""
    right = True
    for turn in range(5):
        sizes = [5000, 700, 9000, 3, 1200]
        started = []
        for k, n in enumerate(sizes):
            started.append(start(tg.asarray(np.arange(float(n)) * (k + 1) + group.rank), group))
            time.sleep(0.002 * ((group.rank + k + turn) % 3))
            if (group.rank + turn + k) % 2:
                help_on(group)
            if k == 2:
                dist.all_gather(tg.asarray(np.ones(4000)))
        for k, (n, flat) in enumerate(zip(sizes, started, strict=True)):
            expected = group.size * np.arange(float(n)) * (k + 1) + sum(range(group.size))
            right &= bool(np.array_equal(finish(flat, group).numpy(), expected))
    return {"right": right}


def main(name: str) -> None:
    standin.install()  # before anybody looks for CuPy
    standin.configure(nccl_patience=1.0, **json.loads(os.environ.get("TAPEGRAD_TEST_OPTIONS", "{}")))
    check = None if name == "absent" else "each"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        group = dist.init(check=check)
    found = globals()[name](group)
    found |= {"rank": group.rank, "warnings": [str(w.message) for w in told]}
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
