"""A trace in the trace-event format, which ui.perfetto.dev and chrome://tracing open.

A track of calls, a track of operations for each phase, and counters of the bytes alive by category and of the pool.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

from tapegrad.profile.report.rows import Clock, source_line
from tapegrad.tracing.atomic import write_text
from tapegrad.tracing.names import CATEGORIES, KINDS, MARKS, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import totals

PID = 1
TRACKS = ("calls", *PHASES)

Event = tuple[int, dict[str, object]]
"""The time of an event, in ns, and the event."""


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the trace of ``run`` to ``path``; times in microseconds, bytes as integers.  Raises OSError."""
    events = [*_calls(run), *_ops(run), *_counters(run), *_marks(run)]
    events.sort(key=lambda pair: pair[0])
    write_text(path, _parts(run, (event for _, event in events)))


def _parts(run: Run, events: Iterable[dict[str, object]]) -> Iterator[str]:
    about = {"program": run.meta["program"], "device": run.meta["device"]["name"], "tapegrad": run.meta["tapegrad"]}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    yield ",\n".join(json.dumps(event) for event in _names(run))
    for event in events:
        yield ",\n" + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _names(run: Run) -> Iterator[dict[str, object]]:
    title = f"{run.meta['program']} on {run.meta['device']['name']}"
    yield {"ph": "M", "name": "process_name", "pid": PID, "args": {"name": title}}
    for track, name in enumerate(TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": PID, "tid": track + 1, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": track + 1, "args": {"sort_index": track}}


def _columns(table: dict[str, list[int]], *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(table[name] for name in names))


def _calls(run: Run) -> Iterator[Event]:
    """Calls as slices; those of several threads that overlap are cut, since slices of a track must nest."""
    columns = ("begin_ns", "end_ns", "phase", "kind", "name", "file", "line", "step", "first")
    ends: list[int] = []
    for begin, end, phase, kind, name, file, line, step, first in sorted(
        _columns(run.calls, *columns), key=lambda call: (call[0], -call[1])
    ):
        while ends and ends[-1] <= begin:
            ends.pop()
        ends.append(min([max(begin, end), *ends[-1:]]))
        args = {
            "kind": KINDS[kind], "phase": PHASES[phase], "defined": source_line(run.text(file), line, ""), "step": step,
        }  # fmt: skip
        yield _slice(0, begin, ends[-1], run.text(name), args | ({"reruns": f"call {first}"} if first >= 0 else {}))


def _ops(run: Run) -> Iterator[Event]:
    """Operations as slices: each lasts until the next one or the end of its call."""
    rows = sorted(_columns(run.ops, "ns", "seq", "name", "phase", "call", "stack"))
    for row, following in zip(rows, [*rows[1:], *rows[-1:]]):
        ns, _, name, phase, call, stack = row
        end = following[0] if call < 0 else min(following[0], max(ns, run.calls["end_ns"][call]))
        yield _slice(1 + phase, ns, end, run.text(name), {"line": source_line(*run.frame_of(stack))})


def _slice(track: int, begin: int, end: int, name: str, args: dict[str, object]) -> Event:
    return begin, {
        "ph": "X", "name": name or "(unnamed)", "cat": "op" if track else "call", "ts": begin / 1000,
        "dur": (end - begin) / 1000, "pid": PID, "tid": track + 1, "args": args,
    }  # fmt: skip


def _counters(run: Run) -> Iterator[Event]:
    used = {*run.allocs["category"], *run.changes["category"]}
    names = [(i, name) for i, name in enumerate(CATEGORIES) if i in used]
    clock = Clock(run)
    for _, ns, _, by in totals(run):
        yield ns, _counter("device memory", ns, {name: by[i] for i, name in names})
    for seq, *numbers in _columns(run.samples, "seq", "used_bytes", "reserved_bytes", "outside_bytes"):
        known = {k: n for k, n in zip(("used", "reserved", "outside"), numbers) if n >= 0}
        if known:
            yield clock.ns(seq), _counter("pool", clock.ns(seq), known)


def _counter(name: str, ns: int, args: dict[str, int]) -> dict[str, object]:
    return {"ph": "C", "name": name, "ts": ns / 1000, "pid": PID, "args": args}


def _marks(run: Run) -> Iterator[Event]:
    for ns, kind, text in _columns(run.marks, "ns", "kind", "text"):
        name = " ".join(part for part in (MARKS[kind], run.text(text)) if part)
        yield ns, {"ph": "i", "s": "g", "name": name, "cat": "mark", "ts": ns / 1000, "pid": PID, "tid": 1}
