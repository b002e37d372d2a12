"""The forward part of a checkpointed loop: steps run, their states are stored, the last steps are taped.

What it leaves to the backward part (``loop_call.py``) is a :class:`Walk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen, lookout
from tapegrad.core.node import next_index
from tapegrad.core.state import during, thread
from tapegrad.device.numerics import bits
from tapegrad.engine.realize import realize
from tapegrad.remat.checkpoint.rerun_tape import (
    Cotangents,
    Derived,
    Lookout,
    RerunTrace,
    StepTrace,
    Tracker,
    alone,
    results_of,
)
from tapegrad.remat.checkpoint.snapshot import Position, Snapshot
from tapegrad.remat.schedules.actions import Action, Advance, Drop, Store, Tape
from tapegrad.remat.schedules.online import Online
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.core.aval import ShapedArray
    from tapegrad.remat.checkpoint.loop_call import LoopCall

Marks = dict[int, tuple[int, bool]]
"""Of each variable changed inside (by number): how many of its new contents were read, whether the last is current."""


@dataclass
class Form:
    """What a state looks like: its structure, the avals of its tensors, and which of them depend on watched values."""

    structure: Any
    avals: list[ShapedArray | None]
    tracked: list[bool]


@dataclass
class Taped:
    """The record of one step; the sources of its trace are the call's inputs, then some leaves of the state."""

    trace: StepTrace | RerunTrace
    places: list[int]
    """Which leaves."""
    indices: list[int]
    """The indices of their nodes."""
    look: Lookout
    """It is told of what is rerun while the record is walked."""
    outs: list[int | None]
    """The indices of the nodes of the leaves that came out: of the state, then of the output."""


@dataclass
class Walk:
    """Where a run is, and what it has."""

    here: Position
    kept: dict[int, Snapshot] = field(default_factory=dict)
    taped: dict[int, Taped] = field(default_factory=dict)
    used: dict[int, Buffer] = field(default_factory=dict)
    derived: Derived = field(default_factory=Derived)
    """The values made in reruns of steps."""
    numbers: dict[int, str] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    """By position among the call's inputs: the cotangents that have come for them."""
    state: Cotangents = field(default_factory=list)
    """Cotangents of the leaves of the state after the step to be reversed next."""
    stacked: Cotangents = field(default_factory=list)
    """Cotangents of the leaves of the outputs of all steps."""


class FirstRun:
    """The forward part of a schedule: run, store, and tape what is to be reversed first."""

    def __init__(self, call: LoopCall, state: Any, watch: Lookout, seen: Seen) -> None:
        self._call, self._watch, self._seen = call, watch, seen
        self._tracker = Tracker(watch)
        self.outputs: list[object] = []
        self.output_avals: list[ShapedArray | None] = []
        self.walk = Walk(Position(state))
        self._enter(state, [Tensor(x._cell.get()) if isinstance(x, Variable) else x for x in nest.flatten(state)])

    def run(self, schedule: Iterator[Action] | Online) -> Iterator[Action]:
        """Do what comes before the first reversal; the rest of the actions."""
        follow: Callable[..., Iterator[Action]] = self._online if isinstance(schedule, Online) else self._follow
        return during(follow, schedule, recorders=(*thread.recorders, self._tracker))

    def _follow(self, actions: Iterator[Action]) -> Iterator[Action]:
        for action in actions:
            match action:
                case Advance(start, stop):
                    while start < stop:
                        done = self._steps(start, stop)
                        if not done:
                            self._step(start)
                        start += done or 1
                case Tape(step):
                    self._tape(step)
                case Store():
                    self._call.keep(self.walk, action, self._here())
                case Drop(step):
                    del self.walk.kept[step]
                case _:
                    return chain([action], actions)
        return actions

    def _online(self, online: Online) -> Iterator[Action]:
        """Run while the loop's condition holds; a state's fate is decided when the next step is known to follow."""
        owner: Any = self._call._owner
        i, before = 0, Position()
        while owner.more(self.walk.here.state):
            if i:
                self._do(online.at(i - 1), before)
            before = self._here().copied()
            self._step(i)
            i += 1
        owner.n = i
        if i:
            self._do(online.end(i), before)
        return online.backward() if i else iter(())

    def _do(self, actions: Iterable[Action], position: Position) -> None:
        for action in actions:
            if isinstance(action, Store):
                self._call.keep(self.walk, action, position)
            elif isinstance(action, Drop):
                del self.walk.kept[action.step]

    def _here(self) -> Position:
        cells = {cell: x for cell, (old, _) in list(self._seen.items()) if (x := cell.get()) is not old}
        return Position(self.walk.here.state, cells, bits.host_state())

    def _enter(self, state: Any, results: list[object]) -> None:
        """``state`` goes into the next step."""
        self._watch.derived.next_step()
        self._call.note(state, results, self._tracker.follows)
        leaves = [leaf if isinstance(leaf, Tensor) else r for leaf, r in zip(nest.flatten(state), results, strict=True)]
        self._tracker.next_step([x._buffer for x in leaves if isinstance(x, Tensor)])  # slices are copies by now
        self.walk.here.state = state

    def _steps(self, start: int, stop: int) -> int:
        """Make steps in a row, where it is known that all do the same to values of the same form; how many."""
        if self._watch.contents:
            return 0
        done, state = self._call._owner.steps(self.walk.here.state, start, stop, lambda f, *args: f(*args))
        if done:
            self._enter(state, results_of(state, self._watch))
            self._call.note_again(done)
        return done

    def _step(self, i: int) -> list[object]:
        marks: Marks = {}
        if self._watch.contents:
            owners = {owner.construction_number: cell for cell, (_, owner) in self._seen.items() if owner is not None}
            for number, known in self._watch.contents.items():
                marks[number] = len(known), known[-1] is owners[number].get()
        self._call.mark(marks)
        made_after = next_index()
        state, output = self._call._owner.step(self.walk.here.state, i, False)
        results = results_of((state, output), self._watch)
        self._tracker.look_at(results)
        count = len(results) - len(nest.flatten(output))
        state = settled(state, results[:count], made_after)
        self._enter(state, results[:count])
        realize([r._buffer for r in results[count:] if isinstance(r, Tensor)])
        self.output_avals = avals_of(results[count:])
        self.outputs.append(nest.rebuild(output, (alone(r, made_after) for r in results[count:])))
        return results

    def _tape(self, step: int) -> None:
        """Run a step and keep its record."""
        call, walk = self._call, self.walk
        places, nodes = call.sources(walk.here.state, step)
        trace = StepTrace(self._tracker.tracked)
        look = Lookout((), (), trace, walk.derived)
        with lookout() as seen:
            results = trace.during(self._step, step, others=(look,))
        results_of(results, look)
        call.note_step(walk, look, seen)
        walk.taped[step] = Taped(trace, places, [n.index for n in nodes], look, indices_of(results))


def form_of(state: Any, results: list[object]) -> Form:
    """The form of a state, whose leaves with variables read are ``results``."""
    return Form(nest.structure(state), avals_of(results), [])


def avals_of(results: list[object]) -> list[ShapedArray | None]:
    """What the tensors among ``results`` look like."""
    return [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]


def indices_of(results: list[object]) -> list[int | None]:
    """The indices of the nodes of the tensors among ``results``."""
    return [r._buffer.node.index if isinstance(r, Tensor) else None for r in results]


def settled(y: Any, results: list[object], made_after: int) -> Any:
    """A state with its values computed, none of which keeps more alive than itself; variables stay variables."""
    realize([r._buffer for r in results if isinstance(r, Tensor)])
    leaves = zip(nest.flatten(y), results, strict=True)
    return nest.rebuild(y, (leaf if isinstance(leaf, Variable) else alone(r, made_after) for leaf, r in leaves))
