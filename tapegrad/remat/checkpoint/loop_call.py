"""One checkpointed run of a loop: the first run stores states and tapes steps, the pullback follows the schedule.

See ``checkpoint/recompute.py`` for what a first run notes and what a rerun sees and repeats.  Here reruns are of single
steps, from stored states; cotangents of the state, and of everything captured, go through the record of one step after
the other, last step first.  So sums are made in the order of the plain loop, and have its bits.

Where the reruns are to be differentiated themselves (second order, or forward mode over the gradient), the loop is
rerun as a whole under the recorders that ask: right, with the memory of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.autodiff.collective_walk import told
from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.loop_states import stacked
from tapegrad.autodiff.recording import Recording, Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, Seen
from tapegrad.core.node import next_index
from tapegrad.core.protocols import Recorder
from tapegrad.core.state import during, thread
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.loop_draws import LoopDraws
from tapegrad.remat.checkpoint.loop_forward import (
    FirstRun,
    Form,
    Marks,
    Taped,
    Walk,
    avals_of,
    form_of,
    indices_of,
    settled,
)
from tapegrad.remat.checkpoint.recompute import CheckpointedCall
from tapegrad.remat.checkpoint.rerun_tape import (
    Cotangents,
    Lookout,
    RerunTrace,
    StepTrace,
    Sums,
    Tracker,
    come_for,
    results_of,
)
from tapegrad.remat.checkpoint.snapshot import Position, Snapshot
from tapegrad.remat.offload.tiers import Disk
from tapegrad.remat.schedules.actions import DISK, Action, Advance, Drop, Restore, Reverse, Store, Tape
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.node import Node


def _rerun(f: Callable[..., Any], *args: object) -> Any:
    return tracking.current.rerun(f, *args)


class LoopCall(CheckpointedCall):
    """One run of a loop under tapes."""

    def __init__(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: list[Recorder]
    ) -> None:
        super().__init__(owner, name, args, kwargs, hidden)
        self._owner: Any = owner
        self._draws = self.setting.draws = LoopDraws(name)
        self._forms: list[Form] = []
        self._marks: list[Marks] = []
        self._disk: Disk | None = None
        self._first_kept: Snapshot | None = None
        self._left: list[tuple[Walk, Iterator[Action]]] = []
        self._stacks: list[bool] = []
        """Which leaves of the output are stacked; others are None."""
        self._output_avals: list[ShapedArray | None] = []

    # The first run ---------------------------------------------------------------------------------------------

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Lookout, seen: Seen) -> Any:
        first = FirstRun(self, args[0], watch, seen)
        self.effects = watch.effects
        with self._owner.named(first.walk):
            rest = first.run(self._owner.online() if self._owner.n is None else self._actions())
        self._left.append((first.walk, rest))
        self._owners = {owner.construction_number: cell for cell, (_, owner) in seen.items() if owner is not None}
        y, first.walk.here = first.walk.here.state, Position()
        if not self._owner.outputs:
            return y
        outputs = stacked(first.outputs)
        self._output_avals = first.output_avals
        self._stacks = [isinstance(ys, Tensor) for ys in nest.flatten(outputs)]
        return y, outputs

    def add_escaped(self, watch: Lookout, outputs: list[Buffer]) -> list[Buffer]:
        """Return the values made in the steps that the user still holds: single steps are rerun, from stored states."""
        contents = {id(cell.get()) for cell in self.setting.cells}
        return [b for b in watch.alive().values() if id(b) not in contents]

    def _actions(self) -> Iterator[Action]:
        return iter(self._owner.schedule(self._owner.n))

    def forget_buffers(self) -> None:
        """Keep nodes instead of buffers, and the initial state only on disk if it is there."""
        super().forget_buffers()
        if self._first_kept is not None:
            self._args = ()

    def keep(self, walk: Walk, action: Store, position: Position) -> None:
        """Store a position where the schedule says."""
        disk = None
        if action.where == DISK:
            disk = self._disk = self._disk or Disk(self._owner.directory)
        walk.kept[action.step] = Snapshot(action.step, position, disk, walk, self.effects)
        for b in walk.kept[action.step].buffers():
            tracking.current.require(b, self.name)
        if disk is not None and not action.step:
            self._first_kept = walk.kept[0]

    def kept(self) -> Iterator[object]:
        """Besides, stored states and recorded steps of the first run."""
        yield from super().kept()
        for walk, _ in list(self._left):
            for snapshot in list(walk.kept.values()):
                yield from snapshot.buffers()
                yield from snapshot.moved()
            yield from (taped.trace for taped in list(walk.taped.values()))

    def contents(self) -> Iterator[Buffer]:
        """Those of the stored states, too."""
        yield from super().contents()
        for walk, _ in list(self._left):
            for snapshot in list(walk.kept.values()):
                yield from snapshot.contents()

    def note(self, state: Any, results: list[object], tracked: Callable[[Buffer], bool]) -> None:
        """Note the form of a state; equal ones are one object."""
        self._draws.next_step()
        form = form_of(state, results)
        form.tracked = [isinstance(r, Tensor) and tracked(r._buffer) for r in results]
        self._forms.append(self._forms[-1] if self._forms and self._forms[-1] == form else form)

    def note_again(self, steps: int) -> None:
        """So many steps had the form that was noted last, and none of them read what the loop changes."""
        self._draws.steps_without(steps - 1)
        self._forms += self._forms[-1:] * (steps - 1)
        for _ in range(steps):
            self.mark({})

    def note_step(self, walk: Walk, look: Lookout, seen: Seen) -> None:
        """Note what a recorded step used from outside the loop, keeping none of it alive."""
        nodes = [b.node for b in look.used.values() if b.node.index < self.setting.start]
        walk.used.update((n.index, Buffer(None, n)) for n in nodes)
        walk.numbers.update(self._numbers(seen))
        look.release()

    def mark(self, marks: Marks) -> None:
        """Note, before a step, what was read of the variables that the loop changes."""
        self._marks.append(self._marks[-1] if self._marks and self._marks[-1] == marks else marks)

    def sources(self, state: Any, step: int) -> tuple[list[int], list[Node]]:
        """The leaves of the state that a step's cotangents are wanted for, each value once, and their nodes."""
        places, nodes = [], {}
        for position, (leaf, tracked) in enumerate(zip(nest.flatten(state), self._forms[step].tracked, strict=True)):
            if tracked and isinstance(leaf, Tensor) and leaf._buffer.node.index not in nodes:
                nodes[leaf._buffer.node.index] = leaf._buffer.node
                places.append(position)
        return places, list(nodes.values())

    # The pullback ----------------------------------------------------------------------------------------------

    def pullback(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        """Follow the schedule, or rerun everything under the recorders that follow the inputs."""
        self.refuse_other_bindings()
        if self._differentiated() or not self._owner.n:
            with self._owner.named(None):
                return self._pull_plain(cts, needed, lead, come)
        try:
            walk, actions = self._left.pop()  # of several threads, one finds what the first run has kept
        except IndexError:
            walk, actions = Walk(self._beginning()), self._actions()
        try:
            with self._owner.named(walk):
                return self._pull_by_schedule(walk, actions, cts, needed, lead, come)
        finally:
            self.refuse_survivors(walk.derived)

    def _pull_by_schedule(
        self,
        walk: Walk,
        actions: Iterator[Action],
        cts: Cotangents,
        needed: frozenset[int],
        lead: int | None,
        come: Sums,
    ) -> Cotangents:
        walk.sums.update(come_for(self._nodes, needed, come))
        upstream = iter(cts)
        walk.state = [None if aval is None else next(upstream) for aval in self._forms[-1].avals]
        walk.stacked = [next(upstream) if stacks else None for stacks in self._stacks]
        ahead = iter(actions)
        action = next(ahead, None)
        while action is not None:
            following = next(ahead, None)
            match action:
                case Advance(start, stop):
                    self._advance(walk, start, stop)
                case Store():
                    self.keep(walk, action, walk.here)
                case Restore(step):
                    self._restore(walk, step)
                case Drop(step):
                    del walk.kept[step]
                case Tape(step) if self._reverse_at_once(walk, step, following, lead):
                    following = next(ahead, None)
                case Tape(step):
                    self._tape(walk, step)
                case Reverse(step):
                    self._reverse(walk, step, needed, lead)
            action = following
        self.compare_uses(walk.numbers, walk.used)
        return [
            zeros_of(n.aval, lead) if i in needed and i not in walk.sums else walk.sums.get(i)
            for i, n in enumerate(self._nodes)
        ]

    def _differentiated(self) -> bool:
        """Whether someone wants to differentiate what happens here, or where others take part, at any of them."""
        probes = [Buffer(None, n) for n in self._nodes]
        here = any(
            isinstance(r, Pusher) or (isinstance(r, (Recording, Tracker)) and any(r.follows(b) for b in probes))
            for r in thread.recorders
        )
        return any(there for _, there in told(self.effects, ("differentiated", here))) if self.effects else here

    def _pull_plain(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        before = self._args
        self._args = (self._beginning().state,)
        try:
            return super().pullback(cts, needed, lead, come)
        finally:
            self._args = before

    def _beginning(self) -> Position:
        if self._first_kept is not None and (here := self._first_kept.position()) is not None:
            return here
        return Position(self._args[0]).copied()

    @contextmanager
    def _replaying(self, here: Position) -> Iterator[Seen]:
        """Steps in the block see what they saw in the first run; ``here`` moves on."""
        with self._draws.resumed(here), self.setting.placed({**self.setting.cells, **here.cells}) as seen:
            yield seen
            cells = self.setting.cells
            here.cells = {cell: x for cell, old in cells.items() if (x := cell.get()) is not old}

    def _advance(self, walk: Walk, start: int, stop: int) -> None:
        if not thread.recorders:  # replays need no watch then
            surroundings = self.setting.surroundings
            done, walk.here.state = during(self._owner.steps, walk.here.state, start, stop, _rerun, **surroundings)
            start += done
        if start < stop:
            self._advance_watched(walk, start, stop)

    def _advance_watched(self, walk: Walk, start: int, stop: int) -> None:
        with self._replaying(walk.here):
            sources = self._followed(walk.here, start)
            while start < stop:
                walk.derived.next_step()
                # Told of it, a budget learns how states are made; it keeps what the step uses.
                watch = Lookout((), (), sources, walk.derived)
                changes = {**self.setting.surroundings, "recorders": (*thread.recorders, watch)}
                done = during(self._repeat, walk, start, stop, watch, **changes)
                start += done or 1
                if done:
                    sources = self._followed(walk.here, start)
                else:
                    during(tracking.current.rerun, self._repeat_one, walk, start - 1, watch, **changes)

    def _followed(self, here: Position, step: int) -> Trace:
        """A tape that follows the values that what ``step`` computes depends on."""
        contents = [b.node for b in here.cells.values() if isinstance(b, Buffer)]
        return Trace([*self._nodes, *self.sources(here.state, step)[1], *contents])

    def _repeat(self, walk: Walk, start: int, stop: int, watch: Lookout) -> int:
        """Steps in a row, as in the first run; how many."""
        done, state = self._owner.steps(walk.here.state, start, stop, _rerun)
        if done:
            self._compare_form(start + done - 1, state, results_of(state, watch))
            self._draws.compare(start + done - 1)
            walk.here.state = state
        return done

    def _repeat_one(self, walk: Walk, step: int, watch: Lookout) -> None:
        made_after = next_index()
        y, _ = self._owner.step(walk.here.state, step, True)
        results = results_of(y, watch)
        self._compare_form(step, y, results)
        self._draws.compare(step)
        walk.here.state = settled(y, results, made_after)

    def _restore(self, walk: Walk, step: int) -> None:
        """Be at a stored step; if a budget has dropped what was stored, run on from the one before, and store it."""
        earlier = sorted((i for i in walk.kept if i <= step), reverse=True)
        places = ((i, here) for i in earlier if (here := walk.kept[i].position()) is not None)
        start, walk.here = next(places, None) or (0, self._beginning())  # a schedule may store no initial state
        if start < step:
            self._advance(walk, start, step)
            self.keep(walk, Store(step), walk.here)

    def _tape(self, walk: Walk, step: int) -> None:
        """Run a step and keep its record."""
        walk.derived.next_step()
        places, nodes = self.sources(walk.here.state, step)
        trace = RerunTrace([*self._nodes, *nodes], self._places, self.setting.start, self.setting.strict)
        look = Lookout((), (), trace, walk.derived)

        def run() -> tuple[Any, list[object]]:
            y = self._owner.step(walk.here.state, step, True)
            results = results_of(y, look)
            self._draws.compare(step)
            return y, results

        with self._replaying(walk.here) as seen:
            for number, (count, current) in self._marks[step].items():
                cell: Cell = self._owners[number]
                trace.resume(number, count, cell.get().node.index if current else None)
            again = partial(during, run, **self.setting.surroundings)
            y, results = trace.during(tracking.current.rerun, again, others=(look,))
        state, output = y
        count = len(results) - len(nest.flatten(output))
        self._compare_form(step, state, results[:count])
        self._compare_output(step, results[count:])
        self.note_step(walk, look, seen)
        walk.taped[step] = Taped(trace, places, [n.index for n in nodes], look, indices_of(results))
        walk.here.state = state

    def _reverse_at_once(self, walk: Walk, step: int, following: Action | None, lead: int | None) -> bool:
        """Pull cotangents through a step, if that is what follows, without a record; whether that was possible.

        So it is of a captured function.  The first step's state may have come from outside, where sums are taken.
        """
        reversed_next = isinstance(following, Reverse) and following.step == step
        if not step or not reversed_next or lead is not None or self._marks[step]:
            return False
        here = walk.here.state
        followed = {n.index for n in self._nodes}
        surroundings = self.setting.surroundings
        found = during(self._owner.gradients, here, step, walk.state, _rerun, followed, **surroundings)
        if found is None:
            return False
        tensors = iter(found)
        walk.here = Position()
        walk.state = [next(tensors) if isinstance(leaf, Tensor) else None for leaf in nest.flatten(here)]
        return True

    def _compare_form(self, step: int, y: Any, results: list[object]) -> None:
        form, wanted = form_of(y, results), self._forms[step + 1]
        if (form.structure, form.avals) != (wanted.structure, wanted.avals):
            raise RecomputeError(
                f"{self.name}: the rerun of step {step} returned {form.structure} of {form.avals}, its first run "
                f"{wanted.structure} of {wanted.avals}"
            )

    def _compare_output(self, step: int, results: list[object]) -> None:
        avals = avals_of(results)
        if avals != self._output_avals:
            raise RecomputeError(
                f"{self.name}: the rerun of step {step} returned an output of {avals}, its first run of "
                f"{self._output_avals}"
            )

    def _reverse(self, walk: Walk, step: int, needed: frozenset[int], lead: int | None) -> None:
        """Pull cotangents through the record of a step."""
        walk.here = Position()
        taped = walk.taped.pop(step)
        trace = taped.trace
        if isinstance(trace, StepTrace):  # of the first run, when the inputs were not known yet
            trace.become([n.index for n in self._nodes] + taped.indices)
        seeds: dict[int, Tensor] = {trace.source(i): g for i, g in walk.sums.items()}
        own_row = lambda ct: ct if ct is None else ct[step] if lead is None else ct[:, step]
        for index, ct in zip(taped.outs, chain(walk.state, map(own_row, walk.stacked)), strict=True):
            if ct is not None and index is not None:
                seeds[index] = seeds[index] + ct if index in seeds else ct
        walk.sums, walk.state = {}, []
        size, known = len(self._nodes), {n.index for n in self._nodes}
        own = [(size + k, leaf) for k, leaf in enumerate(taped.places) if taped.indices[k] not in known]
        grads = trace.pull(seeds, lead, [*needed, *(position for position, _ in own)])
        walk.sums = {i: g for i in needed if (g := grads[i]) is not None}
        walk.state = [None] * len(self._forms[step].avals)
        for position, leaf in own:
            walk.state[leaf] = grads[position]
