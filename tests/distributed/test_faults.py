"""A rank that fails ends the whole job within seconds, and the messages say which, where and why.

Each fault is a job of its own; the programs are in ``fault_programs.py``.
"""

from __future__ import annotations

import re
import time

import pytest
from distributed import ranks

pytestmark = [
    pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)"),
    pytest.mark.slow,
]

DEADLINE = 2.0
SOON = 3.0
SLACK = 9.0
"""Seconds for a machine that has much else to do, and for launchers that let processes end by themselves first."""
WAITS = (
    r"rank 0 waits in all_reduce #2 of float64 \(1000,\), op=sum, exact=True \(8000 bytes\) at .*fault_programs.py:\d+"
)
GONE = f"{WAITS}, but rank 1 is not there: its program has ended"
LATE = (
    f"DistributedTimeoutError: {WAITS}; rank 1 has not come, and has not said anything for 2 s; "
    r"before, rank 0 was in all_reduce #1 of float64 \(3,\)"
)
SPLIT = r"rank 1 waits in split #2 of a group \(0 bytes\) at .*fault_programs.py:\d+"
ERROR = r"\[rank 1\] ValueError: no such file"

ANY, FAILED = range(256), range(1, 256)
"""Exit statuses; that of ``hard_end`` is 0, after all, in some launchers, though they tell of it."""

FAULTS = {
    "exception": (1, SOON, ERROR),
    "while_computing": (1, SOON, ERROR),
    "thread": (1, SOON, ERROR),
    "lost_hook": (1, SOON, r"ValueError: no such file\n(.*\n)*\[rank 1\] an exception has ended the program"),
    "interrupt": (130, SOON, r"\[rank 1\] KeyboardInterrupt"),
    "system_exit": (3, SOON, r"\[rank 1\] sys.exit: the program ends with status 3, and so all ranks do"),
    "text_exit": (1, SOON, r"the mesh has no cells\n(.*\n)*\[rank 1\] sys.exit: the program ends with status 1"),
    "early_end": (1, SOON, r"\[rank 0\] tapegrad.errors.DistributedError: " + GONE),
    "raised_exit": (1, SOON, r"\[rank 0\] tapegrad.errors.DistributedError: " + GONE),
    "hard_exit": (FAILED, SOON, ""),  # a launcher may tell the status of the rank that it has killed then
    "hard_end": (ANY, SOON, ""),
    "killed": (FAILED, SOON, ""),
    "stopped": (1, DEADLINE + SOON, r"\[rank 0\] tapegrad.errors." + LATE),
    "asleep": (1, DEADLINE + SOON, r"\[rank 0\] tapegrad.errors." + LATE),
    "skips_one": (1, DEADLINE + SOON, f"Error: {WAITS}; rank 1 waits in split #2 of a group|{SPLIT}; {WAITS}"),
    "unchecked": (1, SOON, r"Error: (8000|8008) bytes have come instead|Error: what has come is longer than"),
    "uninitialized": (1, SOON, r"Error: this program was started as one of several \(\w+ is set\): call tg.distrib"),
    "late_to_init": (FAILED, DEADLINE + SOON, r"Timeout(.*\n)* .* in wait_for_all_ranks_to_call_init\n"),
    "never_at_init": (FAILED, DEADLINE + SOON, ""),  # some launchers notice before the deadline
}
"""By program: the exit status, the seconds after which the job has ended, what it prints."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_job(name: str) -> None:
    status, seconds, message = FAULTS[name]
    program = str(ranks.HERE / "fault_programs.py")
    done = ranks.start(2, program, name, timeout=60, TAPEGRAD_TIMEOUT=f"{DEADLINE:g}")
    ended = time.monotonic()
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode in (status if isinstance(status, range) else (status,)), said
    assert re.search(message, done.stderr), said
    happened = re.findall(r"FAULT ([\d.]+)", done.stdout)  # lines of ranks may run into each other
    assert ended - float(happened[0]) < seconds + SLACK, said


def test_an_exit_that_is_caught_is_none() -> None:
    done = ranks.start(2, str(ranks.HERE / "fault_programs.py"), "caught_exit")
    assert done.returncode == 0 and "(1000,)" in done.stdout, done.stderr
