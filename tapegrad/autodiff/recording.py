"""Recording: which values depend on the watched ones, and what must be kept to differentiate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tapegrad.autodiff.backward import backward
from tapegrad.autodiff.collective_walk import agreed, effects_of
from tapegrad.autodiff.records import Applied, Called, Record, reachable
from tapegrad.core import tracking
from tapegrad.core.buffer import NOTHING, Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Effect, Recipes, Recorder
from tapegrad.core.references import ASKED, count
from tapegrad.core.state import during, thread
from tapegrad.device.dtypes import is_inexact
from tapegrad.errors import TapeError
from tapegrad.tensor import Tensor, unwrapped

if TYPE_CHECKING:
    from tapegrad.variable import Variable

T = TypeVar("T")
_node = attrgetter("node")


class Recording:
    """A recorder that keeps records of all that depends on ``_tracked`` values (by node index)."""

    strict = False
    """Whether a value that it follows must not become a number of Python's or NumPy's (see ``refuse_detaching``)."""
    retains = True
    """That it keeps what the rules of an operation on values that it follows read."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._tracked: set[int] = set()
        self._peers: Effect | None = None
        """Set once an operation is recorded in which other processes take part."""
        self._sweep_at = _FIRST_SWEEP
        self.graph: Recipes | None = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TapeError(
            "a tape is neither copied nor pickled: its records are values of this process; pickle the gradients"
        )

    def _begin(self) -> None:
        """Recording begins; from now on the tracker has to know how values are made, to recompute them."""
        self.graph = tracking.current.graph()

    def follows(self, buffer: Buffer) -> bool:
        """Whether the value depends on something watched."""
        return buffer.node.index in self._tracked

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """An operation was applied (told by the evaluator): keep what its rules read of it."""
        tracked = self._tracked
        if node.site is not None:
            plans = node.site.plans
            if plans is None:
                return
            nodes: tuple[Node, ...]
            if len(inputs) == 1:
                first = inputs[0].node
                nodes = (first,)
                plan = plans[1 if first.index in tracked else 0]
            elif len(inputs) == 2:
                first, second = inputs[0].node, inputs[1].node
                nodes = (first, second)
                mask = 1 if first.index in tracked else 0
                plan = plans[mask + 2 if second.index in tracked else mask]
            else:
                nodes = tuple(map(_node, inputs))
                plan = plans[_mask(nodes, tracked)]
        elif node.aval.smooth:
            nodes = tuple(map(_node, inputs))
            mask = (nodes[0].index in tracked) if len(nodes) == 1 else _mask(nodes, tracked)
            if node.prim.effect is not None:  # elsewhere the operands may be followed
                mask, self._peers = (1 << len(nodes)) - 1, node.prim.effect
            plan = node.prim.plans.get((mask, len(nodes))) or node.prim.plan(mask, len(nodes))
        else:
            return
        if plan.nothing:
            return
        tracked.add(node.index)
        if len(self._records) >= self._sweep_at:
            self._sweep()
        residuals = NOTHING
        if len(plan.slots) == 1:  # most often: without a list in between
            slot = plan.slots[0]
            residuals = (out if slot < 0 else inputs[slot],)
        elif plan.slots:
            there = (*inputs, out)  # slot -1 is the result
            residuals = tuple(map(there.__getitem__, plan.slots))
        record = Applied()
        record.node, record.inputs, record.plan = node, nodes, plan
        record.residuals = NOTHING
        if residuals:
            tracker = tracking.current
            if self.graph is None:  # a budget may have begun since
                self.graph = tracker.graph()
            record.residuals = tracker.save(residuals, node.prim.name)
        self._records.append(record)

    def read(self, variable: Variable, value: Buffer) -> None:
        """A variable was read; only tapes use that."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """A function with a derivative of its own was called."""
        nodes = tuple(b.node if b.node.index in self._tracked else None for b in inputs)
        if call.effects:
            nodes, self._peers = tuple(b.node for b in inputs), call.effects[0].prim.effect
        if any(n is not None for n in nodes) or call.effects:
            if len(self._records) >= self._sweep_at:
                self._sweep()
            results = tuple(b.node for b in outputs)
            self._tracked.update(n.index for n in results if is_inexact(n.aval.dtype))
            self._records.append(Called(call, nodes, results))
            for n in results[: getattr(call, "returned", None)]:
                tracking.current.called(n)

    def _refuse_dry_run(self) -> None:
        """Raise DryRunError if a dry run asks for derivatives of what was recorded before it."""
        if self._records:
            thread.executor.differentiable(self._records[-1].results[0])

    def _sweep(self) -> None:
        """Drop the records of values that nobody can ask about any more, so dead branches take no memory.

        Done when the number of records has doubled, so the time for each record is constant on average.  Backwards,
        since a dropped record may have been the last to name an earlier value.
        """
        kept: list[Record] = []
        needed: set[int] = set()
        records, graph = self._records, self.graph
        while records:
            record = records.pop()
            if self._peers is not None and effects_of(record):
                kept.append(record)
                needed.update(n.index for n in record.followed)
            elif graph is None:
                if type(record) is Applied and record.plan.kept_result is None:  # most often: `held` without a call
                    if count(record.node) - ASKED > 1:
                        kept.append(record)
                elif record.held():
                    kept.append(record)
            elif type(record) is Applied and record.node.index in needed:  # most often
                kept.append(record)
                for n in record.inputs:
                    needed.add(n.index)
            elif self._held(record, graph, needed):
                kept.append(record)
                needed.update(n.index for n in record.followed)
        kept.reverse()
        self._records = kept
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(kept))

    def _held(self, record: Record, graph: Recipes, needed: set[int]) -> bool:
        """The same under a budget, where recipes refer to nodes, too, and tell of other references; this is slower."""
        known = [n.index in needed or graph.held(n, record.keeps_result) for n in record.results]
        return True in known or (None in known and record.held(known))


_FIRST_SWEEP = 64


def _mask(nodes: tuple[Node, ...], tracked: set[int]) -> int:
    """A bit for each node that is tracked."""
    mask, bit = 0, 1
    for n in nodes:
        if n.index in tracked:
            mask += bit
        bit += bit
    return mask


class Trace(Recording):
    """A recording for the engine's own use: follow ``sources`` :meth:`during` a call, pull cotangents back to them."""

    strict = True

    def __init__(self, sources: Iterable[Node]) -> None:
        super().__init__()
        self._indices = [n.index for n in sources]
        self._tracked.update(self._indices)

    def during(self, f: Callable[..., T], *args: object, others: tuple[Recorder, ...] = ()) -> T:
        """What ``f(*args)`` returns, recorded; ``others`` are told besides."""
        self._begin()
        try:
            return during(unwrapped, f, *args, recorders=(*thread.recorders, self, *others))
        finally:
            self.graph = None

    def pull(
        self,
        cts: dict[int, Tensor],
        lead: int | None = None,
        needed: Iterable[int] | None = None,
        consume: bool = True,
        slices: bool = False,
    ) -> list[Any]:
        """The cotangent of each source (of those at ``needed`` positions); ``consume``: the recording is used up.

        ``slices``: cotangents may come as IndexedSlices.
        """
        wanted = set(self._indices if needed is None else (self._indices[i] for i in needed))
        records = self._records
        if consume:
            self._records = []
        walk = partial(backward, records, cts, wanted, consume=consume, lead=lead, slices=slices)
        if self._peers is not None:
            joint = agreed(self._peers, records, cts, wanted)
            grads = walk(path=joint.path, forced=joint.forced)
        else:
            grads = walk(path=None if len(wanted) == len(set(self._indices)) else reachable(records, wanted))
        return [grads.get(i) for i in self._indices]
