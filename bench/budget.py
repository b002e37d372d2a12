"""What does a training step cost within a byte budget?  Do peak, bits and error hold what they promise?

    python bench/budget.py [--scale quick|full] [--workloads mlp,lstm] [--fractions 0.5,0.3] [--rounds 5] [--json]

Five workloads (``budget_workloads.py``), and five programs written as users write them (``user_programs.py``), each a
loss and the gradients of its parameters, run under ``tg.memory_budget`` at fractions of their activation bytes.  From a
plain run under ``tg.measure``:

    activations  A: bytes of category "activation" when the plain run reaches its peak
    the rest     R: bytes that no budget can do without: what else is alive at that peak (parameters, inputs), or what
                    is alive at the end (parameters, inputs, the returned gradients), whichever is more
    budget at p     R + p * A

Where that raises BudgetError, its ``needed_bytes`` is tried next, until the step runs: the least feasible budget.  That
a budget smaller by one block of the ledger (512 bytes) raises again is tried, too.

Extra work is what recomputing values costs, as a part of the plain step's cost, by the estimate of
``tracing/costs.py``: a count that does not move.  ``--rounds 0`` gives the counts alone.

Plain and budgeted steps take turns; the slowdown is the median of the ratios within rounds, by the clock and by the
process's CPU time, which on one thread leaves out what other processes do.  Every budgeted step, timed or not, must
stay within its budget and give the plain step's gradients to the bit, and peaks must not grow where the budget shrinks:
otherwise the exit code is 1.  Speed decides nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common
from budget_workloads import WORKLOADS, Step, Workload
from user_programs import PROGRAMS

MIB = 1 << 20
GRAIN = 512
FRACTIONS = "0.8,0.6,0.5,0.4,0.3,0.2,0.15,0.1"
GOALS = {
    "matmul-bound": {0.5: 1.20, 0.3: 1.35, 0.2: 1.50},
    "elementwise-bound": {0.5: 1.05, 0.3: 1.15, 0.2: 1.25},
}


@dataclass
class Plain:
    """The step without a budget: its gradients, and bytes as defined above."""

    step: Step
    gradients: list[Any]
    peak: int
    activations: int
    rest: int
    kernels: int
    cost: float

    def budget(self, fraction: float) -> int:
        return int(self.rest + fraction * self.activations)

    def fraction(self, budget: int) -> float:
        return (budget - self.rest) / self.activations


@dataclass
class Times:
    """Of the plain step, and ratios to it."""

    plain_seconds: float
    slowdown: float
    middle_half: tuple[float, float]
    by_best_rounds: float
    by_cpu_time: float


@dataclass
class Row:
    """One workload within one budget.  ``asked``: the fraction asked for; ``fraction``: the one that runs."""

    workload: str
    asked: float
    fraction: float
    budget: int
    peak: int
    within: bool
    equal: bool
    least: bool | None
    evictions: int
    restored: int
    extra_work: float
    times: Times | None
    goal: float | None


def equal(gradients: list[Any], want: list[Any]) -> bool:
    import numpy as np

    return all(np.array_equal(g.numpy(), w) for g, w in zip(gradients, want, strict=True))


def plain_run(step: Step) -> Plain:
    import tapegrad as tg

    step()
    gc.collect()
    with tg.measure() as m:
        gradients = step()
    activations = m.peak_by_category["activation"]
    rest = max(m.peak_bytes - activations, m.live_bytes)
    return Plain(step, [g.numpy().copy() for g in gradients], m.peak_bytes, activations, rest, m.kernel_runs, m.cost)


class Clocked:
    """A call that notes the CPU seconds of the process that each of its runs takes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self._call()
        self.seconds.append(time.process_time() - start)


class Budgeted:
    """The step within ``limit`` bytes; ``check()`` looks at the last one's gradients and lets go of them."""

    def __init__(self, plain: Plain, limit: int) -> None:
        self.plain, self.limit = plain, limit
        self.measures: list[Any] = []
        self.equal = True
        self._last: list[Any] | None = None

    def __call__(self) -> None:
        import tapegrad as tg

        with tg.memory_budget(self.limit) as m:
            self._last = self.plain.step()
        self.measures.append(m)

    def check(self, _: str = "") -> None:
        if self._last is not None:
            self.equal &= equal(self._last, self.plain.gradients)
            self._last = None

    def needed(self) -> int | None:
        """Run once; the bytes a BudgetError asks for, or None if there was none."""
        from tapegrad.errors import BudgetError

        gc.collect()
        try:
            self()
        except BudgetError as error:
            return error.needed_bytes
        self.check()
        return None


def feasible(plain: Plain, limit: int) -> Budgeted:
    """A step that runs: within ``limit``, or the least that errors ask for."""
    while True:
        found = Budgeted(plain, limit)
        needed = found.needed()
        if needed is None:
            return found
        if needed <= limit:
            raise SystemExit(f"BudgetError within {limit} bytes asks for {needed}, which is not more")
        limit = needed


def timed(plain: Plain, step: Budgeted, rounds: int) -> Times:
    """The plain step and the one within a budget take turns."""
    calls = {"plain": Clocked(plain.step), "budget": Clocked(step)}
    times = common.by_turns(dict(calls), rounds, warm_up=0, prepare=step.check)
    step.check()
    return Times(
        common.median(times["plain"]), common.ratio(times["plain"], times["budget"]),
        common.quartiles(times["plain"], times["budget"]), common.best_ratio(times["plain"], times["budget"]),
        common.ratio(calls["plain"].seconds, calls["budget"].seconds),
    )  # fmt: skip


def run(workload: Workload, plain: Plain, asked: float, rounds: int) -> Row:
    import tapegrad as tg

    limit = plain.budget(asked)
    step = feasible(plain, limit)
    least = None
    if step.limit > limit:
        least = Budgeted(plain, step.limit - GRAIN).needed() is not None
    first = step.measures[0]
    with tg.measure() as work:
        step()
    step.check()
    times = timed(plain, step, rounds) if rounds else None
    return Row(
        workload=workload.name, asked=asked, fraction=plain.fraction(step.limit), budget=step.limit,
        peak=max(m.peak_bytes for m in step.measures),
        within=all(m.peak_bytes <= step.limit for m in step.measures), equal=step.equal, least=least,
        evictions=first.evictions, restored=first.restored, extra_work=work.restored_cost / plain.cost,
        times=times, goal=GOALS[workload.kind].get(asked),
    )  # fmt: skip


def failures(rows: list[Row]) -> list[str]:
    """What was promised and not kept, in words."""
    found = []
    for r in rows:
        where = f"{r.workload} at {r.asked:g} ({r.budget} bytes)"
        found += [f"{where}: a peak of {r.peak} bytes"] * (not r.within)
        found += [f"{where}: other gradients than the plain step's"] * (not r.equal)
        found += [f"{where}: a smaller budget than the least one runs"] * (r.least is False)
    by_budget = sorted(rows, key=lambda r: (r.workload, r.budget))
    for small, large in zip(by_budget, by_budget[1:]):
        if small.workload == large.workload and small.peak > large.peak:
            found.append(f"{small.workload}: {small.budget} bytes peak at {small.peak}, {large.budget} at {large.peak}")
    return found


COLUMNS = (
    "workload", "of activations", "budget, MiB", "peak, MiB", "peak <= budget", "bits equal", "evicted", "recomputed",
    "extra work", "plain, s", "slowdown", "middle half", "by best rounds", "by CPU time",
    "goal",
)  # fmt: skip


def cells(r: Row) -> list[str]:
    asked = f"{r.asked:g}" if r.least is None else f"{r.asked:g}: infeasible, least {r.fraction:.3f}"
    t = r.times
    ratios = [""] * 5
    if t is not None:
        middle = "{:.2f}-{:.2f}".format(*t.middle_half)
        figures = (t.plain_seconds, t.slowdown, t.by_best_rounds, t.by_cpu_time)
        ratios = [f"{x:.2f}" for x in figures]
        ratios.insert(2, middle)
    return [
        r.workload, asked, f"{r.budget / MIB:.1f}", f"{r.peak / MIB:.1f}", "yes" if r.within else "NO",
        "yes" if r.equal else "NO", str(r.evictions), str(r.restored), f"{r.extra_work:.3f}", *ratios,
        "" if r.goal is None else f"{r.goal:.2f}",
    ]  # fmt: skip


def chosen(words: str | None) -> list[Workload]:
    """The workloads whose names contain one of ``words`` (separated by commas); all by default."""
    wanted = [word.strip().lower() for word in (words or "").split(",")]
    known = [*WORKLOADS, *PROGRAMS]
    workloads = [w for w in known if any(word in w.name.lower() for word in wanted)]
    if not workloads:
        raise SystemExit(f"--workloads {words}: none of {', '.join(w.name for w in known)}")
    return workloads


def main() -> None:
    parser = common.parser(__doc__, threads=2, rounds=5)
    parser.add_argument("--scale", choices=["quick", "full"], default="full", help="sizes (default: %(default)s)")
    parser.add_argument("--workloads", help="parts of their names, separated by commas (default: all)")
    parser.add_argument("--fractions", default=FRACTIONS, help="of the activation bytes (default: %(default)s)")
    options = parser.parse_args()
    workloads = chosen(options.workloads)
    fractions = [float(word) for word in options.fractions.split(",")]
    common.begin(options.threads)
    common.load("tapegrad", options.threads)
    rows = []
    for workload in workloads:
        plain: Any = None  # the last workload's bytes are alive until it goes
        plain = plain_run(workload.make(options.scale))
        print(
            f"{workload.name}: plain peak {plain.peak / MIB:.1f} MiB, of it {plain.activations / MIB:.1f} activations; "
            f"the rest {plain.rest / MIB:.1f}; {plain.kernels} kernels",
            flush=True,
        )
        for fraction in fractions:
            rows.append(run(workload, plain, fraction, options.rounds))
            print("  " + ", ".join(f"{c} {v}" for c, v in zip(COLUMNS[1:], cells(rows[-1])[1:]) if v), flush=True)
    facts = common.about(options.threads)
    common.show(f"steps within a budget, scale {options.scale}", COLUMNS, [cells(r) for r in rows], facts)
    if options.json:
        common.write("budget", facts, [asdict(r) for r in rows], scale=options.scale, rounds=options.rounds)
    failed = failures(rows)
    print("\n".join(failed) or f"{len(rows)} budgets: peaks within them and monotone, gradients equal to the bit")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
