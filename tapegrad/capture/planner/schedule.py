"""Orders: in which order steps are done, some of them several times, and how many bytes live meanwhile.

An order is a list of step numbers.  A value is read as it was last made; a step whose values are recomputed before
anybody reads them is not done at all.  So an order alone says everything: what is kept, what is dropped and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tapegrad.capture.arena import in_arena
from tapegrad.capture.program import Program, Slot, Step, View, pruned, results


class Account(NamedTuple):
    """What an order takes: the steps that it really does, bytes alive at each of them, and their cost in all."""

    order: list[int]
    live: list[int]
    cost: float

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.live, default=0)

    @property
    def at_peak(self) -> int:
        """The position of the step with the most bytes alive; -1 where there is none."""
        return self.live.index(self.peak) if self.live else -1


class Graph:
    """Steps and slots of a program as numbers; sizes are multiples of ``alignment`` (bytes)."""

    def __init__(self, program: Program, alignment: int) -> None:
        self.program = program
        self.alignment = alignment
        self.slots: list[Slot] = []
        self._numbers: dict[int, int] = {}
        self.sizes: list[int] = []
        steps = program.steps
        self.reads = [self._all(v.slot for v in s.reads) for s in steps]
        self.writes = [self._all(v.slot for v in s.writes) for s in steps]
        self.temporaries = [sum(self._aligned(v.slot) for v in s.temporaries) for s in steps]
        self.costs = [s.cost for s in steps]
        self.finals = self._all(v.slot for v in results(program))
        self.replaced = [self._replaced(s) for s in steps]
        self.producers = [-1] * len(self.slots)
        self.uses: list[list[int]] = [[] for _ in self.slots]
        for i, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
            for s in writes:
                self.producers[s] = i
            for s in reads:
                self.uses[s].append(i)
        for s in self.finals:
            self.uses[s].append(len(steps))
        self.total_cost = sum(self.costs)
        self.has_bare = any(p < 0 or not self.repeatable(p) for p in self.producers)
        """Whether something cannot be recomputed."""

    def repeatable(self, step: int) -> bool:
        """Whether ``step`` may be done again."""
        s = self.program.steps[step]
        return not (s.effect or s.once)

    def _aligned(self, slot: Slot) -> int:
        return -(-slot.nbytes // self.alignment) * self.alignment

    def _all(self, slots: Iterable[Slot]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._number(slot) for slot in slots if in_arena(slot)))

    def _number(self, slot: Slot) -> int:
        number = self._numbers.setdefault(id(slot), len(self.slots))
        if number == len(self.slots):
            self.slots.append(slot)
            self.sizes.append(self._aligned(slot))
        return number

    def _replaced(self, step: Step) -> tuple[int, ...]:
        """The slots read of which what is written may take the place (see ``arena``)."""
        if not step.shares or len(step.writes) != 1:
            return ()
        (write,) = step.writes
        alike = lambda v: v[1:] == write[1:] and v.slot.nbytes == write.slot.nbytes
        slots = (v.slot for v in step.reads if all(alike(o) for o in step.reads if o.slot is v.slot))
        return self._all(slots) if in_arena(write.slot) else ()

    def account(self, order: Sequence[int]) -> Account:
        """What ``order`` takes: one walk from its end, where only what is given out is alive."""
        sizes, wanted = self.sizes, set(self.finals)
        live = sum(sizes[s] for s in wanted)
        done: list[int] = []
        bytes_at: list[int] = []
        cost = 0.0
        steps = self.program.steps
        for i in reversed(order):
            writes = self.writes[i]
            if not steps[i].effect and wanted.isdisjoint(writes):
                continue
            here = live + self.temporaries[i]
            for s in writes:
                if s in wanted:
                    wanted.discard(s)
                    live -= sizes[s]
                else:
                    here += sizes[s]
            dying = [s for s in self.reads[i] if s not in wanted]
            for s in dying:
                wanted.add(s)
                live += sizes[s]
                here += sizes[s]
            for s in self.replaced[i]:
                if s in dying:
                    here -= sizes[s]
                    break
            done.append(i)
            bytes_at.append(here)
            cost += self.costs[i]
        return Account(done[::-1], bytes_at[::-1], cost)

    def rewritten(self, order: Sequence[int]) -> Program:
        """The program that does its steps in ``order``: repeated ones are copies which write slots of their own."""
        latest: dict[int, Slot] = {}

        def now(v: View) -> View:
            slot = latest.get(id(v.slot))
            return v if slot is None else v._replace(slot=slot)

        def new(v: View) -> View:
            latest[id(v.slot)] = slot = Slot(v.slot.kind, v.slot.nbytes, v.slot.source)
            return v._replace(slot=slot)

        program, steps = self.program, []
        arguments = [now(v) if id(v.slot) in latest else new(v) for v in program.arguments]  # with lifetimes of its own
        done: set[int] = set()
        for i in order:
            step = program.steps[i]
            again = step.again or i in done
            done.add(i)
            reads = [now(v) for v in step.reads]
            writes, own = [new(v) for v in step.writes], [new(v) for v in step.temporaries]
            steps.append(replace(step, reads=reads, writes=writes, temporaries=own, again=again))
        outputs = [o.moved(now) for o in program.outputs]
        cells = [w.moved(now) for w in program.writes]
        return pruned(replace(program, steps=steps, outputs=outputs, writes=cells, arguments=arguments))


def early(graph: Graph) -> set[int]:
    """The steps behind the peak that read for the last time more bytes than they write.

    Where they can be done before their turn, say since they read values of the forward alone, they make room.
    """
    count, sizes = len(graph.reads), graph.sizes
    account = graph.account(range(count))
    peak = account.at_peak if len(account.live) == count else count
    last = lambda i: sum(sizes[s] for s in graph.reads[i] if graph.uses[s][-1] == i)
    return {
        i for i in range(peak + 1, count) if graph.repeatable(i) and last(i) > sum(sizes[s] for s in graph.writes[i])
    }


def delayed(graph: Graph) -> list[int]:
    """An order in which the steps behind the peak are done as late as takes fewer bytes than to keep what they write.

    The gradients of weights, say, are made where they are added up.
    """
    sizes, count = graph.sizes, len(graph.reads)
    account = graph.account(range(count))
    peak = account.at_peak if len(account.live) == count else count
    before: list[list[int]] = [[] for _ in range(count)]
    late = set()
    first, last = [count] * len(sizes), [-1] * len(sizes)  # where slots are read
    for s in graph.finals:
        last[s] = count
    for i in reversed(range(count)):
        at = i
        if i > peak and graph.repeatable(i):
            at = min((first[s] for s in graph.writes[i]), default=i)
            longer = [s for s in graph.reads[i] if last[s] < at]
            if sum(sizes[s] for s in graph.writes[i]) <= sum(sizes[s] for s in longer):
                at = min((last[s] for s in longer), default=i)
            if not i + 1 < at < count or at in late:
                at = i
            else:
                late.add(i)
                before[at].append(i)
        for s in graph.reads[i]:
            first[s], last[s] = min(first[s], at), max(last[s], at)
    order: list[int] = []
    todo = [i for i in reversed(range(count)) if i not in late]
    while todo:
        i = todo.pop()
        if before[i]:
            todo += [i, *before[i]]  # which are in descending order
            before[i] = []
        else:
            order.append(i)
    return order
