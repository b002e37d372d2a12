"""One training step of a run, as a plan needs it: lives of values, and what each call made, kept and took.

Times are keys that sort: ``(seq, 0, 0)`` is an event of the recorded run; a second number below or above 0 puts what a
plan adds before or after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from tapegrad.profile.runs.model import KINDS, PHASES, Run

Key = tuple[int, int, int]
FORWARD, BACKWARD, RECOMPUTE = (PHASES.index(p) for p in ("forward", "backward", "recompute"))
CALLABLE = (KINDS.index("function"), KINDS.index("layer"))
NEVER: Key = (1 << 62, 0, 0)


@dataclass
class Life:
    """The life of an allocation: from ``begin`` up to (not with) ``end``."""

    bytes: int
    begin: Key
    end: Key


@dataclass
class Site:
    """A call in the step: the allocations of its forward pass, and when it ran, forward and backward.

    ``close``: its last moment, to which the frees up to the next operation belong.
    """

    call: int
    begin: int
    close: int
    ns: int = 0
    made: list[int] = field(default_factory=list)
    mine: set[int] = field(default_factory=set)
    backward: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    back_begin: int = -1
    back_close: int = -1
    pure: bool = True
    """Whether nothing but the forward pass ran in it."""


class Step:
    """A step: ``begin`` and ``end`` are its first and last seq."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        if number < 0:
            self.begin, self.end = 0, max([0, *run.allocs["begin_seq"], *run.allocs["end_seq"], *run.ops["seq"]])
        else:
            self.begin, self.end = run.steps["begin_seq"][number], run.steps["end_seq"][number]
        self.lives = self._lives()
        self._events()
        self.sites = self._sites()
        self._above: dict[int, list[int]] = {}
        self._note_calls()

    def _lives(self) -> dict[int, Life]:
        """What is alive at some time in the step."""
        a, lives = self.run.allocs, {}
        for i, (begin, end, size) in enumerate(zip(a["begin_seq"], a["end_seq"], a["bytes"])):
            if begin <= self.end and (end < 0 or end >= self.begin) and size:
                lives[i] = Life(
                    size, (max(begin, self.begin - 1), 0, 0), (end, 0, 0) if 0 <= end <= self.end else NEVER
                )
        return lives

    def _events(self) -> None:
        """Seqs of allocations and operations; allocations by seq; frees by seq."""
        a, o = self.run.allocs, self.run.ops
        lo, hi = bisect_left(o["seq"], self.begin), bisect_right(o["seq"], self.end)
        self.op_rows = range(lo, hi)
        inside = [i for i in self.lives if a["begin_seq"][i] >= self.begin]
        self.doing = sorted([*o["seq"][lo:hi], *(a["begin_seq"][i] for i in inside)])
        self.allocated = sorted((a["begin_seq"][i], i) for i in inside)
        self.backward = sorted((i for i in inside if a["phase"][i] == BACKWARD), key=a["begin_seq"].__getitem__)
        self.read = sorted((last, i) for i in self.lives if (last := a["last_forward_seq"][i]) >= self.begin)
        self.freed = sorted((life.end[0], i) for i, life in self.lives.items() if life.end < NEVER)

    def close_of(self, seq: int) -> int:
        """The last seq before the next operation or allocation after ``seq``."""
        at = bisect_right(self.doing, seq)
        return self.doing[at] - 1 if at < len(self.doing) else self.end

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

    def computed_from(self, seq: int) -> int:
        """What is made from what is read at ``seq``: the next allocation; -1 if there is none."""
        at = bisect_right(self.allocated, (seq, 1 << 62))
        return self.allocated[at][1] if at < len(self.allocated) else -1

    def read_outside(self, site: Site, alloc: int) -> bool:
        """Whether something after the call reads a value that it made, not counting what its own results pend for."""
        last = self.run.allocs["last_forward_seq"][alloc]
        return last > site.close and self.computed_from(last) not in site.mine

    def cotangent_pends(self, site: Site) -> bool:
        """Whether what the walk has done last before it comes to the call pends."""
        row = bisect_left(self.run.ops["seq"], site.back_begin) - 1
        return row in self.op_rows and self._result_of(seq := self.run.ops["seq"][row]) == seq

    def freed_after(self, seq: int) -> list[int]:
        """What was freed right after the allocation at ``seq`` and those of the same kernel, which follow at once."""
        at = bisect_right(self.allocated, (seq, 1 << 62))
        while at < len(self.allocated) and self.allocated[at][0] == seq + 1:
            seq, at = seq + 1, at + 1
        until = self.close_of(seq)
        lo, hi = bisect_left(self.freed, (seq, -1)), bisect_right(self.freed, (until, 1 << 62))
        return [i for _, i in self.freed[lo:hi]]

    def _sites(self) -> dict[int, Site]:
        """The calls of functions and layers in the forward pass of the step."""
        c, sites = self.run.calls, {}
        for i, step in enumerate(c["step"]):
            if (step == self.number or self.number < 0) and c["phase"][i] == FORWARD and c["kind"][i] in CALLABLE:
                sites[i] = Site(i, c["begin_seq"][i], -1)
        return sites

    def _note_calls(self) -> None:
        """What each call did, and when."""
        self._note_operations()
        for site in self.sites.values():
            site.ns = self._time_of(site)
            site.close = self.close_of(self._result_of(site.close))
            if site.back_begin >= 0:
                site.back_close = self.close_of(self._result_of(site.back_close))
        self._note_allocations()
        self._note_impure()

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

    def _note_operations(self) -> None:
        o = self.run.ops
        for row in self.op_rows:
            seq, phase = o["seq"][row], o["phase"][row]
            for i in self.above(o["call"][row]):
                site = self.sites[i]
                if phase == FORWARD:
                    site.close = max(site.close, seq)
                    site.rows.append(row)
                elif phase == BACKWARD and seq > site.close:
                    site.back_begin = seq if site.back_begin < 0 else site.back_begin
                    site.back_close = seq

    def _note_allocations(self) -> None:
        a = self.run.allocs
        for _, i in self.allocated:
            for j in self.above(a["call"][i]):
                site = self.sites[j]
                (site.made if a["phase"][i] == FORWARD else site.backward).append(i)
        for site in self.sites.values():
            site.mine.update(site.made)

    def _note_impure(self) -> None:
        """A call in which the forward pass ends, or that does something after it, is the training step, not a part."""
        a, o = self.run.allocs, self.run.ops
        events = [(o["seq"][row], o["phase"][row], o["call"][row]) for row in self.op_rows]
        events += [(seq, a["phase"][i], a["call"][i]) for seq, i in self.allocated]
        for seq, phase, call in events:
            if phase not in (FORWARD, BACKWARD, RECOMPUTE):
                for i in self.above(call):
                    self.sites[i].pure = self.sites[i].pure and seq < self.sites[i].close
        walk = [o["seq"][row] for row in self.op_rows if o["phase"][row] == BACKWARD]
        for site in self.sites.values():
            site.pure = site.pure and bisect_left(walk, site.begin) == bisect_right(walk, site.close)
