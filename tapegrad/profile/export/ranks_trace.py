"""Of a trace: a process for each rank, with its gradient walks, its collectives, and the sums under way meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from tapegrad.profile.export.slices import Slice, nested, slice_event
from tapegrad.profile.report.rows import source_line
from tapegrad.profile.runs import Run
from tapegrad.profile.runs.communication import Collective, collectives, walks

Event = tuple[int, dict[str, object]]
"""When it begins, in ns, and the event."""


def names(run: Run, first: int) -> Iterator[dict[str, object]]:
    """The names of the processes; ``first``: the number of rank 0's."""
    for rank in _ranks(run):
        yield {"ph": "M", "name": "process_name", "pid": first + rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_name", "pid": first + rank, "tid": 1, "args": {"name": "program"}}


def lanes(run: Run, first: int) -> Iterator[Event]:
    """What each rank does: slices in which the program stands still, and spans of what is under way."""
    slices: dict[int, list[Slice]] = {rank: [] for rank in _ranks(run)}
    for walk in walks(run):
        if walk.rank in slices:
            slices[walk.rank].append(Slice(walk.begin, walk.end, "gradient walk", "walk", 0, {}))
    for number, e in enumerate(collectives(run)):
        if e.done < 0:
            continue
        args = _args(e)
        if e.under_way:
            yield from _span(e, number, first + e.rank, args)
        if e.exposed:
            name = f"wait for {e.kind}" if e.under_way else e.kind
            slices[e.rank].append(Slice(e.done - e.exposed, e.done, name or "(unnamed)", "communication", 0, args))
    for rank, mine in slices.items():
        yield from ((s.begin, slice_event(s, first + rank)) for s in nested(mine))


def _span(e: Collective, number: int, pid: int, args: dict[str, object]) -> Iterator[Event]:
    for ph, ns in (("b", e.entered), ("e", e.done)):
        yield ns, {
            "ph": ph, "name": f"{e.kind} under way", "cat": "communication", "id": number, "ts": ns / 1000, "pid": pid,
            "tid": 1, "args": args,
        }  # fmt: skip


def _ranks(run: Run) -> list[int]:
    return sorted(set(run.communication["rank"]))


def _args(e: Collective) -> dict[str, object]:
    return {
        "line": source_line(e.file, e.line, ""), "detail": e.detail, "bytes": e.bytes, "group": e.group,
        "number": e.number, "others_us": e.others / 1000, "transfer_us": e.transfer / 1000,
        "exposed_us": e.exposed / 1000, "hidden_us": e.hidden / 1000,
    }  # fmt: skip
