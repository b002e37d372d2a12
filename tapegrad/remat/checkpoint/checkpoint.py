"""Checkpoints: what a first run notes, what its rerun is given back, and how the two are compared.

The first run happens behind a barrier: tapes outside do not record (tapes opened inside do), while a look-out notes
which watched values and which cells (variables, random generators) the function uses.  The call then enters the tapes
as one record.  The rerun sees the cells' contents of the first run (what it writes is dropped), the same device and the
same random numbers; it is recorded by a fresh tape that follows the call's inputs, and by the tapes that are recording
at that moment: so derivatives of any order are right without a rule for them.

``recompute_grad``, reversible blocks and loops stand on this; they differ in what they keep and in what they run again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen, lookout, overlay
from tapegrad.core.node import Node, next_index
from tapegrad.core.protocols import Recorder
from tapegrad.core.state import during, precision, thread
from tapegrad.device import current_device, device
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics import bits
from tapegrad.device.threads import NAME as HELPER
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.rerun_tape import Cotangents, Derived, Lookout, RerunTrace, Sums, come_for
from tapegrad.tensor import Tensor, alias
from tapegrad.tracing.frames import line_of, user_place
from tapegrad.variable import last_number, trainables

T = TypeVar("T")


def recorders_of_a_call() -> tuple[list[Recorder], tuple[Pusher, ...]]:
    """The tapes that a checkpointed call is hidden from, and the forward-mode recorders that go on.

    No tapes: the function is to run as it is.  So it does where forward mode runs inside an outer tape.
    """
    recorders = thread.recorders
    hidden = [r for r in recorders if not isinstance(r, Pusher)]
    pushers = tuple(r for r in recorders if isinstance(r, Pusher))
    if hidden and pushers and recorders.index(pushers[-1]) > recorders.index(hidden[0]):
        return [], pushers
    return hidden, pushers


def renamed(results: Sequence[Any], pushers: Iterable[Pusher]) -> list[Any]:
    """Results of a call: tensors under names of their own, with the companions they had."""
    outputs = [Tensor(alias(r._buffer)) if isinstance(r, Tensor) else r for r in results]
    for old, new in zip(results, outputs, strict=True):
        if isinstance(new, Tensor):
            for p in pushers:
                p.carry(old._buffer, new._buffer)
    return outputs


class Setting:
    """What a function finds around it when it runs: device, autocasts, contents of cells, generators of the host.

    :meth:`noting` makes the first run, :meth:`repeated` a rerun.  ``name``: of the call, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells: dict[Any, Any] = {}
        self.draws = HostDraws(name)
        self._device = current_device()
        self.surroundings: dict[str, Any] = {"autocasts": thread.autocasts, "precision": precision()}

    def noting(
        self, outer: Sequence[Recorder], pushers: tuple[Any, ...], f: Callable[[Lookout, Seen], T]
    ) -> tuple[T, Lookout, Seen]:
        """What the first run, ``f(watch, seen)``, returns, and the two.  Tapes in ``outer`` do not record."""
        self.draws.begin()
        watch = Lookout(outer)
        self.start, self.strict = watch.start, watch.strict
        with lookout() as seen:
            self.began = next_index()
            try:
                results = during(f, watch, seen, recorders=(*pushers, watch))
            except BaseException:  # it may carry values out
                record_escaped(outer, self, tuple(watch.captured.values()), watch.alive().values())
                raise
        self.draws.end()
        self.cells = {cell: content for cell, (content, _) in seen.items()}
        self.jumps = seen.jumps
        self._exchanged = [v.name for cell, (_, v) in seen.items() if v is not None and cell in seen.jumps]
        return results, watch, seen

    def repeated(self, recording: Trace | None, watch: Lookout, f: Callable[[Lookout], T]) -> tuple[T, Seen]:
        """What a rerun, ``f(watch)``, returns, and the cells seen; ``recording`` records it.  Raises RecomputeError."""
        self.refuse_exchanged()
        with self.draws.repeated(), device(self._device), overlay(self.cells, self.jumps), lookout() as seen:
            if recording is not None:
                results = recording.during(self._counted, f, watch, others=(watch,))
            else:
                results = during(self._counted, f, watch, recorders=(*thread.recorders, watch))
        return results, seen

    def _counted(self, f: Callable[[Lookout], T], watch: Lookout) -> T:
        rerun = partial(tracking.current.rerun, f, watch, shift=self.began - next_index())
        return during(rerun, **self.surroundings)

    def refuse_exchanged(self) -> None:
        """Raise RecomputeError if another thread has assigned to a variable in the middle of the first run."""
        if self._exchanged:
            raise RecomputeError(
                f"{self.name}: another thread assigned to {self._exchanged} while the function ran first; what each "
                "read found cannot be told: let threads assign between calls, or take a lock around both"
            )

    @contextmanager
    def placed(self, contents: dict[Any, Any]) -> Iterator[Seen]:
        """A part of a rerun that begins with other ``contents`` of cells; gives the cells seen."""
        self.refuse_exchanged()
        with device(self._device), overlay(contents, self.jumps), lookout() as seen:
            yield seen


class HostDraws:
    """What a first run draws from the host's generators (NumPy's and Python's), which all threads share.

    A rerun must draw the same.  It is set to where the first run began, and must end where that ended: if another
    thread has drawn in between, in either run, numbers are not those of the first run.  A rerun that draws nothing
    takes no other numbers, and is right.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: Any = None
        self._ended: Any = None
        self.moved: tuple[int, ...] = ()
        """Positions, in ``bits.HOSTS``, of the generators that have moved."""

    def begin(self) -> None:
        """The first run begins."""
        self._mark = bits.words_mark()
        self._begun = bits.host_state()

    def end(self) -> None:
        """The first run is over."""
        self._ended = bits.host_state_after(self._begun, self._mark)
        self.moved = bits.moved(self._begun, self._ended)
        if not self.moved:
            self._begun = self._ended = None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A rerun; afterwards the generators are as they were.  Raises RecomputeError."""
        if not self.moved:
            before = bits.words_mark()
            yield
            if bits.words_mark() != before and _only_thread():  # else another thread may draw what it likes
                raise self.another((), "the rerun")
            return
        now = bits.set_host_state(self._begun, self.moved)
        try:
            yield
            state = bits.host_state()
            wrong = set(bits.moved(self._ended, state)) & set(bits.moved(self._begun, state)) & set(self.moved)
            if wrong:
                raise self.another(tuple(wrong), "the rerun")
        finally:
            bits.set_host_state(now, self.moved)

    def another(self, which: tuple[int, ...], rerun: str) -> RecomputeError:
        """The error for a ``rerun`` that drew otherwise from the generators ``which``; (): from one not used before."""
        if which:
            what = (
                f"did not draw from {' or '.join(bits.HOSTS[i] for i in which)} what the first run drew: another "
                "thread drew from it meanwhile, or the function draws otherwise each time"
            )
        else:
            what = f"drew from {bits.HOSTS[0]}, the first run did not"
        return RecomputeError(
            f"{self._name}: {rerun} {what}.  Draw from tg.random, which threads may share, or from a generator that "
            "the function makes from a seed (np.random.default_rng(seed)), or pass the random numbers as arguments"
        )


def _only_thread() -> bool:
    """Whether no other thread of the program's could have drawn."""
    return all(t is threading.current_thread() or t.name.startswith(HELPER) for t in threading.enumerate())


class Escaped:
    """The record of values that have left a checkpointed call other than through its result.

    They have no derivative: to ask for one raises RecomputeError.  A tape would not know that they depend on what it
    watches, and their gradients would be lost without a word.
    """

    again: Callable[[list[Any]], list[Any]] | None = None
    pushforward = None
    effects: Sequence[Node] = ()
    returned = 0
    """How many of the values the call returned; the others are those that left it otherwise."""

    def __init__(self, call: Checkpoint | Setting, values: Sequence[Buffer], ran: str) -> None:
        self.name, self._call = call.name, weakref.ref(call)
        self._values = [(b.node.aval, b.node.prim.name) for b in values]
        self._ran = f"{ran} at {line_of(user_place())}"

    @property
    def origin(self) -> object:
        """The call that the values have left, if it still exists."""
        return self._call()

    def pullback(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        """Raise RecomputeError."""
        aval, operation = next(v for v, ct in zip(self._values, cts, strict=True) if ct is not None)
        raise RecomputeError(
            f"{self.name}, {self._ran}: the gradient passes through {aval!r}, the result of "
            f"{operation}, which left the checkpoint by a side door (a list, an attribute, a global, an object "
            "that is no structure), and its derivative is not recorded: return it from the function, as part of its "
            "result"
        )


def record_escaped(
    recorders: Iterable[Recorder],
    call: Checkpoint | Setting,
    inputs: tuple[Buffer, ...],
    values: Iterable[Buffer],
    ran: str = "called",
) -> None:
    """Let ``recorders`` refuse derivatives of ``values``, which have left ``call``; ``ran``: in which run."""
    values = [b for b in values if is_inexact(b.node.aval.dtype)]
    if values:
        escaped = Escaped(call, values, ran)
        for recorder in recorders:
            recorder.record_call(escaped, inputs, tuple(values))


class Checkpoint:
    """One call in the records of tapes: its inputs, and what its rerun must use again."""

    again: Callable[[list[Any]], list[Any]] | None = None
    pushforward = None
    effects: Sequence[Node] = ()

    def __init__(self, name: str, hidden: Sequence[Recorder]) -> None:
        self.name = name
        self.setting = Setting(name)
        self.inputs: tuple[Buffer, ...] = ()
        self._nodes: tuple[Node, ...] = ()
        self._places: dict[tuple[int, int], int] = {}
        self._tapes = [weakref.ref(r) for r in hidden]
        self._before = last_number()

    def note_uses(self, watch: Lookout, seen: Seen, given: Iterable[Buffer], apart: tuple[int, ...] = ()) -> None:
        """After the first run: ``inputs`` are the ``given`` values that are followed, and what was captured.

        ``apart``: indices of values that the rerun does not use.
        """
        self._variables, self.effects = self._numbers(seen), watch.effects
        own = {content.node.index for content in self.setting.cells.values() if isinstance(content, Buffer)}
        given = list(given)
        # Arguments get their gradients whether a run reads them or not: a captured step, replayed, may tell of more of
        # them than when it ran eagerly.
        own.update(b.node.index for b in given)
        self._used, self._captured = watch.used.keys() | own, watch.captured.keys() - own - set(apart)
        inputs = {b.node.index: b for b in given if watch.follows(b)}
        inputs.update(watch.captured)
        self._places = watch.watched_contents(inputs)
        self.inputs = tuple(inputs.values())
        self._nodes = tuple(b.node for b in self.inputs)

    def _numbers(self, seen: Seen) -> dict[int, str]:
        """Names of the trainable variables used that are older than the first run; a run may make others of its own."""
        return {v.construction_number: v.name for v in trainables(seen) if v.construction_number < self._before}

    def compare_uses(self, variables: dict[int, str], used: dict[int, Buffer]) -> None:
        """Raise RecomputeError unless a rerun has used the variables and watched tensors that the first run used."""
        if set(variables) != set(self._variables):
            raise RecomputeError(
                f"{self.name}: the rerun used the variables {sorted(variables.values())}, the first run "
                f"{sorted(self._variables.values())}; a checkpointed function must use the same ones each time"
            )
        tapes = [r for ref in self._tapes if (r := ref()) is not None]
        others = [b for i, b in used.items() if i not in self._used]
        if not self._captured <= used.keys() or any(r.follows(b) for b in others for r in tapes):
            raise RecomputeError(
                f"{self.name}: the rerun used other watched tensors from outside than the first run; a captured name "
                "was bound to something else in between: pass it as an argument"
            )

    def kept(self) -> Iterator[object]:
        """What is kept for the rerun: buffers, residuals that may be dropped, values moved away, recordings."""
        yield from ()

    def contents(self) -> Iterator[Buffer]:
        """Contents of variables that the rerun will see."""
        yield from (content for content in self.setting.cells.values() if isinstance(content, Buffer))

    def tell_kept(self) -> None:
        """Tell the ledger what is kept."""
        for b in self.kept_buffers():
            tracking.current.require(b, self.name)

    def kept_buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of what is kept, as far as they are there."""
        for thing in self.kept():
            for b in (thing,) if isinstance(thing, Buffer) else getattr(thing, "things", ()):
                b = b if isinstance(b, Buffer) else b.buffer
                if b is not None:
                    yield b

    def refuse_survivors(self, derived: Derived) -> None:
        """Let the tapes outside refuse derivatives of the values of reruns that something still refers to.

        A tape that recorded the rerun knows their derivatives.
        """
        values = [value for _, value in derived.alive()]
        inputs = tuple([Buffer(None, n) for n in self._nodes]) if values else ()
        for ref in self._tapes if values else ():
            recorder = ref()
            if recorder is not None and recorder not in thread.recorders:
                new = [b for b in values if not recorder.follows(b)]  # not those of a recorded step of the first run
                record_escaped([recorder], self, inputs, new, "rerun")

    def trace(self) -> RerunTrace:
        """The tape of a rerun."""
        return RerunTrace(self._nodes, self._places, self.setting.start, self.setting.strict)

    def pull(
        self,
        trace: RerunTrace,
        upstream: Iterable[tuple[int, Tensor | None]],
        needed: frozenset[int],
        lead: int | None,
        come: Sums,
    ) -> Cotangents:
        """Cotangents of the inputs from those of values of the rerun (``upstream``, by index of the node).

        The walk adds to what has come for the inputs: so sums have the order, and the bits, of the plain function's.
        """
        seeds: dict[int, Tensor] = {trace.source(i): g for i, g in come_for(self._nodes, needed, come).items()}
        for index, ct in upstream:
            if ct is not None:
                seeds[index] = seeds[index] + ct if index in seeds else ct
        del upstream
        grads = trace.pull(seeds, lead, needed, slices=lead is None)
        return [
            zeros_of(n.aval, lead) if g is None and i in needed else g
            for i, (g, n) in enumerate(zip(grads, self._nodes, strict=True))
        ]
