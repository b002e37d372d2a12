"""A run as the page reads it: a JSON header and columns of integers, compressed.

After unpacking: the header's length (4 bytes, little-endian), the header, then each column that the header lists as
``[name, length, bytes per number, 1 if each number is the difference to the one before]``.  A column's numbers are
two's complement and cut into planes, all their lowest bytes first: that packs tighter than whole numbers do.
``assets/decode.mjs`` is the reader.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import sub

from tapegrad.profile.report.arenas import arenas
from tapegrad.profile.report.communication import line_rows, rank_rows
from tapegrad.tracing.communication import collectives
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.names import CATEGORIES, KINDS, MARKS, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import Event, events

LARGEST = (1 << 53) - 1
"""The largest integer that JavaScript's numbers hold exactly."""
_WIDTHS = ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
_ALLOC_COLUMNS = (
    "bytes", "requested", "op", "phase", "stack", "call", "shape", "dtype", "step", "holder", "remat_of",
    "last_forward_seq", "next_backward_seq", "device",
)  # fmt: skip
_WHOLE_TABLES = ("frames", "stacks", "calls", "steps", "marks", "samples", "walks")

Columns = dict[str, list[int]]


def encode(run: Run, *, source: bool, advice: Mapping[str, object] | None, max_drawn: int) -> bytes:
    """The compressed payload of ``run``; the smallest allocations beyond ``max_drawn`` are folded into sums.

    Raises RunFileError if a number in the run, or the sum of its bytes, is beyond 2**53 - 1.
    """
    kept, folded = _largest(run, max_drawn)
    columns = _columns(run, kept, folded)
    _check_exact(run, columns)
    packed = {name: _pack(values) for name, values in columns.items()}
    meta = {key: value for key, value in run.meta.items() if key != "plan"} | {"planned": bool(run.meta.get("plan"))}
    header = {
        "meta": meta, "peak": run.peak, "checks": run.checks, "strings": run.strings, "advice": advice,
        "sources": run.sources if source else None,
        "ranks": [asdict(row) for row in rank_rows(run)], "communication": [asdict(row) for row in line_rows(run)],
        "arenas": [asdict(arena) for arena in arenas(run)],
        "categories": CATEGORIES, "phases": PHASES, "kinds": KINDS, "mark_kinds": MARKS,
        "folded": {"count": len(folded), "bytes": sum(run.allocs["bytes"][i] for i in folded)},
        "columns": [[name, len(columns[name]), width, delta] for name, (width, delta, _) in packed.items()],
    }  # fmt: skip
    head = json.dumps(header, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    body = b"".join(data for _, _, data in packed.values())
    return gzip.compress(len(head).to_bytes(4, "little") + head + body, compresslevel=6, mtime=0)


def _largest(run: Run, max_drawn: int) -> tuple[list[int], list[int]]:
    """The numbers of the ``max_drawn`` largest allocations, in order, and those of the others."""
    sizes = run.allocs["bytes"]
    if len(sizes) <= max_drawn:
        return list(range(len(sizes))), []
    by_size = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    return sorted(by_size[:max_drawn]), sorted(by_size[max_drawn:])


def _columns(run: Run, kept: list[int], folded: list[int]) -> Columns:
    numbers, table = {old: new for new, old in enumerate(kept)}, run.allocs
    columns = {f"allocs.{name}": table[name] for name in _ALLOC_COLUMNS}
    if folded:
        columns = {name: [values[i] for i in kept] for name, values in columns.items()}
    columns["allocs.remat_of"] = [numbers.get(old, -1) for old in columns["allocs.remat_of"]]
    columns["allocs.number"] = kept
    columns |= _event_columns(run, events(run), numbers, bool(folded))
    for whole in _WHOLE_TABLES:
        columns |= {f"{whole}.{name}": values for name, values in run.tables[whole].items()}
    columns |= {f"ops.{name}": run.ops[name] for name in ("seq", "ns", "name", "phase", "stack")}
    return columns | _bands(run) | _lanes(run)


def _event_columns(run: Run, listed: list[Event], numbers: dict[int, int], folding: bool) -> Columns:
    """What changed when: ``change`` holds both categories, of before and after (0: not alive), 16 to one."""
    columns = {
        "events.seq": [e.seq for e in listed],
        "events.ns": [e.ns for e in listed],
        "events.alloc": [numbers.get(e.alloc, -1) for e in listed],
        "events.change": [(e.before + 1) * 16 + e.after + 1 for e in listed],
    }
    if folding:  # of allocations that the page does not list one by one it needs the bytes here
        sizes = run.allocs["bytes"]
        columns["events.folded"] = [0 if e.alloc in numbers else sizes[e.alloc] for e in listed]
    return columns


def _bands(run: Run) -> Columns:
    """When the phase of what ran, or was allocated, became another."""
    a, o = run.allocs, run.ops
    moments: Iterable[tuple[int, int, int]] = sorted(
        [*zip(a["begin_seq"], a["begin_ns"], a["phase"]), *zip(o["seq"], o["ns"], o["phase"])]
    )
    bands: list[tuple[int, int, int]] = []
    for moment in moments:
        if not bands or bands[-1][2] != moment[2]:
            bands.append(moment)
    return {f"bands.{name}": [band[i] for band in bands] for i, name in enumerate(("seq", "ns", "phase"))}


def _lanes(run: Run) -> Columns:
    """What ranks did together; ``last``: when the last rank came; ``exposed``: how long the program stood still."""
    c = run.communication
    rows = [
        (e.rank, e.entered, e.entered + e.others, e.done, e.exposed, int(e.under_way), kind, file, e.line, e.bytes)
        for e, kind, file in zip(collectives(run), c["kind"], c["file"]) if e.done >= 0
    ]  # fmt: skip
    names = ("rank", "begin", "last", "end", "exposed", "under_way", "kind", "file", "line", "bytes")
    return {f"lanes.{name}": [row[i] for row in rows] for i, name in enumerate(names)}


def _check_exact(run: Run, columns: Columns) -> None:
    most = sum(map(abs, run.allocs["bytes"]))
    for values in columns.values():
        if values:
            most = max(most, max(values), -min(values))
    if max(most, *map(abs, run.peak.values())) > LARGEST:
        raise RunFileError(
            f"the run holds {most}, and a page counts exactly to {LARGEST} only; use --json or --csv instead of --html"
        )


def _pack(values: list[int]) -> tuple[int, int, bytes]:
    """Bytes per number, whether they are differences, and the bytes: whichever of the two has the smaller numbers."""
    differences = [*values[:1], *map(sub, values[1:], values)]
    delta = sum(map(abs, differences)) < sum(map(abs, values))
    numbers = differences if delta else values
    low, high = min(numbers, default=0), max(numbers, default=0)
    width, code = next((w, c) for w, c in _WIDTHS if -(1 << 8 * w - 1) <= low and high < 1 << 8 * w - 1)
    data = array(code, numbers)
    if data.itemsize != width:  # no platform we know of; but the page would show wrong figures without a word
        raise RunFileError(f"this Python's integers of kind {code!r} have {data.itemsize} bytes, not {width}")
    planes = data.tobytes()
    return width, int(delta), b"".join(planes[i::width] for i in range(width))
