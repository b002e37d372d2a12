"""Runs of a checkpointed function: what a run uses, how a rerun is recorded, and what of both is kept."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from math import inf
from typing import Any, TypeAlias

from tapegrad import nest
from tapegrad.autodiff.backward import sum_of
from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.records import Applied
from tapegrad.core import tracking
from tapegrad.core.buffer import POSTPONED, Buffer
from tapegrad.core.node import Node, next_index
from tapegrad.core.primitive import Barrier, Opaque
from tapegrad.core.protocols import Call, Recorder
from tapegrad.core.state import thread
from tapegrad.device import is_array
from tapegrad.engine.delegating_executor import DelegatingExecutor
from tapegrad.engine.lowering import copy_of
from tapegrad.engine.realize import catch_up, postponed
from tapegrad.errors import RecomputeError
from tapegrad.tensor import Tensor, convert
from tapegrad.variable import Variable

Cotangents: TypeAlias = list[Tensor | None]
"""None: not connected, or zeros."""
Key: TypeAlias = Hashable
"""Which value of a run (see :meth:`Lookout.alive`)."""
Sums: TypeAlias = "dict[int, Any]"
"""What a walk has summed so far, by node index."""


class Derived:
    """The values of a run, or of several, that depend on watched ones, by node index; it keeps none of them alive."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Key | None, weakref.ref[Buffer]]] = {}
        self._copies: dict[int, weakref.ref[Buffer]] = {}
        self._sweep_at = 1024

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def add(self, value: Buffer, key: Key | None) -> None:
        """Note a value; ``key``: which of its run (see :meth:`Lookout.alive`); None: the content of a variable."""
        self._values[value.node.index] = key, weakref.ref(value)

    def copied(self, copy: Buffer) -> None:
        """Note ``copy``, which has the bytes of a value, too."""
        if copy.node.index in self._values:
            self._copies[copy.node.index] = weakref.ref(copy)

    def next_step(self) -> None:
        """Forget the values that are gone: a later step of a loop uses none of them."""
        if len(self._values) > self._sweep_at:
            self._values = {i: entry for i, entry in self._values.items() if self._get(i) is not None}
            self._copies = {i: ref for i, ref in self._copies.items() if i in self._values}
            self._sweep_at = max(1024, 2 * len(self._values))

    def _get(self, index: int) -> Buffer | None:
        """A value, or its copy, if one of them exists."""
        value = self._values[index][1]()
        if value is None and (copy := self._copies.get(index)) is not None:
            return copy()
        return value

    def alive(self) -> list[tuple[Key, Buffer]]:
        """Return the values that something still refers to, contents of variables excepted, and their keys."""
        values = [(key, self._get(index)) for index, (key, _) in self._values.items() if key is not None]
        return [(key, value) for key, value in values if value is not None]


class Lookout:
    """A recorder of one run: which values from outside does the function use, and which of them are watched outside?

    ``hides``: the recorders outside, which are told of nothing meanwhile.
    ``contents``: of each variable, the contents made in the run and read after that, in the order of reading.
    ``required``: keys of values of the run that are held (see :meth:`alive`), by key in ``held``.
    ``trace``: the tape of a rerun, which tells which values from outside are watched.
    ``derived``: the values made in the run that depend on watched ones, perhaps among those of other runs.
    """

    def __init__(
        self,
        hides: Sequence[Recorder],
        required: Collection[Key] = (),
        trace: Recorder | None = None,
        derived: Derived | None = None,
    ) -> None:
        self.hides = hides
        # Those that look out for others are asked no questions: their number is that of nested calls.  A tape is not
        # kept, since a policy keeps the look-out of a rerun for longer.
        self._followers: list[tuple[float, weakref.ref[Recorder]]] = []
        if trace is not None:
            self._followers.append((inf, weakref.ref(trace)))
        self._outer: list[Derived] = []
        for r in hides:
            if isinstance(r, Lookout):
                self._followers += [(min(before, r.start), follower) for before, follower in r._followers]
                self._outer += [r.derived, *r._outer]
            else:
                self._followers.append((inf, weakref.ref(r)))
        self.required = required
        self.held: dict[Key, Buffer] = {}
        self.dropped: set[int] = set()
        """Values, by ``id``, that are alive since what was returned is a view of them, and that the user has not."""
        self.derived: Derived = derived or Derived()
        self.operations = 0
        """How many the run has applied."""
        self.start: int = next_index()
        self.strict = any(getattr(r, "strict", False) for r in hides)
        """Whether a value that it follows must not become a number (see ``tensor.refuse_detaching``)."""
        self.used: dict[int, Buffer] = {}
        self.captured: dict[int, Buffer] = {}
        self.contents: dict[int, list[Buffer]] = {}
        self.effects: list[Node] = []
        """Operations in which other processes take part."""

    def watched(self, buffer: Buffer) -> bool:
        """Whether a recorder outside follows the value, or another look-out's run has made it of such values."""
        index = buffer.node.index
        for before, ref in self._followers:
            if index < before and (r := ref()) is not None and r.follows(buffer):
                return True
        return any(index in derived for derived in self._outer)

    def follows(self, buffer: Buffer) -> bool:
        """Whether the value is watched outside, or was made in the run and depends on such values.

        False in a rerun: it hides no recorder for which it would answer.
        """
        if not self.hides:
            return False
        index = buffer.node.index
        return index in self.derived or (index < self.start and self.watched(buffer))

    def use(self, buffer: Buffer) -> None:
        """The function reads or returns the value."""
        index = buffer.node.index
        if index < self.start and index not in self.used:
            self.used[index] = buffer
            if self.watched(buffer):
                self.captured[index] = buffer

    def watched_contents(self, inputs: dict[int, Buffer]) -> dict[tuple[int, int], int]:
        """Add to ``inputs`` the contents made in the run that are watched; their places in it."""
        places: dict[tuple[int, int], int] = {}
        for number, contents in self.contents.items():
            for i, buffer in enumerate(contents):
                if self.watched(buffer):
                    places[number, i] = len(inputs)
                    inputs[buffer.node.index] = buffer
        return places

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note what an operation reads, and who takes part in it."""
        if node.prim.effect is not None:
            self.effects.append(node)
        self._note(self.operations, out, derives(node, self._mask(inputs), len(inputs)))
        self.operations += 1

    def _mask(self, inputs: tuple[Buffer, ...]) -> int:
        """Note the use of values; a bit for each that depends on watched ones."""
        mask = 0
        for i, b in enumerate(inputs):
            index = b.node.index
            if index < self.start:
                self.use(b)
            if index in self.derived or index in self.captured:
                mask += 1 << i
        return mask

    def _note(self, key: Key, value: Buffer, derived: bool) -> None:
        if key in self.required:
            self.held[key] = value
        if derived:
            self.derived.add(value, key)

    def alive(self) -> dict[Key, Buffer]:
        """Return the values made in the run that depend on watched ones and that something still refers to, by key.

        A key says which operation of the run made the value, counted from its beginning; of a call, also which result.
        A rerun, which does the same operations, has the same keys.
        """
        return {key: value for key, value in self.derived.alive() if id(value) not in self.dropped}

    def release(self) -> None:
        """Hold no values any longer."""
        for values in (self.used, self.captured, self.contents, self.held):
            values.clear()

    def read(self, variable: Variable, value: Buffer) -> None:
        """Tapes outside watch variables read inside."""
        for r in self.hides:
            r.read(variable, value)
        if value.node.index > self.start:
            known = self.contents.setdefault(variable.construction_number, [])
            if not any(value is b for b in known):
                known.append(value)
                if value.node.index not in self.derived and self.watched(value):
                    self.derived.add(value, None)

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        derived = bool(self._mask(inputs) or call.effects)
        self.effects += call.effects
        keys = getattr(call, "output_keys", None) or range(len(outputs))
        for key, out in zip(keys, outputs, strict=True):
            self._note((self.operations, key), out, derived and out.node.aval.smooth)
        self.operations += 1


def derives(node: Node, mask: int, count: int) -> bool:
    """Whether the result of an operation depends on those of its ``count`` operands that have a bit in ``mask``."""
    if not node.aval.smooth:
        return False
    if node.prim.effect is not None:  # elsewhere it may depend on something watched
        return True
    if not mask:
        return False
    site: Any = node.site
    plan = node.prim.plan(mask, count) if site is None else site.plans[mask]
    return not plan.nothing


class Tracker:
    """A recorder of the steps of a loop: which values depend on watched ones?  It keeps none of them.

    A value made in one step may reach another one only as part of the state.  Raises RecomputeError otherwise, where a
    gradient would be lost.
    """

    def __init__(self, watch: Lookout) -> None:
        self._watch, self.strict = watch, watch.strict
        self.tracked: set[int] = set()
        self._made: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._strays: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()

    def follows(self, buffer: Buffer) -> bool:
        """Whether the value depends on something watched."""
        return buffer.node.index in self.tracked or self._watch.watched(buffer)

    def next_step(self, state: Sequence[Buffer]) -> None:
        """A step is over; the values in ``state`` go on, all others should not be seen again."""
        self.tracked = {b.node.index for b in state if self.follows(b)}
        for b in self._made:
            if b.node.index not in self.tracked:
                self._strays[b.node.index] = b
        going_on = (b for b in state if b.node.index in self.tracked)
        self._made = weakref.WeakSet(going_on)  # strays as soon as the state has others

    def look_at(self, results: Iterable[object]) -> None:
        """A step has returned these leaves."""
        self._mask(tuple([r._buffer for r in results if isinstance(r, Tensor)]))

    def _mask(self, inputs: tuple[Buffer, ...]) -> int:
        mask = 0
        for i, b in enumerate(inputs):
            if self.follows(b):
                self.tracked.add(b.node.index)
                mask += 1 << i
            elif b.node.index in self._strays:
                raise RecomputeError(
                    f"checkpointed_loop: a step uses {b.node.aval!r}, which an earlier step made, but which is not "
                    "part of the state: let the step return it, and take it, as part of its state"
                )
        return mask

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """An operation was applied."""
        if derives(node, self._mask(inputs), len(inputs)):
            self._note(out)

    def _note(self, out: Buffer) -> None:
        self.tracked.add(out.node.index)
        self._made.add(out)

    def read(self, variable: Variable, value: Buffer) -> None:
        """Contents of variables are watched, or not, by the tapes outside."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        if self._mask(inputs) or call.effects:
            for out in outputs:
                if out.node.aval.smooth:
                    self._note(out)


class StepTrace(Trace):
    """The tape of one step of a first run, which shares a tracker's ``tracked``; its sources are told later."""

    strict = False  # the tracker is, if the tape that asked for the run is

    def __init__(self, tracked: set[int]) -> None:
        super().__init__(())
        self._tracked = tracked

    def become(self, indices: list[int]) -> None:
        """These are the indices of the sources' nodes."""
        self._indices = indices

    def source(self, position: int) -> int:
        """The index of a source's node."""
        return self._indices[position]


class RerunTrace(Trace):
    """The tape of a rerun.  What it reads of a variable assigned inside stands for what the first run read there.

    ``places``: positions among the sources by (variable's number, how many such contents were read before).
    ``strict``: whether a tape that the first run was hidden from is.
    """

    def __init__(self, nodes: Sequence[Node], places: dict[tuple[int, int], int], start: int, strict: bool) -> None:
        super().__init__(nodes)
        self.strict = strict
        self._places, self._start = places, start
        self._read: dict[int, list[int]] = {}

    def source(self, position: int) -> int:
        """The index of a source's node in this run."""
        return self._indices[position]

    def compute(self, results: Iterable[Buffer]) -> None:
        """Compute the lazy values that rules read on the way back from ``results``."""
        reached = {b.node.index for b in results}
        wanted: list[Applied] = []
        for record in reversed(self._records):
            if any(n.index in reached for n in record.results):
                reached.update(n.index for n in record.followed)
                if type(record) is Applied:
                    wanted.append(record)
        wanted.reverse()
        catch_up(b for record in wanted for b in record.there())

    def resume(self, number: int, count: int, index: int | None) -> None:
        """``count`` contents of a variable were read before; the last of them, ``index``, is its content now."""
        known = self._read[number] = [0] * count
        if index is not None:
            known[-1] = index
            self._stands_for(index, number, count - 1)

    def _stands_for(self, index: int, number: int, count: int) -> None:
        position = self._places.get((number, count))
        if position is not None:
            self._indices[position] = index
            self._tracked.add(index)

    def read(self, variable: Variable, value: Buffer) -> None:
        """A content made inside is a source, too."""
        index = value.node.index
        known = self._read.setdefault(variable.construction_number, [])
        if index > self._start and index not in known:
            known.append(index)
            self._stands_for(index, variable.construction_number, len(known) - 1)


class Postponing(DelegatingExecutor):
    """Postpones what a rerun applies until a rule, or the function itself, reads it.

    So a rerun runs the whole function (it may print, count, draw), but computes no value that nobody reads, such as the
    last product of a layer.  Elementwise nodes that need nothing postponed are lazy anyway.  Where others than the
    rerun's own tape record, run forward, or batch, nodes are applied at once.
    """

    def __init__(self, watch: Lookout) -> None:
        self._watch = watch
        self._walks = thread.walks
        self._alone = len(thread.recorders) == 2 and not thread.batches  # the rerun's tape and its look-out

    def value(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """A postponed value; a view, or an elementwise one, only if what it is made from is postponed."""
        if (
            self._alone
            and thread.recorders[-1] is self._watch
            and thread.deferring is None
            and thread.walks == self._walks
            and not thread.batches
        ):
            prim = node.prim
            if isinstance(prim, Barrier):
                at_once = isinstance(prim, Opaque) and prim.at_once
            else:
                at_once = not any(b.state == POSTPONED and b.array is None for b in inputs)
            if not at_once:
                return postponed(node, inputs)
        return super().value(node, inputs)


def come_for(nodes: Sequence[Node], needed: Iterable[int], come: Sums) -> dict[int, Any]:
    """What a walk has summed for a call's inputs, taken out, by position.

    The call adds to it, so that sums have the order, and the bits, of the plain function's.
    """
    cts = {}
    for i in needed:
        g = come.pop(nodes[i].index, None)
        if g is not None:
            cts[i] = sum_of(g, nodes[i].aval)
    return cts


def results_of(y: object, watch: Lookout) -> list[object]:
    """The leaves of a run's results, variables read, tensors noted as used."""
    results = [convert(leaf) if isinstance(leaf, (Tensor, Variable)) else leaf for leaf in nest.flatten(y)]
    for leaf in results:
        if isinstance(leaf, Tensor):
            watch.use(leaf._buffer)
    return results


def alone(result: object, start: int) -> object:
    """A slice of an intermediate result, made after ``start``, copied so that the rest of it can go.

    Slices with gaps stay as they are: a copy lies otherwise in memory, and what reads it might round otherwise.
    """
    if not isinstance(result, Tensor):
        return result
    buffer, root = result._buffer, result._buffer.root()
    array: Any = buffer.array
    whole = root.node.aval.nbytes <= buffer.node.aval.nbytes or root.node.index < start
    if whole or not array.flags.c_contiguous:
        return result
    node = buffer.node
    tracker = tracking.current
    with tracker.reserved((node.aval,), ("a slice of a result",)):
        copied = Buffer(thread.executor.do(copy_of(array, node.aval))[0], node)
    tracker.filled(copied)
    for r in thread.recorders:
        if isinstance(r, Pusher):
            r.carry(buffer, copied)
        elif isinstance(r, Lookout):
            r.derived.copied(copied)
    return Tensor(copied)


def snapshots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Containers and foreign arrays copied, because they may change before, or in, the rerun; all else is itself."""
    return snapshot(args), snapshot(kwargs)


def snapshot(tree: Any) -> Any:
    """The same of one structure."""
    return nest.map_leaves(_snapshot, tree)


def _snapshot(leaf: Any) -> Any:
    """A copy of a foreign array, which may change before the rerun; anything else is itself.

    Raises RecomputeError for an iterator, which the first run uses up.
    """
    if type(leaf) is Tensor:
        return leaf
    if type(leaf) is Argument:
        return leaf.tensor()
    if is_array(leaf):
        return thread.executor.in_earnest(leaf.copy, leaf)
    if hasattr(type(leaf), "__next__"):
        raise RecomputeError(
            f"a checkpointed call has the argument {leaf!r:.60}: a {type(leaf).__name__} can be read only once, so the "
            "rerun could not repeat the first run; pass a list or a tuple of its items"
        )
    return leaf


class Argument:
    """A tensor among a call's arguments, held as tapes hold residuals: it may be evicted, and recomputed."""

    __slots__ = ("residuals",)

    def __init__(self, residuals: Any) -> None:
        self.residuals = residuals

    def tensor(self) -> Tensor:
        """Return the tensor, recomputed if necessary."""
        (buffer,) = self.residuals.restored()
        return Tensor(buffer)


def kept_by_tapes(leaf: object) -> object:
    """A tensor as an :class:`Argument` where somebody keeps memory within a budget; anything else is itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    residuals = tracking.current.save((leaf._buffer,))
    return leaf if type(residuals) is tuple else Argument(residuals)
