"""Calls of a captured function that tapes record, as one record each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.recording import Recording
from tapegrad.autodiff.tape import GradientTape
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.capture import arena
from tapegrad.capture.body import Body, Each, Extras
from tapegrad.capture.capture import why_not
from tapegrad.capture.derivative import Joint, capture_joint
from tapegrad.capture.eager import difference
from tapegrad.capture.memory import alignment, bits_of
from tapegrad.capture.planner.fit import Planner, bound_bytes
from tapegrad.capture.program import Layouts
from tapegrad.capture.replay import MislaidError, RelaidError
from tapegrad.capture.replays import Replays
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import shadowed
from tapegrad.core.protocols import Recorder
from tapegrad.core.state import during, thread, unrecorded
from tapegrad.core.storage import METER
from tapegrad.device import CPU
from tapegrad.errors import BudgetError, FunctionError, warn
from tapegrad.ops.create.creation import ones_like
from tapegrad.ops.dispatch import stack
from tapegrad.remat.checkpoint.rerun_tape import Lookout
from tapegrad.tensor import Tensor, alias

_MARGIN = 0.005
"""How many bytes fewer, as a part, than the ratio says, where two arenas were too large."""


def fitted(joint: Joint, limit: float) -> Joint:
    """The two programs, so that their arenas together, and what they read, take at most ``limit`` bytes.

    Both are planned as one program: what the forward does not hand to the backward, that recomputes.  Raises
    BudgetError.
    """
    if limit == inf:
        return joint
    align, bound = alignment(joint.forward.device), bound_bytes(joint.forward)
    taken = _taken(joint, align)
    if taken + bound <= limit:
        return joint.limited()
    room = int(limit) - bound
    planner, most = Planner(joint.whole.program(align), align), room
    while True:
        try:
            plan, is_last = planner.fit(most), False
        except BudgetError:
            plan, is_last = planner.least(), True
        found = joint.as_in(plan.program)
        taken = _taken(found, align)
        if taken <= room:
            return found.limited()
        if is_last:
            raise BudgetError(
                f"a call on a tape needs {taken + bound} bytes at least for its arenas, variables and constants: the "
                f"budget is {int(limit)}", taken + bound,
            )  # fmt: skip
        most = int(min(most, plan.layout.nbytes) * max(0, room) / taken * (1.0 - _MARGIN))


def _taken(joint: Joint, align: int) -> int:
    """Bytes of both arenas."""
    return arena.plan(joint.forward, align).nbytes + arena.plan(joint.backward, align).nbytes


class TapedCall:
    """Calls of one signature.  Each keeps what its backward reads: arguments, contents of variables, carried values."""

    def __init__(self, f: Callable[..., Any], joint: Joint) -> None:
        self.name = f"tg.function of {getattr(f, '__name__', type(f).__name__)}"
        self._joint = joint
        self._replays = Replays(joint)
        self._positions = [s for s in joint.sources if isinstance(s, int)]
        self._variables = [s for s in joint.sources if not isinstance(s, int)]
        outputs = joint.forward.outputs
        self._passed = [i for i in joint.weighed if outputs[i].argument is not None]
        """The results that are arguments."""
        self._may_loop = joint.is_closed
        """Whether loops may run programs of their own: it is closed, and no bit has differed."""
        self._body: Body | None = None

    def __call__(self, f: Callable[..., Any], args: Any, named: Any, tensors: list[Tensor]) -> Any:
        """The result of a replayed call, recorded."""
        joint = self._joint
        recorders = thread.recorders
        for _, owner, _ in joint.forward.reads:
            owner.value()  # tapes note that it is read
        inputs = [tensors[i]._buffer for i in self._positions]
        inputs += [v._cell.get(v) for v in self._variables]
        kept = False
        for recorder in recorders:
            kept = kept or isinstance(recorder, Recording)  # a checkpoint's first run keeps no record
        leaves, carried = self._replays.run(tensors, kept)
        for i in self._passed:  # a tape follows the result as a value of its own
            leaves[i] = Tensor(alias(leaves[i]._buffer))
        results = [leaves[i]._buffer for i in joint.weighed]
        self._replays.forward.commit()
        self._record(tuple(inputs), results, (f, args, named, tensors), carried)
        return nest.rebuild(joint.forward.result, iter(leaves))

    def _record(self, inputs: tuple[Buffer, ...], results: list[Buffer], call: Any, carried: list[Tensor]) -> None:
        """Record a call, or several in a row, as one record."""
        if results:
            record = _Record(self, call, carried, [b.node.aval for b in results])
            for recorder in thread.recorders:
                recorder.record_call(record, inputs, tuple(results))

    def in_a_row(
        self, f: Callable[..., Any], state: Any, count: int, each: Each, beside: Extras, key: Any, tensors: list[Tensor]
    ) -> tuple[int, Any]:
        """See :meth:`Function.in_a_row`; ``key`` and ``tensors``: of the first call."""
        body, joint = self.body(tensors), self._joint
        done, leaves = (0, []) if body is None else body.in_a_row(count, each, beside, key, tensors)
        if not done:
            return 0, state
        for i in self._passed:
            leaves[i] = Tensor(alias(leaves[i]._buffer))
        if thread.recorders:
            inputs = tuple([tensors[i]._buffer for i in self._positions])
            self._record(inputs, [leaves[i]._buffer for i in joint.weighed], (f, (), {}, tensors), [])
        return done, nest.rebuild(joint.forward.result, iter(leaves))

    def gradients(
        self, tensors: list[Tensor], cts: Sequence[Tensor | None], each: Each, followed: Collection[int]
    ) -> list[Tensor | None] | None:
        """See :meth:`Function.gradients`: for each of the ``tensors``."""
        body = self.body(tensors)
        return None if body is None else body.gradients(tensors, cts, each, followed)

    def body(self, tensors: list[Tensor]) -> Body | None:
        """Return what replays it in loops; None if it reads anything but its arguments, or writes anything but results.

        The first time, its bits are compared with those of a call that is recorded.
        """
        if self._body is None and self._may_loop:
            replays = self._replays
            try:
                with CPU.xp.errstate(all="ignore"):  # cotangents of 1 may overflow where those to come do not
                    replays.extend()
                    leaves, carried = replays.run(tensors)
                    cts = [unrecorded(ones_like, leaves[i]) for i in self._joint.weighed]
                    expected = [*leaves, *replays.pull(carried, cts)]
                    results = [*replays.results(tensors), *replays.gradients(tensors, cts)]
                    self._may_loop = list(map(bits_of, results)) == list(map(bits_of, expected))
            except (RelaidError, MislaidError):  # the next call, which is recorded, reports it
                replays.shrink()
                return None
            if self._may_loop:
                self._body = Body(replays)
            else:
                replays.shrink()
                warn(f"{self.name}: replays in a loop differ in some bit from a recorded call; loops record each step")
        return self._body

    def loses(self, recorders: Sequence[Recorder]) -> str | None:
        """Why the record would have no gradient of something that a tape watches; None: it has all."""
        joint = self._joint
        for b in joint.outside:
            for r in recorders:
                if r.follows(b):
                    return "it uses a tensor from outside that a tape watches: pass that as an argument"
        for cell, owner, _ in joint.forward.reads:
            if not any(owner is s for s in joint.sources) and any(r.follows(cell.get()) for r in recorders):
                return f"it reads {owner.name!r}, which is not trainable and which a tape watches"
        return None

    def pull(self, carried: list[Tensor], cts: Sequence[Tensor], absent: Collection[int] = ()) -> list[Tensor | None]:
        """Gradients of the sources; None where they depend on ``absent`` cotangents alone."""
        if METER.limit != inf:
            self._body = None  # loops within a budget have no use for it
        return self._replays.pull(carried, cts, absent)

    def again(self, f: Any, args: Any, named: Any, tensors: list[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients that can be differentiated again: by running the function once more, operation by operation."""
        if self._joint.forward.writes:
            raise FunctionError(
                "a captured function that draws random numbers or writes to variables was recorded on a tape, and its "
                "gradient is differentiated again: call the function itself, not the captured one"
            )
        return self._gradient(f, args, named, tensors, cts)[1]

    def _gradient(
        self, f: Any, args: Any, named: Any, tensors: list[Tensor], cts: Sequence[Tensor], *watches: Recorder
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of the result, and gradients of the sources, eagerly; ``watches`` are told of the call alone."""
        with GradientTape() as tape:
            tape.watch([tensors[i] for i in self._positions])
            call = partial(f, *args, **named)
            leaves = nest.flatten(during(call, recorders=(*thread.recorders, *watches)))
        targets = [leaves[i] for i in self._joint.weighed]
        wanted = [*(tensors[i] for i in self._positions), *self._variables]
        return leaves, tape.gradient(targets, wanted, output_gradients=list(cts)) if targets else [None] * len(wanted)

    def wrong(self, f: Callable[..., Any], args: Any, named: Any, tensors: list[Tensor]) -> str | None:
        """Say why calls must not be replayed; None: forward and backward have the bits of an eager run.

        No variable is written.  Where the function has kept values of the eager run, the tapes of the call, which have
        not recorded that run, refuse them.
        """
        watch = Lookout(thread.hidden)
        reason = self._difference(f, args, named, tensors, watch)
        if watch.alive():
            gc.collect()  # some may be held by nothing but a cycle
        kept = tuple(watch.alive().values())
        if kept:
            record = _Kept(self.name, kept)
            for recorder in thread.hidden:
                recorder.record_call(record, tuple(watch.captured.values()), kept)
            reason = reason or f"it keeps the result of {kept[0].node.prim.name}, which a replay would not renew"
        return reason

    def _difference(
        self, f: Callable[..., Any], args: Any, named: Any, tensors: list[Tensor], watch: Lookout
    ) -> str | None:
        """Return where forward or backward differ from an eager run in some bit; ``watch`` follows that run."""
        leaves, carried = self._replays.run(tensors)
        cts = [ones_like(leaves[i]) for i in self._joint.weighed]
        told, mine = ([bits_of(x) for x in xs] for xs in (leaves, self.pull(carried, cts)))
        limited = METER.limit != inf
        del leaves, carried
        if limited:  # the arenas go before the eager run takes its bytes
            self._replays.unbind()
        with shadowed({}):
            wanted, grads = during(self._gradient, f, args, named, tensors, cts, watch, recorders=())
        if limited:
            self._replays.bind()
        where = difference(told, wanted)
        if where is not None:
            return f"a replay differs from an eager run in {where}"
        for g, h in zip(mine, grads, strict=True):
            if (g is None) != (h is None) or (g is not None and g != bits_of(h)):
                return "a replayed gradient differs from that of an eager run"
        return None


class TapedEntry:
    """One signature on a tape: what records a call, or the reason why its operations are recorded one by one."""

    def __init__(self, held: tuple[Any, ...], limit: float) -> None:
        self.held, self.limit = held, limit
        self.call: TapedCall | None = None
        self.reason: str | None = None

    def prepare(
        self, f: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], tensors: Any,
        layouts: Layouts | None = None,
    ) -> None:  # fmt: skip
        """Write down the function and its gradient, and compare them with an eager run."""
        try:
            call = TapedCall(f, fitted(capture_joint(f, args, named, layouts), self.limit))
            self.reason = call.wrong(f, args, named, tensors)
        except FunctionError:
            raise
        except MislaidError as e:
            if layouts is not None and e.layouts.items() <= layouts.items():
                self.reason = str(e)
            else:
                self.prepare(f, args, named, tensors, {**(layouts or {}), **e.layouts})
        except Exception as e:
            self.reason = why_not(e)
        else:
            self.call = call if self.reason is None else None


class _Kept:
    """The record of values that the function has kept from the run that its replay was compared with."""

    again: Callable[[list[Any]], list[Any]] | None = None
    effects: Sequence[Any] = ()
    pushforward = None

    def __init__(self, name: str, values: Sequence[Buffer]) -> None:
        self.name = name
        self._values = [(b.node.aval, b.node.prim.name) for b in values]

    def pullback(
        self, cts: list[Tensor | None], needed: frozenset[int], lead: int | None, come: dict[int, Any]
    ) -> list[Tensor | None]:
        """Raise FunctionError."""
        used = [value for value, ct in zip(self._values, cts, strict=True) if ct is not None]
        aval, operation = (used or self._values)[0]
        raise FunctionError(
            f"{self.name}: the gradient passes through {aval!r}, the result of {operation}, which the function has "
            "kept (in a list, an attribute, a global) from a run that was compared with its replay and that no tape "
            "has recorded: return it from the function"
        )


class _Record:
    """One call, as a tape's record sees it: its inputs are the sources, its outputs the leaves that are weighed."""

    again: Callable[[list[Any]], list[Any]] | None = None
    effects: Sequence[Any] = ()  # a function with some is called eagerly
    pushforward = None
    """Forward mode sees what a call does inside: calls are not replayed there."""

    def __init__(
        self, taped: TapedCall, call: tuple[Any, Any, Any, Any], carried: list[Tensor], outputs: list[ShapedArray]
    ) -> None:
        """``call``: the function, its arguments by position and by name, and the tensors among them."""
        self.name, self._taped, self._carried, self._outputs = taped.name, taped, carried, outputs
        self._call = call

    def pullback(
        self, cts: list[Tensor | None], needed: frozenset[int], lead: int | None, come: dict[int, Any]
    ) -> list[Tensor | None]:
        """By the backward program; for several rows of cotangents, row by row."""
        if lead is None:
            return self._pulled(cts)
        rows = [self._pulled([None if ct is None else ct[i] for ct in cts]) for i in range(lead)]
        return [None if column[0] is None else stack(column) for column in zip(*rows, strict=True)]

    def _pulled(self, cts: list[Tensor | None]) -> list[Tensor | None]:
        absent = {i for i, ct in enumerate(cts) if ct is None}
        weights = [zeros_of(aval) if ct is None else ct for ct, aval in zip(cts, self._outputs, strict=True)]
        if thread.recorders:
            return self._taped.again(*self._call, weights)
        return self._taped.pull(self._carried, weights, absent)
