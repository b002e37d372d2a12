"""Segments: orders from schedules of Rotor over blocks of a program's forward part.

The forward part, up to the peak, is cut where few bytes cross into what follows.  The result is a chain of blocks, and
Rotor (``remat/schedules/rotor.py``) says which of them to tape and which inputs to keep.  Its schedule becomes an order
of steps: a block is run whole, and run whole again, and each step behind the peak follows the last run of the block
whose values it reads.  An order alone says what is kept, so a cut keeps the whole state that crosses it, whether or not
the backward part reads it.

Rotor's bytes are estimates, since blocks share values and the backward part has values of its own.  So ``within`` looks
for the schedule with the most bytes whose order fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.capture.planner.schedule import Account, Graph
from tapegrad.remat.schedules.actions import Advance, Reverse, Tape
from tapegrad.remat.schedules.blocks import blocks, crossing_bytes
from tapegrad.remat.schedules.rotor import Rotor, Stage, least_bytes

_UNITS = 512
"""Units in which Rotor counts bytes."""


class Segments:
    """The blocks of a graph's forward part, at most ``count``, and the orders of their schedules."""

    def __init__(self, graph: Graph, plain: Account, count: int) -> None:
        self._graph = graph
        end = plain.order[plain.at_peak] + 1
        # The last step of the forward part that writes or reads a slot; -1: an argument, or written later.
        last = [-1] * len(graph.slots)
        for s, p in enumerate(graph.producers):
            if 0 <= p < end:
                last[s] = max((p, *(u for u in graph.uses[s] if u < end)))
        written = [(s, p) for s, p in enumerate(graph.producers) if last[s] >= 0]
        saved = [0] * end
        for s, p in written:
            if graph.uses[s] and graph.uses[s][-1] >= end:
                saved[p] += graph.sizes[s]
        crossing = crossing_bytes(((p, last[s], graph.sizes[s]) for s, p in written), end)
        self._blocks = blocks(crossing, saved, graph.costs[:end], count)
        self._backward = self._assigned(last, end)
        stages = []
        for steps in self._blocks:
            taped = sum(
                graph.sizes[s] for i in steps for s in graph.writes[i]
                if last[s] >= steps.stop or (graph.uses[s] and graph.uses[s][-1] >= end)
            )  # fmt: skip
            cost = sum(graph.costs[i] for i in steps)
            stages.append(Stage(f"steps {steps}", cost, 0.0, crossing[steps.stop - 1], taped))
        self._rotor = Rotor(stages, max(plain.peak * 5 // 4, 2 * least_bytes(stages)[0]), slots=_UNITS)

    def within(self, limit: int) -> Account | None:
        """Find the order of the schedule with the most bytes whose values take at most ``limit`` bytes."""
        result = None
        units = self._rotor.units
        while units:
            middle = len(units) // 2
            account = self._graph.account(self._order(units[middle]))
            if account.peak <= limit:
                result, units = account, units[middle + 1 :]
            else:
                units = units[:middle]
        return result

    def _order(self, units: int) -> list[int]:
        """The steps in the order of Rotor's schedule for so many units."""
        graph, order = self._graph, list[int]()
        done: set[int] = set()
        for action in self._rotor.actions(units):
            match action:
                case Advance(start, stop):
                    blocks = self._blocks[start:stop]
                case Tape(block):
                    blocks = self._blocks[block : block + 1]
                case Reverse(block):
                    order += self._backward[block]
                    continue
                case _:
                    continue
            for steps in blocks:
                order += steps if steps[0] not in done else [i for i in steps if graph.repeatable(i)]
                done.add(steps[0])
        return order

    def _assigned(self, last: Sequence[int], end: int) -> list[list[int]]:
        """The steps of the backward part in their order, each with the block after whose last run it is done.

        Blocks are reversed last first: a step waits for the first block that has what it reads, be it a value of that
        block or one that crosses into it.
        """
        graph = self._graph
        number = [b for b, steps in enumerate(self._blocks) for _ in steps]
        assigned: list[list[int]] = [[] for _ in self._blocks]
        block = len(self._blocks) - 1
        for i in range(end, len(graph.reads)):
            block = min([block, *(number[last[s]] for s in graph.reads[i] if last[s] >= 0)])
            assigned[block].append(i)
        return assigned
