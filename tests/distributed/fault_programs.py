"""Programs with a fault, run by ``mpiexec -n 2 python fault_programs.py NAME``: rank 1 fails while rank 0 waits for it.

Each prints ``FAULT`` and the time (of a clock that all processes share) at which it happens.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from tapegrad import distributed as dist
from tapegrad.distributed.group import launcher


def exception() -> None:
    raise ValueError("no such file")


def system_exit() -> None:
    sys.exit(3)


def raised_exit() -> None:
    """Of which nobody knows."""
    raise SystemExit(3)


def text_exit() -> None:
    sys.exit("the mesh has no cells")


def early_end() -> None:
    sys.exit(0)


def caught_exit() -> None:
    """It is no end of the program; that comes later, and is in order."""
    try:
        sys.exit(3)
    except SystemExit:
        dist.all_reduce(np.ones(1000))


def hard_exit() -> None:
    os._exit(3)


def hard_end() -> None:
    os._exit(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep() -> None:
    time.sleep(600)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)


def thread() -> None:
    threading.Thread(target=exception, name="reader").start()
    time.sleep(600)


def lost_hook() -> None:
    """The program has a hook of its own."""
    sys.excepthook = sys.__excepthook__
    raise ValueError("no such file")


def while_computing() -> None:
    raise ValueError("no such file")


def compute() -> None:
    while True:
        np.ones(1000).sum()


def never_at_init() -> None:
    """It is another program, say."""
    os._exit(0)


late_to_init = asleep


def skips_one() -> None:
    """It is ahead, in another group's collective."""
    dist.init().split(1).barrier()


def unchecked() -> None:
    """Nobody compares, but what comes has another length."""
    dist.all_reduce(np.ones(1001))


def uninitialized() -> None:
    dist.all_reduce(np.ones(1000))


def main(name: str) -> None:
    if name.endswith("_init") and os.environ[launcher() or ""] == "1":
        print(f"FAULT {time.monotonic()}", flush=True)
        globals()[name]()
    if name == "uninitialized":
        print(f"FAULT {time.monotonic()}", flush=True)
        uninitialized()
    group = dist.init(check=None if name in ("unchecked", "skips_one") else "each")
    dist.all_reduce(np.ones(3))
    if group.rank == 1:
        print(f"FAULT {time.monotonic()}", flush=True)
        globals()[name]()
    elif name == "while_computing":
        compute()
    else:
        print(dist.all_reduce(np.ones(1000)).shape)


if __name__ == "__main__":
    main(sys.argv[1])
