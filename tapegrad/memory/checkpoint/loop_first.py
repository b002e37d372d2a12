"""The first run of a checkpointed loop: it stores states and tapes steps as the schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen, lookout
from tapegrad.core.node import next_index
from tapegrad.core.state import during, thread
from tapegrad.device.numerics import bits
from tapegrad.engine.evaluate import fill
from tapegrad.memory.checkpoint.checkpoint import HostDraws
from tapegrad.memory.checkpoint.rerun import Lookout, RerunTrace, StepTrace, Tracker, alone, results_of
from tapegrad.memory.checkpoint.snapshot import Position, Snapshot
from tapegrad.memory.schedules.actions import Action, Advance, Drop, Store, Tape
from tapegrad.memory.schedules.online import Online
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.memory.checkpoint.loop_call import LoopCall

Marks = dict[int, tuple[int, bool]]
"""Of each variable changed inside (by number): how many of its new contents were read, whether the last is current."""


@dataclass
class Form:
    """What a state looks like: its structure, the avals of its tensors, and which of them depend on watched values."""

    structure: Any
    avals: list[Any]
    tracked: list[bool]


@dataclass
class Taped:
    """The record of one step; the sources of its trace are the call's inputs, then some leaves of the state."""

    trace: StepTrace | RerunTrace
    places: list[int]
    """Which leaves."""
    indices: list[int]
    """The indices of their nodes."""
    outs: list[int | None]
    """The indices of the nodes of the leaves that came out."""


@dataclass
class Walk:
    """Where a run is, and what it has."""

    here: Position
    kept: dict[int, Snapshot] = field(default_factory=dict)
    taped: dict[int, Taped] = field(default_factory=dict)
    used: dict[int, Buffer] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    sums: dict[int, Any] = field(default_factory=dict)
    """By position among the call's inputs: the cotangents that have come for them."""
    state: list[Any] = field(default_factory=list)
    """Cotangents of the leaves of the state after the step to be reversed next."""


class LoopDraws(HostDraws):
    """What the steps of a loop draw from the host's generators.  Of the state before each step a hash is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hashes: list[tuple[int, ...]] = []
        self._last: tuple[int, ...] = ()
        self._python = True

    def next_step(self) -> None:
        """The first run comes to a step, or to the end.

        Python's generator costs much to look at, so that is done only in loops whose first step draws from it.
        """
        step = len(self._hashes)
        if step < 2 or self._python:
            self._hashes.append(self._hash())
            self._python = step < 1 or self._python and self._hashes[0][1] != self._hashes[1][1]
        else:
            self._hashes.append((hash(bits.words_mark()),))

    def _hash(self) -> tuple[int, ...]:
        return hash(bits.words_mark()), hash(bits.python_mark())

    @contextmanager
    def resumed(self, here: Position) -> Iterator[None]:
        """Steps rerun from ``here``, which moves on; afterwards the generators are as they were."""
        if not self.moved:
            with self.repeated():
                yield
            return
        now = bits.set_host_state(here.random or self._begun, self.moved)
        try:
            self._last = self._hash()
            yield
            here.random = bits.host_state()
        finally:
            bits.set_host_state(now, self.moved)

    def compare(self, step: int) -> None:
        """A step has been rerun.  Raises RecomputeError unless it has drawn what it drew first, or nothing."""
        if self.moved:
            before, self._last, wanted = self._last, self._hash(), self._hashes[step + 1]
            wrong = [i for i in self.moved if i < len(wanted) and self._last[i] not in (before[i], wanted[i])]
            if wrong:
                raise self.another(tuple(wrong), f"the rerun of step {step}")


class FirstRun:
    """The forward part of a schedule: run, store, and tape what is to be reversed first."""

    def __init__(self, call: LoopCall, state: Any, watch: Lookout, seen: Seen) -> None:
        self._call, self._watch, self._seen = call, watch, seen
        self._tracker = Tracker(watch)
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
                    for i in range(start, stop):
                        self._step(i)
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

    def _enter(self, state: Any, results: list[Any]) -> None:
        """``state`` goes into the next step."""
        self._call.note(state, results, self._tracker.follows)
        self._tracker.next_step([r._buffer for r in results if isinstance(r, Tensor)])
        self.walk.here.state = state

    def _step(self, i: int) -> list[Any]:
        marks: Marks = {}
        if self._watch.contents:
            owners = {owner.construction_number: cell for cell, (_, owner) in self._seen.items() if owner is not None}
            for number, known in self._watch.contents.items():
                marks[number] = len(known), known[-1] is owners[number].get()
        self._call.mark(marks)
        made_after = next_index()
        y = self._call._owner.step(self.walk.here.state, i, False)
        results = results_of(y, self._watch)
        y = settled(y, results, made_after)
        self._enter(y, results)
        return results

    def _tape(self, step: int) -> None:
        """Run a step and keep its record."""
        call, walk = self._call, self.walk
        places, nodes = call.sources(walk.here.state, step)
        trace = StepTrace(self._tracker.tracked)
        look = Lookout(())
        with lookout() as seen:
            results = trace.during(self._step, step, others=(look,))
        results_of(results, look)
        call.note_step(walk, look, seen)
        walk.taped[step] = Taped(trace, places, [n.index for n in nodes], indices_of(results))


def form_of(state: Any, results: list[Any]) -> Form:
    """The form of a state, whose leaves with variables read are ``results``."""
    avals = [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]
    return Form(nest.structure(state), avals, [])


def indices_of(results: list[Any]) -> list[int | None]:
    """The indices of the nodes of the tensors among ``results``."""
    return [r._buffer.node.index if isinstance(r, Tensor) else None for r in results]


def settled(y: Any, results: list[Any], made_after: int) -> Any:
    """A state with its values computed, none of which keeps more alive than itself; variables stay variables."""
    fill([r._buffer for r in results if isinstance(r, Tensor)])
    leaves = zip(nest.flatten(y), results, strict=True)
    return nest.rebuild(y, (leaf if isinstance(leaf, Variable) else alone(r, made_after) for leaf, r in leaves))
