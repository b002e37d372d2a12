"""checkpointed_loop: a loop that a tape keeps as a few states, chosen by an optimal schedule, and reruns in parts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.loop_states import check_output, check_state, index_for, stacked
from tapegrad.core.protocols import Recorder
from tapegrad.core.storage import METER
from tapegrad.errors import BudgetError, RecomputeError, StructureError
from tapegrad.remat.checkpoint.checkpoint import recorders_of_a_call
from tapegrad.remat.checkpoint.loop_bytes import states_in
from tapegrad.remat.checkpoint.loop_call import LoopCall
from tapegrad.remat.checkpoint.loop_forward import Walk
from tapegrad.remat.checkpoint.recompute import CheckpointedCall, Recompute
from tapegrad.remat.schedules.actions import Action, count
from tapegrad.remat.schedules.mixed import mixed
from tapegrad.remat.schedules.multistage import hierarchical, multistage
from tapegrad.remat.schedules.online import Online, ideal_states
from tapegrad.remat.schedules.revolve import revolve
from tapegrad.remat.schedules.sqrt import sqrt
from tapegrad.sizes import parse_bytes
from tapegrad.tracing.frames import line_of, user_place

Schedule = Callable[[int], Iterable[Action]]


def checkpointed_loop(
    step: Callable[..., Any],
    state: Any,
    n: int | None = None,
    *,
    snapshots: int | None = None,
    bytes: int | str | None = None,
    schedule: str | Schedule = "revolve",
    disk: int = 0,
    directory: str | os.PathLike[str] | None = None,
    while_: Callable[[Any], Any] | None = None,
    outputs: bool = False,
) -> Any:
    """Run ``state = step(state)`` ``n`` times, or while ``while_(state)`` holds; to a tape this is one record.

    ``state``: any nest of tensors.  ``step`` is called as ``step(state, i)`` if it has two positional parameters
    without defaults, else as ``step(state)``; if it names ``is_recomputing`` it is told.  ``i`` is a Python number; a
    captured step (``tg.function``), which is replayed, gets it as a 0-d int64 tensor.  Captured tensors and
    variables get gradients, random numbers repeat, state changes happen once, and gradients are bit-identical to those
    of the plain loop, as under ``recompute_grad``.  What a step makes may reach a later one through the state only.
    Where it assigns to a variable what depends on something watched, and reads it, one value a step is kept besides.

    The tape keeps at most ``snapshots`` states (default: so many that no step is run more than twice besides being
    recorded) and the tape of one step; or as many as fit into ``bytes`` (such as ``"2GiB"``): with its initial state,
    what it uses from outside, the tape of one step and all gradients, the loop takes no more.  To see what a step
    needs, the first three are then run, and differentiated, once more.  ``schedule``:

    * ``"revolve"``: the fewest steps for so many states, the initial one included (Griewank and Walther 2000);
    * ``"mixed"``: a unit holds a state or a step's tape; best where these are of one size (Maddison 2024).  The initial
      state is kept besides;
    * ``"sqrt"``: ``snapshots`` even segments, each of which is taped whole (Chen et al. 2016);
    * ``"hierarchical"``: with ``disk``, reading and writing are weighed as two steps each (Herrmann and Pallez 2020);
    * a function of ``n`` that yields the actions of ``tapegrad.remat.schedules.actions``: it says what is stored.

    ``disk``: so many more states lie in files of ``directory``; with ``"revolve"`` those read least often.  With
    ``while_`` the length need not be known (Stumm and Walther 2010, Wang et al. 2009).

    ``outputs``: each step returns ``(state, y)``, and the loop ``(state, ys)`` with the ``y`` of all steps along a new
    leading axis (None where ``y`` is None, and for no steps at all), as ``tg.scan`` does.  Reruns recompute them only
    as far as their gradients need it; they take their bytes besides ``bytes``.

    Inside a memory budget stored states are dropped before there is an error, and steps run again instead.

    Raises RecomputeError (ValueError) for arguments that do not fit, for ``bytes`` that are too few (it says how many
    are needed), and, when differentiated, as ``recompute_grad``; StructureError (TypeError, ValueError) for a step that
    returns another structure, shape or dtype than it takes.
    """
    if (n is None) == (while_ is None):
        raise RecomputeError("checkpointed_loop: give either n, the number of steps, or while_, the condition to go on")
    if n is not None:
        if not isinstance(n, Integral) or n < 0:
            raise RecomputeError(f"checkpointed_loop: n is a whole number of steps, not {n!r}")
        n = int(n)
    if snapshots is not None and bytes is not None:
        raise RecomputeError("checkpointed_loop: snapshots and bytes say the same thing in two ways; give one of them")
    if not isinstance(disk, (int, Integral)):
        raise RecomputeError(f"checkpointed_loop: disk is a number of states, not {disk!r:.60}; directory= says where")
    if disk and schedule not in ("revolve", "hierarchical"):
        raise RecomputeError(f"checkpointed_loop: schedule {schedule!r} has no use for disk; take 'revolve'")
    if disk < 0 or (disk and while_ is not None):
        raise RecomputeError("checkpointed_loop: disk is a number of states, and goes with n")
    if while_ is not None and schedule != "revolve":
        raise RecomputeError("checkpointed_loop: schedule goes with n; with while_ leave it out")
    if bytes is not None and callable(schedule):
        raise RecomputeError("checkpointed_loop: a schedule of your own says itself what is stored; leave out bytes")
    name = f"checkpointed_loop({getattr(step, '__name__', type(step).__name__)})"
    loop = Loop(step, name, n, while_, directory, bool(outputs))
    if bytes is not None:
        room, tapes = parse_bytes(bytes), recorders_of_a_call()[0]
        if tapes and n != 0 and not callable(schedule):
            snapshots = states_in(loop, state, room, schedule, tapes)
        elif n is None:
            snapshots = 1
    if snapshots is not None and snapshots < 1 and not (disk and schedule == "revolve" and snapshots == 0):
        raise RecomputeError(f"{name}: it takes at least one stored state, not {snapshots}; raise snapshots")
    if n is None:
        if snapshots is None:
            raise RecomputeError(f"{name}: a loop of unknown length needs snapshots= (or bytes=)")
        loop.online, loop.schedule = partial(Online, snapshots), partial(revolve, c=snapshots)
    else:
        loop.schedule = _schedule(schedule, n, snapshots, disk, name)
    return loop(state)


def _schedule(schedule: str | Schedule, n: int, snapshots: int | None, disk: int, name: str) -> Schedule:
    """The schedule as a function of the number of steps."""
    if callable(schedule):
        count(schedule(n), n)  # raises if it is wrong
        return schedule
    c = ideal_states(n) if snapshots is None else snapshots
    known: dict[str, Schedule] = {
        "revolve": partial(multistage, ram=c, disk=disk) if disk else partial(revolve, c=c),
        "mixed": partial(mixed, s=c),
        "sqrt": partial(sqrt, segments=snapshots),
        "hierarchical": partial(hierarchical, ram=c, disk=disk),
    }
    if schedule not in known:
        raise RecomputeError(f"{name}: schedule is one of {', '.join(known)} or a function, not {schedule!r}")
    return known[schedule]


class Loop(Recompute):
    """One loop to run."""

    def __init__(
        self,
        step: Callable[..., Any],
        name: str,
        n: int | None,
        more: Callable[[Any], Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        outputs: bool = False,
    ) -> None:
        super().__init__(step, None)
        self.parts: Sequence[Callable[..., Any]] = (step,)
        self.outputs = outputs
        self._first_output: object = None
        self.name, self.n, self.more, self.directory = name, n, more, directory
        self.schedule: Schedule = partial(revolve, c=1)
        self.online: Callable[[], Online] | None = None
        self._indexed = _takes_index(step)
        self._place = user_place()
        self.steady = True
        """Whether each step must return a state of the form of the one it was given."""

    @property
    def guarded(self) -> Sequence[Callable[..., Any]]:
        return self.parts

    def step(self, state: Any, i: int, again: bool) -> tuple[Any, Any]:
        """Step ``i``: the state and the output (of a loop without outputs an empty tuple).  Raises StructureError."""
        before = nest.map_leaves(lambda x: x, state) if self.steady else None  # a step may change containers in place
        y = super()._run((state, *self._beside(state, i)), {}, again)
        y, output = self._parted(y, i) if self.outputs else (y, ())
        if self.steady and not again:
            check_state(self.name, i, before, y)
            if self.outputs:
                self._first_output = output if i == 0 else self._first_output
                check_output(self.name, i, self._first_output, output)
        return y, output

    def steps(self, state: Any, start: int, stop: int, each: Callable[..., Any]) -> tuple[int, Any]:
        """Steps from ``start`` on, at most to ``stop``, that a captured function makes in a row: how many, the state.

        ``each(f, *args)`` makes one of them, by ``f(*args)``.  0 steps: they are to be made one by one.
        """
        in_a_row = getattr(self.__wrapped__, "in_a_row", None)
        if in_a_row is None or self.outputs or not self.steady:
            return 0, state
        beside = lambda k: self._beside(state, start + k)
        done, after = in_a_row(state, stop - start, partial(each, self._as_run), beside)
        if done:
            check_state(self.name, start + done - 1, state, after)
        return done, after

    def gradients(
        self, state: Any, i: int, cts: Sequence[Any], each: Callable[..., Any], followed: Collection[int]
    ) -> list[Any] | None:
        """Cotangents of the tensors in ``state``, for those of the leaves of what step ``i``, if it is captured, gives.

        ``each(f, *args)`` makes the step, by ``f(*args)``.  None: it is to be recorded.  ``followed``: the indices of
        the values from outside that a gradient is asked for.
        """
        gradients = getattr(self.__wrapped__, "gradients", None)
        if gradients is None or self.outputs or not self.steady:
            return None
        args = (state, *self._beside(state, i))
        found: list[Any] | None = gradients(args, cts, partial(each, self._as_run), followed)
        return found

    def _beside(self, state: Any, i: int) -> tuple[Any, ...]:
        """What step ``i`` takes beside the state."""
        return (index_for(self.__wrapped__, i, state),) if self._indexed else ()

    def _parted(self, y: Any, i: int) -> tuple[Any, Any]:
        if isinstance(y, (tuple, list)) and len(y) == 2:
            return y[0], y[1]
        raise StructureError(
            f"{self.name}: with outputs=True each step returns (state, output), step {i} returned {nest.shown(y)}"
        )

    @property
    def where(self) -> str:
        """The name, with the line of the program that has made the loop."""
        return f"{self.name} at {line_of(self._place)}"

    @contextmanager
    def named(self, walk: Walk | None) -> Iterator[None]:
        """Errors of a budget that arise in the block name the loop, and say how many of its snapshots fit.

        ``walk``: where the run is; None: the loop is run and recorded as a whole.
        """
        try:
            yield
        except BudgetError as e:
            if e.needed_bytes <= METER.limit:  # that of a budget inside a step
                raise
            if walk is None:
                lacks = (
                    "no room to run and record the loop as a whole, as a gradient that is differentiated again needs"
                )
            else:
                lacks = self._lacks(walk, e.needed_bytes - int(METER.limit))
            raise BudgetError(f"{self.where}: {lacks}; or raise the budget.\n{e}", e.needed_bytes) from e

    def _lacks(self, walk: Walk, nbytes: int) -> str:
        """What there is no room for, where so many bytes are missing, and what would fit."""
        stored = [size for x in walk.kept.values() if (size := sum(b.node.aval.nbytes for b in x.buffers()))]
        fit = len(stored) - -(-nbytes // max(stored, default=1))
        steps = len(walk.taped) + 1
        records = f"the records of {steps} steps" if steps > 1 else "the record of one step"
        lacks = f"no room for one state and {records} beside stored states: {len(stored)}"
        if fit > 0:  # the budget may not drop them, for other processes take part in the steps
            return f"{lacks}; {fit} would fit here: write snapshots={fit} or fewer"
        if steps > 1:
            return f'{lacks}; write schedule="revolve", which records one step at a time'
        return f"{lacks}; no number of snapshots fits: let each step keep less (recompute_grad inside it)"

    def _new_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: list[Recorder]) -> CheckpointedCall:
        return LoopCall(self, self.name, args, kwargs, hidden)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Any:
        """The plain loop."""
        (state,) = args
        i, outputs = 0, list[object]()
        while self.more(state) if self.n is None else i < self.n:  # type: ignore[misc]
            state, output = self.step(state, i, again)
            outputs.append(output)
            i += 1
        return (state, stacked(outputs)) if self.outputs else state


def _takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step has two positional parameters without defaults."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty and p.name != "is_recomputing" for p in parameters) >= 2
