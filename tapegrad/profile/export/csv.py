"""CSV: one line per allocation, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator

from tapegrad.profile.report.escape import shown
from tapegrad.profile.report.rows import Clock, call_path, idle_ns
from tapegrad.tracing.atomic import write_text
from tapegrad.tracing.names import CATEGORIES, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import alive, last_categories

HEADER = (
    "id", "begin_seq", "end_seq", "begin_ns", "end_ns", "bytes", "requested_bytes", "category", "last_category", "op",
    "phase", "step", "file", "line", "function", "scope", "shape", "dtype", "device", "holder", "remat_of",
    "last_forward_seq", "next_backward_seq", "idle_ns", "alive_at_peak",
)  # fmt: skip
"""The columns; an empty cell is "none".

``seq`` numbers the events of the run, times count from its beginning.  ``bytes`` are as the pool counts them,
``requested_bytes`` those of the array.  ``category`` is what the bytes served as at first, ``last_category`` in the
end.  ``scope`` is the path of calls, ``remat_of`` the ``id`` of the allocation that held the same value before,
``idle_ns`` the time between the last use in the forward pass and the first in the backward pass, ``alive_at_peak`` 1
or 0.
"""


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the allocations of ``run`` to ``path``, with HEADER as the first line.  Raises OSError.

    Text that a spreadsheet would take for a formula has a ``'`` before it, control characters are escapes.
    """
    write_text(path, _lines(run))


def _lines(run: Run) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(HEADER)
    for row in _rows(run):
        writer.writerow([cell if isinstance(cell, int) else _text(cell) for cell in row])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def _text(cell: str) -> str:
    cell = shown(cell)
    return "'" + cell if cell.startswith(("=", "+", "-", "@")) else cell


def _rows(run: Run) -> Iterator[list[int | str]]:
    a, at_peak, clock, last = run.allocs, alive(run, run.peak["seq"]), Clock(run), last_categories(run)
    for i in range(run.count("allocs")):
        file, line, function = run.frame_of(a["stack"][i])
        yield [
            i, a["begin_seq"][i], _some(a["end_seq"][i]), a["begin_ns"][i], _some(a["end_ns"][i]), a["bytes"][i],
            a["requested"][i], CATEGORIES[a["category"][i]], CATEGORIES[last[i]], run.text(a["op"][i]),
            PHASES[a["phase"][i]], _some(a["step"][i]), file, line if file else "", function,
            call_path(run, a["call"][i]) if a["call"][i] >= 0 else "", run.text(a["shape"][i]),
            run.text(a["dtype"][i]), run.text(a["device"][i]), run.text(a["holder"][i]), _some(a["remat_of"][i]),
            _some(a["last_forward_seq"][i]), _some(a["next_backward_seq"][i]), _some(idle_ns(run, i, clock)),
            int(i in at_peak),
        ]  # fmt: skip


def _some(number: int) -> int | str:
    return number if number >= 0 else ""
