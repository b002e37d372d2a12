"""Recording: which values depend on the watched ones, and what must be kept to differentiate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any, TypeVar

from tapegrad.autodiff.backward import Record, backward, reachable
from tapegrad.core import account
from tapegrad.core.buffer import NOTHING, Buffer
from tapegrad.core.node import Node, leaf
from tapegrad.core.protocols import Call, Recipes, Recorder
from tapegrad.core.rule import OUT, Plan
from tapegrad.core.state import during, thread
from tapegrad.device.dtypes import is_inexact
from tapegrad.errors import TapeError
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.variable import Variable

T = TypeVar("T")
_node = attrgetter("node")


class Recording:
    """A recorder that keeps records of all that depends on ``_tracked`` values (by node index)."""

    strict = False
    """Whether a value that it follows must not silently become an array (see ``Tensor.__array__``)."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._tracked: set[int] = set()
        self._sweep_at = _FIRST_SWEEP
        self.graph: Recipes | None = None
        self.lines: dict[int, Any] = {}

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TapeError(
            "a tape is neither copied nor pickled: its records are values of this process; pickle the gradients"
        )

    def _begin(self) -> None:
        """Recording begins: whoever keeps memory within a budget has to know how values are made, from now on."""
        self.graph = account.current.graph()

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
                nodes = (inputs[0].node,)
                plan = plans[nodes[0].index in tracked]
            elif len(inputs) == 2:
                nodes = (inputs[0].node, inputs[1].node)
                plan = plans[(nodes[0].index in tracked) + 2 * (nodes[1].index in tracked)]
            else:
                nodes = tuple(map(_node, inputs))
                plan = plans[_mask(nodes, tracked)]
        elif node.aval.smooth:
            nodes = tuple(map(_node, inputs))
            mask = _mask(nodes, tracked)
            plan = node.prim.plans.get((mask, len(nodes))) or node.prim.plan(mask, len(nodes))
        else:
            return
        if not plan.pulls and not plan.lacking:
            return
        tracked.add(node.index)
        if len(self._records) >= self._sweep_at:
            self._sweep()
        residuals: Any = NOTHING
        if len(plan.slots) == 1:  # most often: without a list in between
            slot = plan.slots[0]
            residuals = (out if slot < 0 else inputs[slot],)
        elif plan.slots:
            residuals = tuple([out if slot < 0 else inputs[slot] for slot in plan.slots])
        self._records.append((node, nodes, plan, account.current.recorded(self, node, residuals)))

    def read(self, variable: Variable, value: Buffer) -> None:
        """A variable was read: of no concern to a bare recording."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """A function with a derivative of its own was called."""
        nodes = tuple(b.node if b.node.index in self._tracked else None for b in inputs)
        if any(n is not None for n in nodes):
            if len(self._records) >= self._sweep_at:
                self._sweep()
            results = tuple(b.node for b in outputs)
            self._tracked.update(n.index for n in results if is_inexact(n.aval.dtype))
            self._records.append((call, nodes, None, results))
            for n in results:
                account.current.called(self, n)

    def _refuse_dry_run(self) -> None:
        """Raise DryRunError if a dry run asks for derivatives of what was recorded before it."""
        if self._records:
            node, _, plan, residuals = self._records[-1]
            thread.executor.differentiable(node if plan is not None else residuals[0])

    def _sweep(self) -> None:
        """Drop the records of values that nobody can ask about any more: dead branches cost nothing for long.

        Done when the number of records has doubled, so a record costs a constant time on the whole.  Backwards, since a
        dropped record may have been the last to name an earlier value.
        """
        kept: list[Record] = []
        needed: set[int] = set()
        while self._records:
            record = self._records.pop()
            if self.graph is None:
                dead = _is_dead(record)
            else:
                dead = self._is_dead(record, needed)
                if not dead:
                    needed.update(n.index for n in record[1] if n is not None)
            if not dead:
                kept.append(record)
        kept.reverse()
        self._records = kept
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(kept))
        if self.lines:
            left = {n.index for r in kept for n in ((r[0],) if r[2] is not None else r[3])}
            self.lines = {i: line for i, line in self.lines.items() if i in left}

    def _is_dead(self, record: Record, needed: set[int]) -> bool:
        """The same under a budget, where recipes refer to nodes: they know who else does; this is slower."""
        held = self._held(record, needed)
        if True in held:
            return False
        if None not in held:
            return True
        if record[2] is None:
            return all(h is False or n == _CALLED[0] for h, n in zip(held, _references(record), strict=True))
        return _is_dead(record)

    def _held(self, record: Record, needed: set[int]) -> list[bool | None]:
        """Of each value that a record has made, whether somebody may ask for it; None: only references can tell."""
        graph: Any = self.graph
        plan = record[2]
        mine = plan is not None and OUT in plan.slots
        made = record[3] if plan is None else (record[0],)
        return [n.index in needed or graph.held(n, mine) for n in made]


_FIRST_SWEEP = 64


def _references(record: Record) -> tuple[int, ...]:
    """How often what a record has made is referred to: its node, or nodes, and its buffer if the record keeps it."""
    node, _, plan, residuals = record
    if plan is None:
        return tuple([getrefcount(n) for n in residuals])
    if OUT not in plan.slots:
        return (getrefcount(node),)
    out = residuals[plan.slots.index(OUT)]
    return getrefcount(node), getrefcount(out)


def _examples() -> list[Record]:
    """Records of things that nothing else refers to: a value gone, a value kept by its record, a call."""
    aval: Any = None
    kept = Buffer(None, leaf(aval))
    return [
        (leaf(aval), (), Plan((), (), ()), ()),
        (kept.node, (), Plan((OUT,), (), ()), (kept,)),
        (None, (), None, (leaf(aval),)),
    ]


# Counted, not known: interpreters differ in what they count for a local name or an argument.
_GONE, _KEPT, _CALLED = map(_references, _examples())


def _is_dead(record: Record) -> bool:
    """Whether only the record itself refers to what it made: no tensor, no other record, no pending buffer."""
    plan = record[2]
    if plan is None:
        return all(n == _CALLED[0] for n in _references(record))
    keeps = OUT in plan.slots
    if keeps and type(record[3]) is not tuple:  # kept within a budget
        return False
    return _references(record) == (_KEPT if keeps else _GONE)


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

    def during(self, f: Callable[..., T], *args: Any, others: tuple[Recorder, ...] = ()) -> T:
        """What ``f(*args)`` returns, recorded; ``others`` are told besides."""
        self._begin()
        try:
            return during(f, *args, recorders=(*thread.recorders, self, *others))
        finally:
            self.graph = None

    def pull(
        self,
        cts: dict[int, Tensor],
        lead: int | None = None,
        needed: Iterable[int] | None = None,
        consume: bool = True,
    ) -> list[Tensor | None]:
        """The cotangent of each source (of those at ``needed`` positions); ``consume``: the recording is used up."""
        wanted = set(self._indices if needed is None else (self._indices[i] for i in needed))
        records = self._records
        if consume:
            self._records = []
        path = None if len(wanted) == len(set(self._indices)) else reachable(records, wanted)
        grads = backward(records, cts, wanted, consume=consume, path=path, lead=lead)
        return [grads.get(i) for i in self._indices]
