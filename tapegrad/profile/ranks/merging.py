"""One run of several ranks: what one of them recorded, with the collectives and walks of all, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapegrad.profile.ranks.clocks import Clock
from tapegrad.tracing.run import COLUMNS, Run

_TIMES = {"communication": ("entered_ns", "begun_ns", "done_ns", "needed_ns"), "walks": ("begin_ns", "end_ns")}


@dataclass(frozen=True)
class Part:
    """What a rank tells of its run: ``run`` holds its collectives, walks, peak and outcome; times by its own clock."""

    rank: int
    run: Run
    began_ns: int
    ended_ns: int
    sent_bytes: int

    @property
    def failed(self) -> bool:
        """Whether its program has."""
        return not self.run.finished


def part_of(rank: int, run: Run, began_ns: int, ended_ns: int, sent_bytes: int) -> Part:
    """What the rank that has recorded ``run`` tells of it."""
    light = Run(run.meta, run.strings, peak=run.peak)
    for table in _TIMES:
        light.tables[table] = run.tables[table]
    return Part(rank, light, began_ns, ended_ns, sent_bytes)


def first_failed(parts: Sequence[Part], clocks: Mapping[int, Clock]) -> Part | None:
    """The rank whose program failed first; others may have failed because of it."""
    failed = [p for p in parts if p.failed]
    return min(failed, key=lambda p: clocks[p.rank].by_rank_0(p.ended_ns), default=None)


def highest(parts: Sequence[Part]) -> Part:
    """The rank with the highest peak, the first of several."""
    return max(parts, key=lambda p: (p.run.peak["bytes"], -p.rank))


def merged(main: Run, parts: Sequence[Part], clocks: Mapping[int, Clock], size: int) -> Run:
    """The run of the rank that has recorded ``main``, with what ``parts``, in the order of ranks, tell of all.

    ``size``: of the job; ranks that are not among ``parts`` have told nothing.
    """
    run = replace(main, strings=list(main.strings), tables=dict(main.tables), meta=dict(main.meta))
    for table in (*_TIMES, "ranks"):
        run.tables[table] = {column: [] for column in COLUMNS[table]}
    strings = {text: number for number, text in enumerate(run.strings)}
    of_main = next(p for p in parts if p.rank == main.meta["rank"])
    began = clocks[of_main.rank].by_rank_0(of_main.began_ns)
    for part in parts:
        moved = _Moved(part, clocks[part.rank], began)
        moved.add_to(run, strings)
        ranks = {
            "rank": part.rank, "peak_bytes": part.run.peak["bytes"], "begin_ns": moved.since(part.began_ns),
            "end_ns": moved.since(part.ended_ns), "sent_bytes": part.sent_bytes,
        }  # fmt: skip
        for column, value in ranks.items():
            run.ranks[column].append(value)
    run.strings = list(strings)
    run.meta |= {"ranks": size, "outcome": _outcome(parts, clocks, size)}
    return run


class _Moved:
    """The tables of a part with the strings, rows and times that they have in the merged run."""

    def __init__(self, part: Part, clock: Clock, began: int) -> None:
        self._part, self._clock, self._began = part, clock, began

    def since(self, ns: int) -> int:
        """In ns since the merged run's start; what was before counts as at its start."""
        return max(0, self._clock.by_rank_0(ns) - self._began)

    def add_to(self, run: Run, strings: dict[str, int]) -> None:
        """Add them to tables that hold those of other ranks; ``strings``: the number of each."""
        part, before = self._part, run.count("walks")
        for table, times in _TIMES.items():
            for column, into in COLUMNS[table].items():
                values = part.run.tables[table][column]
                if column in times:
                    values = [ns if ns < 0 else self.since(part.began_ns + ns) for ns in values]
                elif into == "strings":
                    values = [n if n < 0 else strings.setdefault(part.run.strings[n], len(strings)) for n in values]
                elif into == "walks":
                    values = [n if n < 0 else before + n for n in values]
                run.tables[table][column] += values


def how(outcome: Mapping[str, Any]) -> str:
    """How a program has ended."""
    return outcome.get("message") or (f"exit status {outcome['code']}" if outcome["code"] else "it has ended")


def _outcome(parts: Sequence[Part], clocks: Mapping[int, Clock], size: int) -> dict[str, Any]:
    """That of the first rank that failed, with its number; who has told nothing."""
    failed = first_failed(parts, clocks)
    silent = sorted(set(range(size)) - {p.rank for p in parts})
    told: dict[str, Any] = parts[0].run.meta["outcome"]
    if failed is not None:
        told = failed.run.meta["outcome"]
        told = told | {"message": f"rank {failed.rank}: {how(told)}"}
    if silent:
        who = f"{'rank' if len(silent) == 1 else 'ranks'} {', '.join(map(str, silent))}"
        message = "; ".join([*filter(None, [told.get("message")]), f"nothing was heard of {who}"])
        told = told | {"message": message}
    return told
