"""Loops that a program writes out: lines that a call runs again and again, and what one iteration hands on."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tapegrad.profile.plan.flow import Flow
from tapegrad.profile.plan.lives import Life, profile
from tapegrad.profile.plan.step import FORWARD, Site, Step
from tapegrad.remat.schedules.actions import Drop, Store, Tape, count
from tapegrad.remat.schedules.online import ideal_states
from tapegrad.remat.schedules.revolve import revolve
from tapegrad.tracing.run import Run

_LONGEST_MEMORY = 4
"""Iterations after which a value that is still read is no state, but one of a list that grows with the loop."""


class _Item(NamedTuple):
    """An operation (``call`` -1) or a call that the loop's own function runs."""

    seq: int
    place: int
    call: int


@dataclass(frozen=True)
class Loop:
    """Iterations of a loop in the forward pass, each as a site; ``places``: what an iteration runs, in order.

    ``state_of[k]``: the operations of earlier iterations whose results iteration ``k`` or a later one reads.
    """

    sites: list[Site]
    places: tuple[int, ...]
    calls: tuple[int, ...]
    """The calls of the first iteration."""
    state_of: list[set[int]]
    repeats: bool
    """Whether values of an iteration are read soon: a list that collects values is no state."""

    @property
    def reruns(self) -> int:
        """The steps that ``checkpointed_loop`` runs besides the forward pass, each of which is recorded once."""
        n = len(self.sites)
        return count(revolve(n, ideal_states(n)), n).steps - n

    def peak(self, lives: Mapping[int, list[Life]], flow: Flow) -> int:
        """Return the most live bytes if ``checkpointed_loop`` runs the loop.

        ``lives``: with every iteration recomputed, which keeps the state before each; the schedule keeps some of them,
        and they share the values that one hands on to the next.
        """
        states, last = set().union(*self.state_of), max(site.back_begin for site in self.sites)
        values = {a for op in states for a in (flow.alloc.get(op, ~op), ~op)}
        values = {a for a in values if a in lives and lives[a][0].end < (last, 0, 0)}  # not held by the program
        others = profile(life for a, those in lives.items() for life in (those[1:] if a in values else those))
        moments = [moment for moment, _ in others]
        stored, begin, most = set[int](), 0, 0
        for action in revolve(len(self.sites), ideal_states(len(self.sites))):
            if isinstance(action, Store):
                stored.add(action.step)
            elif isinstance(action, Drop):
                stored.discard(action.step)
            elif isinstance(action, Tape):
                alive = set().union(*(self.state_of[k] for k in (*stored, action.step)))
                if action.step + 1 < len(self.sites):  # what the step computes is another copy
                    rows = flow.rerun(self.sites[action.step].rows)
                    alive |= self.state_of[action.step + 1].intersection(rows)
                back = self.sites[action.step - 1].back_begin if action.step else -1
                end = bisect_left(moments, (back, -1, -1)) if back >= 0 else len(moments)
                held = sum(flow.bytes[op] for op in alive)
                most = max([most, *(total + held for _, total in others[begin:end])])
                begin = max(begin, end)
        return most


def loops_of(step: Step, shortest: int) -> list[Loop]:
    """Return the loops of at least ``shortest`` iterations of functions that run once in ``step``, at most one each."""
    run = step.run
    rows = [row for row in step.op_rows if run.ops["phase"][row] == FORWARD]
    items: dict[int, list[_Item]] = {}
    seen: set[int] = set()
    for row in rows:
        call = run.ops["call"][row]
        items.setdefault(call, []).append(_Item(run.ops["seq"][row], run.ops["stack"][row], -1))
        while call >= 0 and call not in seen:
            seen.add(call)
            outer, begin = run.calls["parent"][call], run.calls["begin_seq"][call]
            items.setdefault(outer, []).append(_Item(begin, run.calls["site"][call], call))
            call = outer
    ends = _ends(run, rows)
    forward = rows, [run.ops["seq"][row] for row in rows]
    loops = [_loop(step, *forward, sorted(those), ends.get(call, -1), shortest) for call, those in items.items()]
    times = Counter(loop.places for loop in loops if loop is not None)
    return [loop for loop in loops if loop is not None and times[loop.places] == 1]


def _ends(run: Run, rows: Iterable[int]) -> dict[int, int]:
    """Return by call the seq of the last operation of the forward pass in it; -1: of the whole program."""
    ends: dict[int, int] = {}
    for row in rows:
        call = run.ops["call"][row]
        while True:
            ends[call] = run.ops["seq"][row]
            if call < 0:
                break
            call = run.calls["parent"][call]
    return ends


def _repeated(places: Sequence[int], shortest: int) -> tuple[int, int, int] | None:
    """Return the longest part of ``places`` that repeats one period: its start, the period and the repetitions."""
    positions: dict[int, list[int]] = {}
    for i, place in enumerate(places):
        positions.setdefault(place, []).append(i)
    best: tuple[int, int, int] | None = None
    for place, at in positions.items():
        if place < 0 or len(at) < shortest:
            continue
        start, period, times = at[0], at[1] - at[0], 1
        body = places[start : start + period]
        while places[start + times * period : start + (times + 1) * period] == body:
            times += 1
        if times >= shortest and (best is None or period * times > best[1] * best[2]):
            best = start, period, times
    return best


def _loop(
    step: Step, rows: Sequence[int], seqs: Sequence[int], items: Sequence[_Item], last: int, shortest: int
) -> Loop | None:
    """Return the longest loop among what one function runs; ``rows``, ``seqs``: all operations of the forward pass."""
    repeated = _repeated([item.place for item in items], shortest)
    if repeated is None:
        return None
    start, period, times = repeated
    after = start + period * times
    begins = [items[start + k * period].seq for k in range(times)]
    begins.append(items[after].seq if after < len(items) else last + 1)
    bodies = [rows[bisect_left(seqs, a) : bisect_left(seqs, b)] for a, b in pairwise(begins)]
    if len(bodies[0]) < 2 or not all(bodies):
        return None
    backs = _backward_begins(step, bodies)
    sites = [_site(step, list(body), back) for body, back in zip(bodies, backs)]
    body = items[start : start + period]
    states, repeats = _states(step, bodies)
    return Loop(sites, tuple(i.place for i in body), tuple(i.call for i in body if i.call >= 0), states, repeats)


def _site(step: Step, rows: list[int], back: int) -> Site:
    """Return one iteration as a call."""
    ops = step.run.ops
    close = step.close_of(ops["seq"][rows[-1]])
    made = dict.fromkeys(step.flow.alloc[row] for row in rows if row in step.flow.alloc)
    return Site(-1, ops["seq"][rows[0]], close, made=made, rows=rows, back_begin=back)


def _backward_begins(step: Step, bodies: Sequence[Sequence[int]]) -> list[int]:
    """Return when the backward pass begins to differentiate each iteration; -1: it never does."""
    of = {row: k for k, body in enumerate(bodies) for row in body}
    begins = [-1] * len(bodies)
    for row in step.op_rows:
        k = of.get(step.run.ops["derivative_of"][row], -1)
        if k >= 0 and begins[k] < 0:
            begins[k] = step.run.ops["seq"][row]
    return begins


def _states(step: Step, bodies: Sequence[Sequence[int]]) -> tuple[list[set[int]], bool]:
    """Return the states before each iteration, and whether no value of an early one is read much later."""
    of = {row: k for k, body in enumerate(bodies) for row in body}
    n = len(bodies)
    states: list[set[int]] = [set() for _ in range(n)]
    repeats = True
    for row, k in of.items():
        readers = step.flow.readers.get(row, ())
        latest = max((of.get(reader, n) for reader in readers), default=k)
        repeats = repeats and latest - k <= _LONGEST_MEMORY
        for later in range(k + 1, min(latest, n - 1) + 1):
            states[later].add(row)
    return states, repeats
