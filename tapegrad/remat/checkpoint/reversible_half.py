"""Couplings ``out = a + f(b)`` that keep no activation: the half of a reversible block, and how halves hand over.

A coupling enters the tapes as one call.  Its gradient needs ``b`` and one rerun of ``f``, which also gives back
``a = out - f(b)``.  Each value that a coupling needs has a *slot*, which says where its bytes are or which coupling can
bring them back.  When ``a`` of a new coupling has a slot, the slot lets go of the bytes and relies on that coupling; so
of a chain only the last two values are kept, however the couplings were called: a plain loop will do.  The backward
walk meets the couplings last to first, and each fills the slot that the one before it reads.  A value that someone else
keeps (a tensor in the user's hands, another record) is simply there, and is used; one whose coupling the walk does not
meet is brought back on demand.

No slot may rely on itself, by however many steps.  So a coupling takes over ``a`` only while ``b`` is kept: the last of
the hand-overs in a circle would have found its ``b`` handed over already.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.recording import Recording, Trace
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen
from tapegrad.core.protocols import Recorder
from tapegrad.core.state import during, thread
from tapegrad.engine.realize import array_of, realize
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.checkpoint import (
    Checkpoint,
    record_escaped,
    recorders_of_a_call,
    renamed,
)
from tapegrad.remat.checkpoint.recompute import Recompute
from tapegrad.remat.checkpoint.rerun_tape import Cotangents, Lookout, RerunTrace, Sums, results_of
from tapegrad.tensor import Tensor


class Slot:
    """Where the bytes of a value are: held here, alive elsewhere, or to be brought back by ``coupling``.

    Either the bytes are held or the coupling is; of the other there is at most a weak reference.
    """

    __slots__ = ("__weakref__", "_alive", "held", "_maker", "coupling", "handed_over")

    def __init__(self, buffer: Buffer) -> None:
        self.held: Buffer | None = buffer
        self._alive = weakref.ref(buffer)
        self._maker: Callable[[], Coupling | None] = _nobody
        self.coupling: Coupling | None = None
        self.handed_over = False

    def buffer(self) -> Buffer | None:
        """The bytes, if they exist."""
        return self.held if self.held is not None else self._alive()

    def leave_to(self, coupling: Coupling) -> None:
        """Let go of the bytes: ``coupling`` can bring them back."""
        self.coupling, self.handed_over, self.held = coupling, True, None

    def refill(self, buffer: Buffer) -> None:
        """The bytes are back; the coupling may go, as it does when a walk drops its record."""
        self.held, self._alive = buffer, weakref.ref(buffer)
        if self.coupling is not None:
            self._maker, self.coupling = weakref.ref(self.coupling), None

    def settle(self) -> None:
        """The bytes have been used: let go of them again, if the coupling is still there."""
        coupling = self._maker()
        if coupling is not None:
            self.coupling, self.held = coupling, None


def _nobody() -> None:
    """A reference to nothing."""


slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
"""By index of a node, the slot of its value; it lives as long as a coupling of the value."""


class Block(Protocol):
    """What a coupling asks of the block that it belongs to."""

    def checked(self, results: list[object], a: Tensor) -> Tensor:
        """The one tensor among the results of ``f``, fit to be added to ``a``."""

    def sample(self, a: Tensor) -> Any:
        """What to remember of ``a``; None: nothing, and nothing is to be compared."""

    def compare(self, sample: Any, a: Tensor) -> None:
        """Raise ReversibleError if ``a``, brought back, is not what was sampled."""


def couple(block: Block, f: Recompute, a: Tensor, b: Tensor) -> Tensor:
    """``a + f(b)`` as one call; as plain code where recompute_grad is (no tape, or forward mode inside a tape)."""
    hidden, pushers = recorders_of_a_call()
    if not hidden:
        return a + block.checked(results_of(f._run((b,), {}, False), Lookout(())), a)
    call = _Call(block, f, hidden, a, b)
    out, watch = call.first_run(a, b, hidden, pushers)
    if not call.inputs and not call.effects:
        return out
    (result,) = renamed([out], pushers)
    for recorder in hidden:
        recorder.record_call(call, call.inputs, (result._buffer,))
    escaped = [value for value in watch.alive().values() if value is not out._buffer]
    record_escaped(hidden, call, call.inputs, escaped)
    call.inputs = ()
    call.coupling.hand_over(a, b, out, result, any(isinstance(r, Recording) for r in hidden))
    call.tell_kept()
    return result


_number = itertools.count().__next__


class Coupling:
    """One ``out = a + f(b)``: what a rerun of ``f`` must repeat, and the slots of the three values.

    It names no nodes: slots of earlier values refer to it, and must not keep the record of what nobody can ask about.
    """

    def __init__(self, block: Block, f: Recompute, call: _Call) -> None:
        self.number = _number()
        self._block, self._f, self._setting, self._call = block, f, call.setting, weakref.ref(call)

    def first_run(self, a: Tensor, b: Tensor, watch: Lookout) -> Tensor:
        """``a + f(b)``, in the first run."""
        out = a + self._block.checked(results_of(self._f._run((b,), {}, False), watch), a)
        realize((out._buffer,))
        return out

    def sample(self, a: Tensor) -> None:
        """Remember some of ``a``."""
        self._sample = self._block.sample(a)

    def hand_over(self, a: Tensor, b: Tensor, out: Tensor, result: Tensor, kept: bool) -> None:
        """Give each value its slot; ``kept``: a tape keeps this coupling, so ``a`` may be left to it."""
        self.out = slots[result._buffer.node.index] = Slot(out._buffer)
        self.b = slots.setdefault(b._buffer.node.index, Slot(b._buffer))
        source = slots.get(a._buffer.node.index)
        self._a: Callable[[], Slot | None] = _nobody if source is None else weakref.ref(source)
        if kept and source not in (None, self.b) and not (source.handed_over or self.b.handed_over):
            source.leave_to(self)

    def again(self, b: Tensor, watch: Lookout, recording: Trace | None = None) -> tuple[list[Any], Seen]:
        """The results of ``f(b)`` once more, and the cells seen."""
        return self._setting.repeated(recording, watch, lambda watch: results_of(self._f._run((b,), {}, True), watch))

    def read(self) -> tuple[Buffer, Buffer | None]:
        """The bytes of ``b``, and of ``out`` if ``a`` is missing or to be compared."""
        slot = self._a()
        if self._sample is None and (slot is None or slot.buffer() is not None):
            return obtain(self.b)[0], None
        b, out = obtain(self.b, self.out)
        return b, out

    def invert(self) -> None:
        """Bring back ``a``, for its value alone."""
        b, out = self.read()
        call = self._call()
        watch = Lookout((), (), None if call is None else call.sources(b))
        try:
            self.bring_back(out, _value(self.again, Tensor(b), watch)[0][0])
        finally:
            if call is not None:
                _value(call.refuse_survivors, watch.derived)

    def bring_back(self, out: Buffer | None, change: Tensor) -> None:
        """``a = out - change`` into its slot, if it is missing there; ``change``: the value of ``f(b)``."""
        if out is None:
            return

        a = _value(lambda: Tensor(out) - change)
        _value(realize, (a._buffer,))
        if self._sample is not None:
            self._block.compare(self._sample, a)
        slot = self._a()
        if slot is not None and slot.buffer() is None:
            slot.refill(a._buffer)


def obtain(*wanted: Slot) -> list[Buffer]:
    """The bytes of slots; gone ones are brought back by inverting, for values alone, what came after them."""
    needed: dict[int, Coupling] = {}
    waiting = list(wanted)
    while waiting:
        gone = waiting.pop()
        coupling = gone.coupling
        if gone.buffer() is None and coupling is not None and coupling.number not in needed:
            needed[coupling.number] = coupling
            waiting += [coupling.out, coupling.b]
    reads = Counter([*wanted, *(slot for c in needed.values() for slot in (c.out, c.b))])
    for number in sorted(needed, reverse=True):
        coupling = needed.pop(number)
        coupling.invert()
        for slot in (coupling.out, coupling.b):
            reads[slot] -= 1
            if not reads[slot]:
                slot.settle()
    return [buffer for slot in wanted if (buffer := slot.buffer()) is not None]


def _value(f: Callable[..., Any], *args: Any) -> Any:
    """What ``f(*args)`` returns; no tape records it, forward mode goes on."""
    return during(f, *args, recorders=tuple(r for r in thread.recorders if isinstance(r, Pusher)))


class _Call(Checkpoint):
    """A coupling as a tape's record sees it: with its inputs' nodes."""

    def __init__(self, block: Block, f: Recompute, hidden: list[Recorder], a: Tensor, b: Tensor) -> None:
        super().__init__(repr(block), hidden)
        self.coupling = Coupling(block, f, self)
        self._a, self._b = a._buffer.node, b._buffer.node

    def first_run(
        self, a: Tensor, b: Tensor, hidden: list[Recorder], pushers: tuple[Any, ...]
    ) -> tuple[Tensor, Lookout]:
        """``a + f(b)`` behind the barrier, and the look-out."""
        out, watch, seen = self.setting.noting(hidden, pushers, lambda watch, _: self.coupling.first_run(a, b, watch))
        self.coupling.sample(a)
        self.note_uses(watch, seen, (), (self._a.index,))
        return out, watch

    def kept(self) -> Iterator[object]:
        """The bytes that its slots hold."""
        yield from (slot.held for slot in (self.coupling.out, self.coupling.b) if slot.held is not None)

    def sources(self, b: Buffer) -> Trace:
        """A tape that follows what this one's rerun depends on, where its argument is ``b``."""
        return Trace([b.node, *self._nodes])

    def pullback(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        """Rerun ``f``, bring back ``a``, pull the cotangent of ``out``: to ``a`` as it is, elsewhere through ``f``."""
        (ct,) = cts
        trace = self.trace()
        watch = Lookout((), (), trace)
        try:
            index = self._rerun(trace, watch)
            self.coupling.out.settle()
            watch.release()
            return self.pull(trace, [(self._a.index, ct), (index, ct)], needed, lead, come)
        finally:
            self.refuse_survivors(watch.derived)

    def _rerun(self, trace: RerunTrace, watch: Lookout) -> int:
        """``f(b)``, recorded, and ``a`` brought back with its value; the index of the node of ``f(b)``."""
        buffer, out = self.coupling.read()
        b = Buffer(array_of(buffer), self._b, base=buffer.root())  # so whoever follows the value b follows this
        for r in thread.recorders:
            if isinstance(r, Pusher):
                r.carry(buffer, b)
        results, seen = self.coupling.again(Tensor(b), watch, trace)
        change = results[0] if len(results) == 1 else None
        if not isinstance(change, Tensor) or change._buffer.node.aval != self._a.aval:
            raise RecomputeError(f"{self.name}: the rerun returned {results!r:.60}, the first run {self._a.aval!r}")
        self.compare_uses(self._numbers(seen), watch.used)
        self.coupling.bring_back(out, change)
        return change._buffer.node.index
