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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from tapegrad import buffer as _buffer
from tapegrad.buffer import Buffer
from tapegrad.cell import lookout, overlay
from tapegrad.device import bits, current_device, device
from tapegrad.errors import RecomputeError
from tapegrad.evaluate import array_of, fill
from tapegrad.memory.recompute import Recompute
from tapegrad.memory.rerun import Lookout, RerunTrace, come_for, counted_rerun, results_of
from tapegrad.node import Node, thread
from tapegrad.tensor import Tensor, alias
from tapegrad.transforms.pushing import Pusher
from tapegrad.transforms.recording import Recording
from tapegrad.transforms.zeros import zeros_of


class Slot:
    """Where the bytes of a value are: held here, alive elsewhere, or to be brought back by ``coupling``.

    Either the bytes are held or the coupling is; of the other there is at most a weak reference.
    """

    __slots__ = ("__weakref__", "_alive", "_held", "_maker", "coupling", "handed_over")

    def __init__(self, buffer: Buffer) -> None:
        self._held: Buffer | None = buffer
        self._alive = weakref.ref(buffer)
        self._maker: Callable[[], Coupling | None] = _nobody
        self.coupling: Coupling | None = None
        self.handed_over = False

    def buffer(self) -> Buffer | None:
        """The bytes, if they exist."""
        return self._held if self._held is not None else self._alive()

    def leave_to(self, coupling: Coupling) -> None:
        """Let go of the bytes: ``coupling`` can bring them back."""
        self.coupling, self.handed_over, self._held = coupling, True, None

    def refill(self, buffer: Buffer) -> None:
        """The bytes are back; the coupling may go, as it does when a walk drops its record."""
        self._held, self._alive = buffer, weakref.ref(buffer)
        if self.coupling is not None:
            self._maker, self.coupling = weakref.ref(self.coupling), None

    def settle(self) -> None:
        """The bytes have been used: let go of them again, if the coupling is still there."""
        coupling = self._maker()
        if coupling is not None:
            self.coupling, self._held = coupling, None


def _nobody() -> None:
    """A reference to nothing."""


slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
"""By index of a node, the slot of its value; it lives as long as a coupling of the value."""


class Block(Protocol):
    """What a coupling asks of the block that it belongs to."""

    def checked(self, results: list[Any], a: Tensor) -> Tensor:
        """The one tensor among the results of ``f``, fit to be added to ``a``."""

    def sample(self, a: Tensor) -> Any:
        """What to remember of ``a``; None: nothing, and nothing is to be compared."""

    def compare(self, sample: Any, a: Tensor) -> None:
        """Raise ReversibleError if ``a``, brought back, is not what was sampled."""


def couple(block: Block, f: Recompute, a: Tensor, b: Tensor) -> Tensor:
    """``a + f(b)`` as one call; as plain code where recompute_grad is (no tape, or forward mode inside a tape)."""
    hidden = [r for r in thread.recorders if not isinstance(r, Pusher)]
    pushers = tuple(r for r in thread.recorders if isinstance(r, Pusher))
    inside = hidden and pushers and thread.recorders.index(pushers[-1]) > thread.recorders.index(hidden[0])
    if not hidden or inside:
        return a + block.checked(results_of(f._run((b,), {}, False), Lookout(())), a)
    coupling = Coupling(block, f)
    out, watch = coupling.first_run(a, b, hidden, pushers)
    call = _Call(coupling, watch, a, b)
    if not call.inputs:
        return out
    result = Tensor(alias(out._buffer))
    for p in pushers:
        p.carry(out._buffer, result._buffer)
    for recorder in hidden:
        recorder.record_call(call, call.inputs, (result._buffer,))
    call.inputs = ()
    coupling.hand_over(a, b, out, result, any(isinstance(r, Recording) for r in hidden))
    return result


_number = itertools.count().__next__


class Coupling:
    """One ``out = a + f(b)``: what a rerun of ``f`` must repeat, and the slots of the three values.

    It names no nodes: slots of earlier values refer to it, and must not keep the record of what nobody can ask about.
    """

    def __init__(self, block: Block, f: Recompute) -> None:
        self.name = repr(block)
        self.number = _number()
        self._block, self._f, self._device = block, f, current_device()

    def first_run(self, a: Tensor, b: Tensor, outer: list[Any], pushers: tuple) -> tuple[Tensor, Lookout]:
        """``a + f(b)`` behind the barrier; the look-out has what it used."""
        before, state = thread.recorders, bits.host_state()
        watch = Lookout(outer)
        thread.recorders = (*pushers, watch)
        try:
            with lookout() as seen:
                out = a + self._block.checked(results_of(self._f._run((b,), {}, False), watch), a)
                fill((out._buffer,))
        finally:
            thread.recorders = before
        self._random = None if bits.same_host_state(state, bits.host_state()) else state
        self._cells = {cell: content for cell, (content, _) in seen.items()}
        self._sample = self._block.sample(a)
        return out, watch

    def hand_over(self, a: Tensor, b: Tensor, out: Tensor, result: Tensor, kept: bool) -> None:
        """Give each value its slot; ``kept``: a tape keeps this coupling, so ``a`` may be left to it."""
        self.out = slots[result._buffer.node.index] = Slot(out._buffer)
        self.b = slots.setdefault(b._buffer.node.index, Slot(b._buffer))
        source = slots.get(a._buffer.node.index)
        self._a: Callable[[], Slot | None] = _nobody if source is None else weakref.ref(source)
        if _buffer.accountant is not None:
            _buffer.accountant.wanted(out._buffer, "reversible")
            _buffer.accountant.wanted(b._buffer, "reversible")
        if kept and source not in (None, self.b) and not (source.handed_over or self.b.handed_over):
            source.leave_to(self)

    def again(self, b: Tensor, recording: AbstractContextManager) -> tuple[list[Any], Lookout]:
        """The results of ``f(b)`` once more, with state, random numbers and device of the first run; what it used."""
        now = bits.host_state() if self._random is not None else None
        watch = Lookout(())
        try:
            if self._random is not None:
                bits.set_host_state(self._random)
            with device(self._device), overlay(self._cells), recording, counted_rerun():
                before = thread.recorders
                thread.recorders = (*before, watch)
                try:
                    results = results_of(self._f._run((b,), {}, True), watch)
                finally:
                    thread.recorders = before
        finally:
            if now is not None:
                bits.set_host_state(now)
        return results, watch

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
        with _values():
            (change,) = self.again(Tensor(b), nullcontext())[0]
        self.bring_back(out, change)

    def bring_back(self, out: Buffer | None, change: Tensor) -> None:
        """``a = out - change`` into its slot, if it is missing there; ``change``: the value of ``f(b)``."""
        if out is None:
            return
        with _values():
            a = Tensor(out) - change
            fill((a._buffer,))
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


@contextmanager
def _values() -> Iterator[None]:
    """No tape records in the block; forward mode goes on."""
    before = thread.recorders
    thread.recorders = tuple(r for r in before if isinstance(r, Pusher))
    try:
        yield
    finally:
        thread.recorders = before


class _Call:
    """A coupling as a tape's record sees it: with its inputs' nodes."""

    again: Callable[[list[Any]], list[Any]] | None = None

    def __init__(self, coupling: Coupling, watch: Lookout, a: Tensor, b: Tensor) -> None:
        self.name = coupling.name
        self._coupling, self._start = coupling, watch.start
        self._tapes = [weakref.ref(r) for r in watch.outer]
        self._used, self._captured = set(watch.used), watch.captured.keys() - {a._buffer.node.index}
        found = dict(watch.captured)
        self._places = watch.watched_contents(found)
        self.inputs = tuple(found.values())
        self._nodes: tuple[Node, ...] = tuple(buffer.node for buffer in self.inputs)
        self._a, self._b = a._buffer.node, b._buffer.node

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """Rerun ``f``, bring back ``a``, pull the cotangent of ``out``: to ``a`` as it is, elsewhere through ``f``."""
        (ct,) = cts
        trace = RerunTrace(self._nodes, self._places, self._start)
        change = self._rerun(trace)
        self._coupling.out.settle()
        seeds: dict[int, Any] = {trace.source(i): g for i, g in come_for(self._nodes, needed, come).items()}
        for index in (self._a.index, change._buffer.node.index):
            seeds[index] = seeds[index] + ct if index in seeds else ct
        del change
        found = trace.pull(seeds, lead, needed)
        return [
            zeros_of(n.aval, lead) if g is None and i in needed else g
            for i, (g, n) in enumerate(zip(found, self._nodes, strict=True))
        ]

    def _rerun(self, trace: RerunTrace) -> Tensor:
        """``f(b)``, recorded, and ``a`` brought back with its value."""
        buffer, out = self._coupling.read()
        b = Buffer(array_of(buffer), self._b, (buffer.root(),))  # so whoever follows the value b follows this
        for r in thread.recorders:
            if isinstance(r, Pusher):
                r.carry(buffer, b)
        results, watch = self._coupling.again(Tensor(b), trace)
        change = results[0] if len(results) == 1 else None
        if not isinstance(change, Tensor) or change._buffer.node.aval != self._a.aval:
            raise RecomputeError(f"{self.name}: the rerun returned {results!r:.60}, the first run {self._a.aval!r}")
        tapes = [tape for ref in self._tapes if (tape := ref()) is not None]
        others = [used for i, used in watch.used.items() if i not in self._used]
        if not self._captured <= watch.used.keys() or any(tape.follows(used) for used in others for tape in tapes):
            what = "the rerun used other watched tensors or variables than the first run"
            raise RecomputeError(f"{self.name}: {what}; a captured name was bound to something else in between")
        self._coupling.bring_back(out, change)
        return change
