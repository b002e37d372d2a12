"""Contracts that runs of any program keep, stated by what a user can observe.

* ``monotone``: a larger limit never fails where a smaller one suffices, and each limit that an error asks for is
  larger than the one that failed;
* ``interrupted``: after Ctrl-C at any moment nothing is left: live bytes, locks, budgets, and the next run's bits;
* ``repeated``: over many steps no byte and no object is retained;
* ``forked``: the child of a fork runs the program, within a budget of its own, to the same bits.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from budget_cases import check_sound, in_a_thread, live, objects

import tapegrad as tg
from programs import interrupts
from programs.runs import NAMED, Modified, Run
from programs.variants import Case, WrongError, arrays, check_bits, settings
from tapegrad.errors import BudgetError

SPAN = ((0, 3),)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 2.0)


def within(case: Case, limit: int, **options: Any) -> tuple[list[Any] | None, int]:
    """Return the results in a budget from the data on, and 0; or None, and the bytes that its error asks for."""
    try:
        return case.run(Modified(**options, spans=SPAN, limits=(limit,))), 0
    except BudgetError as e:
        return None, e.needed_bytes


def monotone(case: Case) -> None:
    """Raise WrongError unless limits that suffice are those from some bytes on, with the same bits."""
    case.check("plain")
    base = live() + case.plain_data
    outcomes = [(share, *within(case, base + int(share * case.plain_room))) for share in SHARES]
    enough = [share for share, results, _ in outcomes if results is not None]
    for share, results, needed in outcomes:
        if results is None and enough and share > min(enough):
            raise WrongError(f"{min(enough)} of the room suffices, {share} does not: {needed} bytes are asked for")
        if results is None and needed <= base + int(share * case.plain_room):
            raise WrongError(f"the error asks for {needed} bytes where there are {base + int(share * case.plain_room)}")
        if results is not None:
            check_bits(results, case.plain, case.rounding)
    if not enough:
        raise WrongError(f"twice the room of a plain run does not suffice: {outcomes[-1][2]} bytes are asked for")


def interrupted(case: Case, count: int = 6) -> int:
    """Raise WrongError if a run after Ctrl-C differs; return how many of ``count`` runs were interrupted."""
    case.check("plain")
    options = case.modified("interrupted") if case.choice("interrupted").random() < 0.5 else {}
    base = live() + case.plain_data
    limit = base + 2 * case.plain_room + 8192

    def run() -> list[Any]:
        modified = Modified(**options, spans=SPAN, limits=(limit,))
        with modified.entered():
            return arrays(case.main(tg, modified))

    required = run()
    check_sound(), run()
    gc.collect()
    before, times = live(), 0
    for where in interrupts.interrupted(run, count, case.seed):
        times += 1
        check_sound()
        check_bits(run(), required, case.rounding)
        gc.collect()
        if live() != before:
            raise WrongError(f"{live() - before} bytes are left of a run interrupted at {where}")
    return times


def repeated(case: Case, count: int = 200) -> None:
    """Raise WrongError if ``count`` steps retain bytes, or objects in their number."""
    for run in (Run(), Modified(spans=SPAN, limits=(2**40,))):

        def step(run: Run = run) -> None:
            if isinstance(run, Modified):
                with run.entered():
                    case.main(tg, run)
                run.peaks.clear()
            else:
                case.main(tg, run)

        for _ in range(5):
            step()
        for _ in range(2):  # caches of classes fill once, and late
            before = objects(), live()
            for _ in range(count):
                step()
            nbytes, more = live() - before[1], objects() - before[0]
            if nbytes or more < count:
                break
        if nbytes or more >= count:
            raise WrongError(f"{count} steps have left {nbytes} bytes and {more} objects")


def forked(case: Case) -> None:
    """Raise WrongError if a forked child, of a process that is within a budget, does not get the plain bits."""
    case.check("plain")
    limit = live() + case.plain_data + 2 * case.plain_room + 8192
    with tg.memory_budget(live() + 2**26, tg.policies.offload_names(NAMED)):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
        else:
            status = _in_child(lambda: _runs(case, limit))
    if status:
        raise WrongError(f"the child has ended with status {status}")
    check_bits(case.run(), case.plain, case.rounding)


def _runs(case: Case, limit: int) -> None:
    for run in (Run(), Modified(spans=SPAN, limits=(limit,), offloading=True)):
        in_a_thread(lambda run=run: check_bits(arrays(_main(case, run)), case.plain, case.rounding))


def _main(case: Case, run: Run) -> Any:
    with np.errstate(all="ignore"):
        if isinstance(run, Modified):
            with run.entered():
                return case.main(tg, run)
        return case.main(tg, run)


def _in_child(work: Callable[[], None]) -> int:
    """Do the work of a child, and end it."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def holds(contract: Callable[..., Any], case: Case, *args: Any) -> Any:
    """Return what a contract returns, with the engine set as the program says."""
    with settings(case.program):
        return contract(case, *args)
