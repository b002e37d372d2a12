"""What replays of a function would take, before any call is made: for ``predict_peak``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad import nest
from tapegrad.capture.capture import capture
from tapegrad.capture.memory import alignment
from tapegrad.capture.plan_report import Plan, table
from tapegrad.capture.planner.fit import Planner, bound_bytes
from tapegrad.capture.program import Program
from tapegrad.device import is_array
from tapegrad.errors import TapegradError
from tapegrad.remat import predict
from tapegrad.remat.predict import Captured
from tapegrad.tensor import Tensor, convert


class _Programmed:
    """A program and its planner."""

    def __init__(self, program: Program) -> None:
        self.program, self.bound = program, bound_bytes(program)
        self.planner = Planner(program, alignment(program.device))

    def plan(self, budget: int | None) -> Plan:
        """The plan within ``budget`` bytes.  Raises BudgetError."""
        plain = self.planner.plain
        plan = plain if budget is None else self.planner.fit(max(0, budget - self.bound))
        return table(plan.program, self.program, plan.layout)

    def pareto(self) -> list[tuple[int, float]]:
        """See ``tg.function``."""
        return self.planner.pareto()


def predicted(f: Callable[..., Any], args: tuple[Any, ...], least: bool) -> Captured | None:
    """What replays of ``f(*args)`` would take; None: it cannot be captured, or does nothing."""
    try:
        program = capture(f, nest.map_leaves(as_tensor, args), {})
    except (TapegradError, NotImplementedError):
        return None
    if not program.steps:
        return None
    program.result, program.outputs = None, [o._replace(value=None) for o in program.outputs]  # nobody gets them
    programmed = _Programmed(program)
    arena, bound = programmed.planner.plain.layout.nbytes, programmed.bound
    if not least:
        return Captured(arena + bound, None, 0.0, arena, programmed)
    lowest = programmed.planner.least()
    return Captured(arena + bound, lowest.layout.nbytes + bound, lowest.extra, arena, programmed)


def as_tensor(x: Any) -> Any:
    """A tensor of an array; anything else is itself."""
    return x if type(x) is Tensor or not is_array(x) else convert(x)


predict.capture_with(predicted)
