"""What a captured function knows of one signature: its program, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from tapegrad import nest
from tapegrad.capture.capture import capture, why_not
from tapegrad.capture.eager import unlike
from tapegrad.capture.graphs import replay_of
from tapegrad.capture.memory import alignment
from tapegrad.capture.planner.fit import fit
from tapegrad.capture.program import Layouts, Program
from tapegrad.capture.replay import Replay
from tapegrad.errors import BudgetError, FunctionError, TapegradError


@dataclass
class Stats:
    """What a function has done: programs made, calls replayed, and why calls were not (reason: how many)."""

    traces: int = 0
    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    over_budget: int = 0
    """Bytes by which eager calls have exceeded ``budget=``: some can be kept by a program alone (0: none has)."""

    def fell_back(self, reason: str) -> None:
        """One more call that ran eagerly."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


class Entry:
    """One signature: its program, and whether a replay of it has been compared with an eager run; or a reason."""

    def __init__(self, key: Any, held: tuple[Any, ...]) -> None:
        self.key, self.held = key, held
        self.plain: Program | None = None
        self.limit = inf
        """Bytes for which the program has been made."""
        self.program: Program | None = None
        self.layouts: Layouts = {}
        self.replay: Replay | None = None
        self.reason: str | None = None
        self.verified = False

    def capture(self, f: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        """Make the plain program of a call that has given ``result``, or tell the reason why there is none."""
        try:
            program = capture(f, args, named, self.layouts)
        except FunctionError:
            raise
        except Exception as e:
            self.reason = why_not(e)
        else:
            self.reason = unlike([o.value for o in program.outputs], nest.flatten(result))
            if self.reason is None:
                self.plain = program

    def fit(self, limit: float, own: float) -> None:
        """Make the program that takes at most ``limit`` bytes, or tell why none does.

        Raises BudgetError if the limit is the function's own.
        """
        self.limit = limit
        try:
            plain: Any = self.plain
            self.program = plain if limit == inf else fit(plain, int(limit), alignment(plain.device))
        except BudgetError as e:
            if limit == own:
                raise
            self.reason = f"no room for the program: {e}"

    def prepare(self, bound: bool) -> None:
        """Make what replays the program, or tell why nothing can; ``bound``: within a budget of the function's own."""
        if self.program is None:  # no plan keeps the budget
            return
        try:
            self.replay = replay_of(self.program, True if bound and not self.verified else None)
        except (TapegradError, NotImplementedError) as e:
            self.reason = f"{type(e).__name__}: {e}"
