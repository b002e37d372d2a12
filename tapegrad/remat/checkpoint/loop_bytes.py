"""How many states of a loop fit into so many bytes: three of its steps are run, recorded and reversed to see.

With one stored state, three steps need what any number of steps needs: a state stored, one at hand, the record of a
step, cotangents of a state and of what the step uses, and the sums of those.  Each further stored state adds its bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.autodiff.collective_walk import told
from tapegrad.autodiff.recording import Trace
from tapegrad.core.aval import rounded
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import overlay
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Recorder
from tapegrad.core.state import during
from tapegrad.core.storage import METER
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics import bits
from tapegrad.engine.realize import realize
from tapegrad.errors import BudgetError, RecomputeError
from tapegrad.remat.checkpoint.rerun_tape import snapshots
from tapegrad.remat.schedules.online import Online
from tapegrad.remat.schedules.revolve import revolve
from tapegrad.sizes import format_bytes
from tapegrad.tensor import Tensor
from tapegrad.tracing.contexts import measure
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import Measure
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.remat.checkpoint.loop import Loop

STEPS = 3
MOST = 2**20


@dataclass(frozen=True)
class Needs:
    """What a loop needs, in bytes."""

    least: int
    """With one stored state: that, what the loop uses from outside, and all that it makes."""
    held: int
    """Part of ``least``: what is there before the loop begins."""
    state: int
    """What another stored state adds."""
    tape: int
    """What the record of another step adds."""


def states_in(loop: Loop, state: Any, nbytes: int, schedule: str, outer: list[Recorder]) -> int:
    """How many states the schedule may store so that no more than ``nbytes`` are taken.

    Inside a budget: no more than it has room for, and at least one.  Where other processes take part in the steps, what
    fits on all.  Raises RecomputeError if ``nbytes`` are too few, also where they are so on another process.
    """
    needs, effects = _needs_of(loop, state, outer, schedule in ("mixed", "sqrt") and loop.n is not None)
    count, least = _fit(needs, nbytes, schedule, loop.n)
    if count and METER.limit < inf:
        room = int(METER.limit) - LEDGER.live_bytes + needs.held
        count = max(1, min(count, _fit(needs, room, schedule, loop.n)[0]))
    if effects:
        counts = [there for _, there in told(effects, ("states", count))]
        if count and not min(counts):
            raise RecomputeError(f"{loop.where}: bytes is too little on rank {counts.index(0)}, which says how many")
        count = min(counts)
    if count:
        return count
    raise RecomputeError(
        f"{loop.where}: bytes={nbytes} ({format_bytes(nbytes)}) is too little: no stored state fits.  One state takes "
        f"{needs.state} bytes, the record of one step {needs.tape or 'the rest'}; with one stored state the loop needs "
        f"{least} bytes ({format_bytes(least)})"
    )


def _fit(needs: Needs, room: int, schedule: str, n: int | None) -> tuple[int, int]:
    """How many states fit into ``room`` (0: none does), and the least room that does."""
    most = MOST if n is None else max(n, 1)
    if schedule == "sqrt" and n is not None:  # whole segments are recorded; the fewest that fit are rerun least
        by_count = [needs.least + (c - 1) * needs.state + (-(-n // c) - 1) * needs.tape for c in range(1, most + 1)]
        return next((c for c, need in enumerate(by_count, 1) if need <= room), 0), min(by_count)
    mixed = schedule == "mixed" and n is not None
    unit = max(needs.state, needs.tape) if mixed else needs.state
    least = needs.least + unit * mixed  # its units come besides the initial state
    return (0 if room < least else min((room - least) // max(unit, 1) + 1, most)), least


def _needs_of(loop: Loop, state: Any, outer: list[Recorder], taping: bool) -> tuple[Needs, Sequence[Node]]:
    """Run the first steps under a tape that follows what ``outer`` ones follow, and differentiate them.

    Besides: the operations in them in which other processes take part.
    """
    ((state,), _) = snapshots((state,), {})
    leaves = [x._buffer if isinstance(x, Tensor) else x._cell.get() for x in _tensors(state)]
    realize(leaves)
    trial = _Trial(loop, leaves)
    probe = _Probe([b for b in leaves if any(r.follows(b) for r in outer)], outer)

    def measured() -> tuple[int, int, int]:
        with overlay({}), measure() as m:
            live = m.live_bytes
            try:
                probe.differentiate(trial.loop, state)
                peak = m.peak_bytes - live
            except BudgetError:  # the loop itself may do with less, and says so otherwise
                peak = 0
            held = sum(_storages([*leaves, *probe.inputs]).values())
            return peak, held, trial.tape_bytes(state, [*leaves, *probe.inputs], outer) if taping else 0

    random, collects = bits.host_state(), gc.isenabled()
    try:
        gc.disable()  # garbage of before that went in the middle would be taken for bytes that the loop gives back
        peak, held, tape = during(measured, recorders=())
    finally:
        bits.set_host_state(random)
        if collects:
            gc.enable()
    return Needs(peak + held, held, trial.state_bytes, tape), probe.effects


class _Trial:
    """The first steps of a loop as a loop of their own; it sees what a state has that the first one has not."""

    def __init__(self, loop: Loop, first: list[Buffer]) -> None:
        self._step, self._outputs, self._first = loop.step, loop.outputs, _storages(first).keys()
        self.state_bytes = 0
        self._steps = min(STEPS, loop.n or STEPS)
        asked = iter(range(STEPS))

        def more(state: Any) -> bool:
            return next(asked, None) is not None  # the loop's own condition may use something up

        known = loop.n is not None
        steps, more_of = (self._steps, None) if known else (None, more)
        self.loop = type(loop)(self._run, loop.name, steps, more_of, outputs=loop.outputs)
        self.loop.steady = loop.steady
        self.loop.schedule, self.loop.online = partial(revolve, c=1), partial(Online, 1)

    def _run(self, state: Any, i: int) -> Any:
        y, output = self._step(state, i, True)
        buffers = [x._buffer for x in _tensors(y) if isinstance(x, Tensor)]
        realize(buffers)
        self.state_bytes = max(self.state_bytes, sum(n for i, n in _storages(buffers).items() if i not in self._first))
        return (y, output) if self._outputs else y

    def tape_bytes(self, state: Any, followed: list[Buffer], outer: list[Recorder]) -> int:
        """Bytes that a tape keeps of the last of the steps."""
        probe = _Probe([b for b in followed if is_inexact(b.node.aval.dtype)], outer)
        with measure() as m:
            return probe.during(self._last_step, state, m)

    def _last_step(self, state: Any, m: Measure) -> int:
        for i in range(self._steps):
            live = m.live_bytes
            state, _ = self._step(state, i, True)
            realize([x._buffer for x in _tensors(state) if isinstance(x, Tensor)])
        return m.live_bytes - live


class _Probe(Trace):
    """A tape that follows what others follow."""

    strict = False

    def __init__(self, followed: list[Buffer], outer: list[Recorder]) -> None:
        super().__init__([b.node for b in followed])
        self._outer = outer
        self.inputs: tuple[Buffer, ...] = ()
        self.effects: Sequence[Node] = ()

    def differentiate(self, f: Callable[..., Any], state: Any) -> None:
        """Run ``f(state)`` and pull ones back."""
        y = self.during(f, state)
        tensors = [x for x in _tensors(y) if isinstance(x, Tensor)]  # computed: a call's results are
        cts = {x._buffer.node.index: x * 0 + 1 for x in tensors if is_inexact(x.dtype)}
        realize([ct._buffer for ct in cts.values()])
        del y, tensors
        self.pull(cts)

    def follows(self, buffer: Buffer) -> bool:
        return super().follows(buffer) or any(r.follows(buffer) for r in self._outer)

    def read(self, variable: Variable, value: Buffer) -> None:
        """A trainable variable is followed, as by most tapes."""
        if variable.trainable and is_inexact(variable.dtype):
            self._tracked.add(value.node.index)

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        self.inputs, self.effects = inputs, call.effects
        self._indices = [b.node.index for b in inputs]
        self._tracked.update(self._indices)
        super().record_call(call, inputs, outputs)


def _tensors(tree: object) -> list[Tensor | Variable]:
    return [x for x in nest.flatten(tree) if isinstance(x, (Tensor, Variable))]


def _storages(buffers: list[Buffer]) -> dict[int, int]:
    """Bytes of what the buffers lie in, by index of the node."""
    roots = [b.root() for b in buffers]
    return {root.node.index: rounded(root.node.aval.nbytes) for root in roots if root.array is not None}
