"""Plans of a captured step (``tg.function``): what its program can do again to take fewer bytes, by its own planner."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from rich.console import Console

from tapegrad.capture.planner.fit import Planner, bound_bytes
from tapegrad.capture.program import Kind, Program, Slot, Step, View, pruned
from tapegrad.capture.program import Output as Given
from tapegrad.device import CPU, dtypes
from tapegrad.errors import BudgetError
from tapegrad.profile.plan.text import change_in_bytes
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import counted, ms
from tapegrad.sizes import format_bytes
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.names import COST_GRAINS, SLOT_KINDS
from tapegrad.tracing.run import Run

_BYTE = dtypes.asdtype("uint8")
_READ, _WRITE, _OWN, _GIVEN = range(4)


class Choice(NamedTuple):
    """One plan: the peak of a step with it, ``budget=`` of the function, its arena, tasks done again, and their cost.

    ``extra``: as a part of the plain program's work.
    """

    peak_bytes: int
    budget: int
    arena_bytes: int
    again: int
    extra: float


class CapturedStep:
    """The step of a run that is replayed: its program, and what is alive beside its arena.

    Raises RunFileError if the run holds no program that could have run.
    """

    def __init__(self, run: Run, step: int, program: int) -> None:
        self.run, self.step = run, step
        self.name = run.text(run.programs["name"][program])
        plain = run.programs["plain"][program]
        self.program = program_of(run, program if plain < 0 else plain)
        self.bound = bound_bytes(self.program)
        self.planner = Planner(self.program, max(1, run.programs["alignment"][program]))
        self.measured = run.steps["peak_bytes"][step]
        self.beside = max(0, self.measured - run.programs["bytes"][program])

    @property
    def step_ns(self) -> int:
        """How long the step took."""
        return max(0, self.run.steps["end_ns"][self.step] - self.run.steps["begin_ns"][self.step])

    def within(self, peak: int) -> Choice | None:
        """The plan of the least work whose step takes at most ``peak`` bytes; None: there is none."""
        if peak >= self.measured:
            return self._choice(self.planner.plain)._replace(peak_bytes=self.measured)
        try:
            plan = self.planner.fit(peak - self.beside)
        except BudgetError:
            return None
        return self._choice(plan)

    def least(self) -> Choice:
        """The plan of the lowest peak."""
        least = self._choice(self.planner.least())
        return least._replace(peak_bytes=min(least.peak_bytes, self.measured))

    def pareto(self) -> list[Choice]:
        """Plans from the lowest peak to the least work."""
        return [self._choice(self.planner.fit(nbytes)) for nbytes, _ in self.planner.pareto()]

    def _choice(self, plan: Any) -> Choice:
        nbytes = plan.layout.nbytes
        again = sum(step.again for step in plan.program.steps)
        return Choice(self.beside + nbytes, self.bound + nbytes, nbytes, again, plan.extra)


def replayed(run: Run) -> int:
    """The program whose replay is the last step; -1: that was not replayed, or calls were on a tape."""
    replays, last = run.replays, run.count("steps") - 1
    programs = {p for p, step in zip(replays["program"], replays["step"]) if step == last >= 0}
    if not programs or any(run.text(run.programs["name"][p]).endswith((", forward", ", backward")) for p in programs):
        return -1
    return max(programs, key=lambda p: (run.programs["bytes"][p], -p))


def captured_step(run: Run) -> CapturedStep | None:
    """The last step, if a program's replay is all of it, or most.  Raises RunFileError for what is no program."""
    program = replayed(run)
    return None if program < 0 else CapturedStep(run, run.count("steps") - 1, program)


def program_of(run: Run, row: int) -> Program:
    """The program of a row, as far as a planner looks at it.  Raises RunFileError if it is none."""
    s, w = run.slots, run.tasks
    rows = [i for i, program in enumerate(s["program"]) if program == row]
    slots = {i: Slot(Kind(SLOT_KINDS[s["kind"][i]]), s["bytes"][i]) for i in rows}
    uses: dict[tuple[int, int], list[View]] = defaultdict(list)
    for task, slot, how, view in zip(*(run.uses[name] for name in ("task", "slot", "how", "view"))):
        if slot in slots:
            uses[task, how].append(View(slots[slot], view, (), (), _BYTE))
    steps: list[Step] = []
    made = {id(slot) for slot in slots.values() if slot.kind is not Kind.MADE}
    for i, program in enumerate(w["program"]):
        if program != row:
            continue
        reads, writes, own = (uses[i, how] for how in (_READ, _WRITE, _OWN))
        if any(id(v.slot) not in made for v in reads) or any(id(v.slot) in made for v in (*writes, *own)):
            raise RunFileError(f"a task of program {row} reads what no task has made, or makes it twice")
        made.update(id(v.slot) for v in (*writes, *own))
        rules, place = w["rules"][i], (run.text(w["file"][i]), w["line"][i])
        steps.append(Step(
            (run.text(w["op"][i]),), reads, writes, own, lambda *_: [], bool(rules & 1), bool(rules & 2), place,
            once=bool(rules & 4), cost=w["cost"][i] / COST_GRAINS, number=len(steps), phase=w["phase"][i],
        ))  # fmt: skip
    results = [v for (_, how), views in uses.items() if how == _GIVEN for v in views]
    arguments = [View(slot, 0, (), (), _BYTE) for slot in slots.values() if slot.kind is Kind.ARGUMENT]
    planned = pruned(Program(steps, None, [Given(v, None) for v in results], [], arguments, [], device=CPU))
    if not planned.steps or any(id(v.slot) not in made for v in results):
        raise RunFileError(f"program {row} has no tasks, or gives out what none has made")
    return planned


def as_json(step: CapturedStep, chosen: Choice | None, pareto: list[Choice]) -> dict[str, Any]:
    """The answer as a JSON object; bytes are integers."""
    return {
        "function": step.name, "measured": {"peak_bytes": step.measured, "step_ns": step.step_ns},
        "beside_bytes": step.beside, "bound_bytes": step.bound, "smallest_bytes": step.least().peak_bytes,
        "chosen": None if chosen is None else chosen._asdict(), "pareto": [c._asdict() for c in pareto],
    }  # fmt: skip


def print_answer(step: CapturedStep, chosen: Choice | None, pareto: list[Choice], console: Console) -> None:
    """Print the budget to give the function, or all of them."""
    out = Output(console)
    out.line(
        f"Captured step {step.name}: measured now {format_bytes(step.measured)}, {ms(step.step_ns)} a step; smallest "
        f"reachable {format_bytes(step.least().peak_bytes)}", "bold",
    )  # fmt: skip
    if chosen is not None:
        out.line()
        if chosen.arena_bytes >= step.planner.plain.layout.nbytes:
            out.line("it fits as it is: nothing to do")
        else:
            out.line(f"tg.function({step.name}, budget={chosen.budget})")
            change = change_in_bytes(chosen.peak_bytes - step.measured)
            out.line(f"  predicted peak  at most {format_bytes(chosen.peak_bytes)}   {change}")
            out.line(f"  more work       {chosen.extra:.1%}   ({counted(chosen.again, 'task')} of "
                     f"{len(step.program.steps)} done again)")  # fmt: skip
    if pareto:
        out.line()
        columns = [Column(name, right=True) for name in ("Peak", "arena", "more work", "done again")]
        cells = [
            [
                format_bytes(c.peak_bytes), format_bytes(c.arena_bytes), f"{c.extra:.1%}", str(c.again),
                f"budget={c.budget}",
            ]
            for c in pareto
        ]  # fmt: skip
        out.table([*columns, Column("tg.function(...,")], cells)
