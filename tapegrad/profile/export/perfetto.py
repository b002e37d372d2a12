"""A trace in the trace-event format, which ui.perfetto.dev and chrome://tracing open.

One track per phase with calls and operations as slices, arrows from a value's first computation to its recomputation
and on to its use, and counters of the bytes alive by category and of the pool; and a process for each rank.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from tapegrad.profile.export import ranks_trace
from tapegrad.profile.export.slices import Slice, nested, slice_event
from tapegrad.profile.report.rows import Clock, source_line
from tapegrad.profile.runs import CATEGORIES, PHASES, Run
from tapegrad.profile.runs.model import KINDS, MARKS
from tapegrad.profile.runs.timeline import totals
from tapegrad.profile.runs.whole import write_text

PID = 1


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the trace of ``run`` to ``path``; times in microseconds, bytes as integers.  Raises OSError."""
    ops = _ops(run)
    slices = [*_calls(run), *ops]
    events = []
    for track in range(len(PHASES)):
        events += [(s.begin, slice_event(s, PID)) for s in nested([s for s in slices if s.track == track])]
    events += _flows(run, ops)
    events += _counters(run)
    events += ranks_trace.lanes(run, PID + 1)
    events += [(ns, _mark(run, ns, kind, text)) for ns, kind, text in _columns(run.marks, "ns", "kind", "text")]
    events.sort(key=lambda pair: pair[0])
    write_text(path, _parts(run, (event for _, event in events)))


def _parts(run: Run, events: Iterable[dict[str, object]]) -> Iterator[str]:
    about = {"program": run.meta["program"], "device": run.meta["device"]["name"], "tapegrad": run.meta["tapegrad"]}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    yield ",\n".join(json.dumps(event) for event in (*_names(run), *ranks_trace.names(run, PID + 1)))
    for event in events:
        yield ",\n" + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _names(run: Run) -> Iterator[dict[str, object]]:
    title = f"{run.meta['program']} on {run.meta['device']['name']}"
    yield {"ph": "M", "name": "process_name", "pid": PID, "args": {"name": title}}
    for track, phase in enumerate(PHASES):
        yield {"ph": "M", "name": "thread_name", "pid": PID, "tid": track + 1, "args": {"name": phase}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": track + 1, "args": {"sort_index": track}}


def _columns(table: dict[str, list[int]], *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(table[name] for name in names))


def _calls(run: Run) -> list[Slice]:
    slices = []
    columns = ("begin_ns", "end_ns", "phase", "kind", "name", "file", "line", "step", "first")
    for begin, end, phase, kind, name, file, line, step, first in _columns(run.calls, *columns):
        args = {"kind": KINDS[kind], "defined": source_line(run.text(file), line, ""), "step": step}
        if first >= 0:
            args["reruns"] = f"call {first}"
        slices.append(Slice(begin, max(begin, end), run.text(name) or "(unnamed)", "call", phase, args))
    return slices


def _ops(run: Run) -> list[Slice]:
    """Operations last until the next one, the end of their call or the begin of another; in the order of their seq."""
    slices, begins = [], sorted(run.calls["begin_ns"])
    rows = sorted(_columns(run.ops, "seq", "ns", "name", "phase", "call", "stack"))
    for i, (_, ns, name, phase, call, stack) in enumerate(rows):
        end = rows[i + 1][1] if i + 1 < len(rows) else ns
        if call >= 0:
            end = min(end, max(ns, run.calls["end_ns"][call]))
        if (following := bisect_right(begins, ns)) < len(begins):
            end = min(end, begins[following])
        args = {"line": source_line(*run.frame_of(stack))}
        slices.append(Slice(ns, max(ns, end), run.text(name) or "(unnamed)", "op", phase, args))
    return slices


def _flows(run: Run, ops: list[Slice]) -> Iterator[tuple[int, dict[str, object]]]:
    """Arrows: where a value was first computed, where again, and where the backward pass read it."""
    seqs = sorted(run.ops["seq"])

    def op_at(seq: int) -> Slice | None:
        i = bisect_right(seqs, seq) - 1
        return ops[i] if i >= 0 else None

    a = run.allocs
    for i, old in enumerate(a["remat_of"]):
        if old < 0:
            continue
        read = a["next_backward_seq"][i]
        stations = [op_at(a["begin_seq"][old]), op_at(a["begin_seq"][i]), op_at(read) if read >= 0 else None]
        path = [s for s in stations if s is not None]
        if len(path) < 2 or any(x.begin > y.begin for x, y in zip(path, path[1:])):
            continue
        for n, s in enumerate(path):
            ph = "s" if n == 0 else "f" if n == len(path) - 1 else "t"
            event = {"ph": ph, "id": i, "name": "recomputed", "cat": "flow", "ts": s.begin / 1000, "pid": PID}
            yield s.begin, event | {"tid": s.track + 1} | ({"bp": "e"} if ph == "f" else {})


def _counters(run: Run) -> Iterator[tuple[int, dict[str, object]]]:
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


def _mark(run: Run, ns: int, kind: int, text: int) -> dict[str, object]:
    name = " ".join(part for part in (MARKS[kind], run.text(text)) if part)
    return {"ph": "i", "s": "g", "name": name, "cat": "mark", "ts": ns / 1000, "pid": PID, "tid": len(PHASES)}
