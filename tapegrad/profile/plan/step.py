"""One training step of a run, as a plan needs it: lives of values, and what each call made, kept and took."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tapegrad.profile.plan.flow import Flow
from tapegrad.profile.plan.lives import NEVER, Key, Life
from tapegrad.tracing.names import KINDS, PHASES
from tapegrad.tracing.run import Run

FORWARD, BACKWARD, RECOMPUTE = (PHASES.index(p) for p in ("forward", "backward", "recompute"))
CALLABLE = (KINDS.index("function"), KINDS.index("layer"))
_LAST = 1 << 60


@dataclass
class Site:
    """A call in the step: the allocations of its forward pass, and when it ran, forward and backward.

    ``close``: its last moment, to which the frees up to the next operation belong.
    """

    call: int
    begin: int
    close: int
    ns: int = 0
    made: dict[int, None] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    back_begin: int = -1
    pure: bool = True
    """Whether nothing but the forward pass ran in it."""


class Change(NamedTuple):
    """What dropping the values of a call changes.

    ``changed``: what becomes of its own values, by allocation; ``until``: to when others stay, at least;
    ``kept_bytes``: of its values that are not kept.
    """

    changed: dict[int, list[Life]]
    until: dict[int, Key]
    kept_bytes: int
    held: dict[int, Life] = {}
    """By operation: results that are computed only because the call takes or returns them."""


def lives_with(lives: Mapping[int, Life], changes: Iterable[Change]) -> list[Life]:
    """What lives become with several changes (of calls that are not within each other)."""
    return [life for those in changed_lives(lives, changes).values() for life in those]


def changed_lives(lives: Mapping[int, Life], changes: Iterable[Change]) -> dict[int, list[Life]]:
    """The same, by allocation."""
    result = {i: [life] for i, life in lives.items()}
    changes = list(changes)
    for change in changes:
        result.update(change.changed)
    for change in changes:
        for i, key in change.until.items():
            if i in result:
                first, *rest = result[i]
                result[i] = [first._replace(end=max(first.end, key)), *rest]
        for op, life in change.held.items():
            (before,) = result.get(~op, [life])
            result[~op] = [Life(life.bytes, min(before.begin, life.begin), max(before.end, life.end))]
    return result


class Step:
    """A step: ``begin`` and ``end`` are its first and last seq."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        a, o = run.allocs, run.ops
        if number < 0:
            self.begin, self.end = 0, max([0, *a["begin_seq"], *a["end_seq"], *o["seq"]])
        else:
            self.begin, self.end = run.steps["begin_seq"][number], run.steps["end_seq"][number]
        self.lives = self._lives()
        lo, hi = bisect_left(o["seq"], self.begin), bisect_right(o["seq"], self.end)
        self.op_rows = range(lo, hi)
        self.allocated = sorted((a["begin_seq"][i], i) for i in self.lives if a["begin_seq"][i] >= self.begin)
        self._read = sorted((last, i) for i in self.lives if (last := a["last_forward_seq"][i]) >= self.begin)
        self._doing = sorted([*o["seq"][lo:hi], *(seq for seq, _ in self.allocated)])
        self._above: dict[int, list[int]] = {}
        self.sites = self._sites()
        self._note_calls()

    def change_of(self, site: Site) -> Change:
        """What changes if of a call's own values what only tapes want goes when it returns.

        That is recomputed when the walk back comes to the call, with what comes and goes meanwhile, in the same order;
        until then stays what the call has read of others.
        """
        changed: dict[int, list[Life]] = {}
        kept_bytes, back = 0, site.back_begin
        over = back, -1, _LAST
        for i in site.made:
            nbytes, begin, end = life = self.lives[i]
            again = back, -1, begin[0]
            if end[0] <= site.close:
                changed[i] = [life, Life(nbytes, again, (back, -1, end[0]))]
            elif begin[0] <= site.close and end < NEVER and not self._read_outside(site, i):
                needed = end > over
                changed[i] = [Life(nbytes, begin, (site.close, 2, 0)), Life(nbytes, again, end if needed else over)]
                kept_bytes += nbytes if needed else 0
        read = self._read[bisect_left(self._read, (site.begin, -1)) : bisect_right(self._read, (site.close, _LAST))]
        inputs = {i for seq, i in read if i not in site.made and self._made_from(seq) in site.made}
        return Change(changed, {i: over for i in inputs if self.lives[i].end < over}, kept_bytes)

    @cached_property
    def flow(self) -> Flow:
        """Which operation of the forward pass reads the result of which."""
        return Flow(self.run, self.op_rows)

    def checkpoint_of(self, site: Site) -> Change:
        """Return what changes if the program itself checkpoints the call: it holds its arguments until it is rerun.

        They are computed then, and so is what it returns, also where an elementwise region would have kept neither.
        """
        change, flow, seqs = self.change_of(site), self.flow, self.run.ops["seq"]
        until, held = dict(change.until), {}
        over = site.back_begin, -1, _LAST
        for op in flow.into(site.rows):
            if (alloc := flow.alloc.get(op, -1)) in self.lives:
                until[alloc] = over
            else:
                held[op] = Life(flow.bytes[op], (site.begin, 0, 0), over)
        for op in flow.out_of(site.rows):
            if flow.alloc.get(op, -1) not in self.lives:
                read = max(seqs[reader] for reader in flow.readers[op])
                held[op] = Life(flow.bytes[op], (site.close, 1, 0), (read, 0, 0))
        return change._replace(until=until, held=held)

    def work_of(self, rows: Iterable[int]) -> float:
        """Return the cost of some operations as a share of that of the step, without its optimizer."""
        cost = self.run.ops["cost"]
        return sum(cost[row] for row in rows) / max(sum(cost[row] for row in self.op_rows), 1)

    def above(self, call: int) -> list[int]:
        """The sites that a call is in, innermost first."""
        sites = self._above.get(call)
        if sites is None:
            sites, at = [], call
            while at >= 0:
                if at in self.sites:
                    sites.append(at)
                at = self.run.calls["parent"][at]
            self._above[call] = sites
        return sites

    def _lives(self) -> dict[int, Life]:
        """What is alive at some time in the step."""
        a, lives = self.run.allocs, {}
        for i, (begin, end, size) in enumerate(zip(a["begin_seq"], a["end_seq"], a["bytes"])):
            if begin <= self.end and (end < 0 or end >= self.begin) and size:
                over = (end, 0, 0) if 0 <= end <= self.end else NEVER
                lives[i] = Life(size, (max(begin, self.begin - 1), 0, 0), over)
        return lives

    def close_of(self, seq: int) -> int:
        """Return the last seq before the next operation or allocation after that at ``seq`` and its result."""
        seq = self._result_of(seq)
        at = bisect_right(self._doing, seq)
        return self._doing[at] - 1 if at < len(self._doing) else self.end

    def _time_of(self, site: Site) -> int:
        """Nanoseconds from the first event of a call until the next one that is no longer its own."""
        row = site.rows[-1] + 1 if site.rows else -1
        return self.run.ops["ns"][row] - self.run.calls["begin_ns"][site.call] if row in self.op_rows else 0

    def _result_of(self, seq: int) -> int:
        """When the value of the operation at ``seq`` was computed, if that was at once.

        The last operation of a call may be left pending; then its value is computed when something else reads it.
        """
        a, o = self.run.allocs, self.run.ops
        at = bisect_left(o["seq"], seq)
        if at == len(o["seq"]) or o["seq"][at] != seq:
            return seq
        following = o["seq"][at + 1] if at + 1 < len(o["seq"]) else self.end + 1
        lo, hi = bisect_left(self.allocated, (seq, -1)), bisect_left(self.allocated, (following, -1))
        own = [s for s, i in self.allocated[lo:hi] if a["op"][i] == o["name"][at] and a["call"][i] == o["call"][at]]
        return own[-1] if own else seq

    def _read_outside(self, site: Site, alloc: int) -> bool:
        """Whether something after the call reads a value that it made, not counting what its own results pend for."""
        last = self.run.allocs["last_forward_seq"][alloc]
        return last > site.close and self._made_from(last) not in site.made

    def _made_from(self, seq: int) -> int:
        """What is made from what is read at ``seq``: the next allocation; -1 if there is none."""
        at = bisect_right(self.allocated, (seq, _LAST))
        return self.allocated[at][1] if at < len(self.allocated) else -1

    def _sites(self) -> dict[int, Site]:
        """The calls of functions and layers in the forward pass of the step."""
        c, sites = self.run.calls, {}
        for i, step in enumerate(c["step"]):
            if (step == self.number or self.number < 0) and c["phase"][i] == FORWARD and c["kind"][i] in CALLABLE:
                sites[i] = Site(i, c["begin_seq"][i], -1)
        return sites

    def _note_calls(self) -> None:
        """What each call did, and when.

        One in which the forward pass ends, or that does something after it, is the training step, not a part of it.
        """
        a, o = self.run.allocs, self.run.ops
        events = [(o["seq"][row], o["phase"][row], o["call"][row]) for row in self.op_rows]
        for row, (seq, phase, call) in zip(self.op_rows, events):
            for i in self.above(call):
                site = self.sites[i]
                if phase == FORWARD:
                    site.close = max(site.close, seq)
                    site.rows.append(row)
                elif phase == BACKWARD and seq > site.close and site.back_begin < 0:
                    site.back_begin = seq
        for site in self.sites.values():
            site.ns = self._time_of(site)
            site.close = self.close_of(site.close)
        for seq, i in self.allocated:
            phase = a["phase"][i]
            events.append((seq, phase, a["call"][i]))
            for j in self.above(a["call"][i]) if phase == FORWARD else ():
                self.sites[j].made[i] = None
        for seq, phase, call in events:
            for i in self.above(call) if phase not in (FORWARD, BACKWARD, RECOMPUTE) else ():
                self.sites[i].pure = self.sites[i].pure and seq < self.sites[i].close
        walk = [seq for seq, phase, _ in events[: len(self.op_rows)] if phase == BACKWARD]
        for site in self.sites.values():
            site.pure = site.pure and bisect_left(walk, site.begin) == bisect_right(walk, site.close)
