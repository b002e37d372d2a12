"""What a report shows, as numbers: what was alive at a moment, in groups, and what recomputation cost."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tapegrad.tracing.names import CATEGORIES, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import alive, last_seq, totals

BY = ("category", "line", "op", "scope", "shape")
SORTS = ("bytes", "count", "idle", "name")


@dataclass(frozen=True)
class Row:
    """Allocations alive at a moment that share a key: bytes in total, the size of each (-1: they differ).

    ``idle_ns``: the longest time between the last use in the forward pass and the first in the backward pass (-1: none
    of them waits for one).  ``op`` and ``holder``: those of most bytes.
    """

    key: str
    bytes: int
    requested: int
    count: int
    size: int
    idle_ns: int
    category: str
    op: str
    holder: str


@dataclass(frozen=True)
class Origin:
    """Where something was allocated: the step (-1: outside), the phase, the op, the function and its file and line."""

    step: int
    phase: str
    op: str
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Rerun:
    """The reruns of one checkpointed function: how often, for how long, what they brought back.

    ``spared_bytes``: of the values they brought back, what was not alive at the moment asked for.
    """

    name: str
    file: str
    line: int
    count: int
    ns: int
    bytes: int
    spared_bytes: int


class Clock:
    """The time of a seq: that of the last operation up to it."""

    def __init__(self, run: Run) -> None:
        pairs = sorted(zip(run.ops["seq"], run.ops["ns"]))
        self._seqs, self._ns = [seq for seq, _ in pairs], [ns for _, ns in pairs]

    def ns(self, seq: int) -> int:
        """When the last operation up to ``seq`` was applied."""
        i = bisect_right(self._seqs, seq)
        return self._ns[i - 1] if i else 0


def source_line(file: str, line: int, function: str) -> str:
    """``model.py:41 attention()``, as far as it is known."""
    where = f"{file}:{line}" if file else ""
    call = function if not function or function.endswith((")", ">")) else f"{function}()"
    return f"{where} {call}".strip() or "(unknown)"


def op_name(name: str) -> str:
    """An op as people know it: a leaf is an array that no op made."""
    return "input array" if name == "leaf" else name


def short_names(*runs: Run) -> dict[str, str]:
    """For each file its name without the folder, where no other file of the same run has it."""
    ends: dict[str, str] = {}
    ambiguous: set[str] = set()
    for run in runs:
        tables = run.frames, run.calls, run.communication, run.tasks
        files = {run.text(i) for table in tables for i in table["file"] if i >= 0}
        names = {file: re.split(r"[/\\]", file)[-1] or file for file in files}
        ambiguous |= {end for end, n in Counter(names.values()).items() if n > 1}
        ends |= names
    return {file: file if end in ambiguous else end for file, end in ends.items()}


def short_source(key: str, names: dict[str, str]) -> str:
    """A source line with the name of its file as :func:`short_names` has it."""
    match = re.match(r"(.*):(-?\d+(?: .*)?)$", key, re.DOTALL)
    return f"{names.get(match[1], match[1])}:{match[2]}" if match else key


def call_path(run: Run, call: int) -> str:
    """``main > Block.call``: the calls in which ``call`` is, and itself."""
    names: list[str] = []
    while call >= 0:
        names.append(run.text(run.calls["name"][call]))
        call = run.calls["parent"][call]
    return " > ".join(reversed(names)) or "(no call)"


def rows(run: Run, seq: int, by: str = "category", sort: str = "bytes") -> list[Row]:
    """What is alive at ``seq`` in groups by one of BY, sorted by one of SORTS."""
    live = alive(run, seq)
    key = _key(run, by, live)
    groups: dict[str, list[int]] = defaultdict(list)
    for i in live:
        groups[key(i)].append(i)
    clock = Clock(run)
    return ordered((_row(run, k, group, live, clock) for k, group in groups.items()), sort)


def ordered(groups: Iterable[Row], sort: str) -> list[Row]:
    """Rows sorted by one of SORTS, the largest first, names from A to Z."""
    keys: dict[str, Callable[[Row], tuple[int | str, ...]]] = {
        "bytes": lambda r: (-r.bytes, r.key), "count": lambda r: (-r.count, -r.bytes, r.key),
        "idle": lambda r: (-r.idle_ns, -r.bytes, r.key), "name": lambda r: (r.key,),
    }  # fmt: skip
    return sorted(groups, key=keys[sort])


def _key(run: Run, by: str, live: dict[int, int]) -> Callable[[int], str]:
    a = run.allocs
    paths: dict[int, str] = {}

    def scope(i: int) -> str:
        call = a["call"][i]
        if call not in paths:
            paths[call] = call_path(run, call)
        return paths[call]

    keys: dict[str, Callable[[int], str]] = {
        "category": lambda i: CATEGORIES[live[i]],
        "line": lambda i: source_line(*run.frame_of(a["stack"][i])),
        "op": lambda i: run.text(a["op"][i]) or "(unknown)",
        "scope": scope,
        "shape": lambda i: f"{run.text(a['dtype'][i])}{run.text(a['shape'][i])}" or "(unknown)",
    }
    return keys[by]


def _row(run: Run, key: str, group: list[int], live: dict[int, int], clock: Clock) -> Row:
    a = run.allocs
    sizes = {a["bytes"][i] for i in group}
    return Row(
        key=key,
        bytes=sum(a["bytes"][i] for i in group),
        requested=sum(a["requested"][i] for i in group),
        count=len(group),
        size=sizes.pop() if len(sizes) == 1 else -1,
        idle_ns=max(idle_ns(run, i, clock) for i in group),
        category=_most(a["bytes"], group, lambda i: CATEGORIES[live[i]]),
        op=_most(a["bytes"], group, lambda i: run.text(a["op"][i])),
        holder=_most(a["bytes"], group, lambda i: run.text(a["holder"][i])),
    )


def _most(sizes: list[int], group: list[int], name: Callable[[int], str]) -> str:
    totals: Counter[str] = Counter()
    for i in group:
        totals[name(i)] += sizes[i]
    return min(totals, key=lambda k: (-totals[k], k))


def idle_ns(run: Run, alloc: int, clock: Clock) -> int:
    """How long a value lies idle between its last use in the forward pass and its first in the backward pass, or -1."""
    last, following = run.allocs["last_forward_seq"][alloc], run.allocs["next_backward_seq"][alloc]
    return max(0, clock.ns(following) - clock.ns(last)) if last >= 0 and following >= 0 else -1


def origin(run: Run, seq: int) -> Origin | None:
    """Where the last allocation up to ``seq`` was made: at a peak, the one that made it."""
    begins = run.allocs["begin_seq"]
    alloc = max((i for i, begin in enumerate(begins) if begin <= seq), key=begins.__getitem__, default=-1)
    if alloc < 0:
        return None
    a = run.allocs
    return Origin(
        a["step"][alloc], PHASES[a["phase"][alloc]], run.text(a["op"][alloc]), *run.frame_of(a["stack"][alloc])
    )


def step_of(run: Run, seq: int) -> int:
    """The step in which ``seq`` lies, or -1."""
    spans = zip(run.steps["begin_seq"], run.steps["end_seq"])
    return next((i for i, (begin, end) in enumerate(spans) if begin <= seq <= end), -1)


def span(run: Run, step: int) -> tuple[int, int]:
    """The first and the last seq of a step, or of the whole run for -1."""
    if step >= 0:
        return run.steps["begin_seq"][step], run.steps["end_seq"][step]
    return 0, max([last_seq(run), *run.ops["seq"]])


def unattributed(run: Run, seq: int) -> int:
    """Bytes that other code had in the pool, by the last sample up to ``seq``, or else the first one; 0 without any."""
    s = run.samples
    before = [n for at, n in zip(s["seq"], s["outside_bytes"]) if at <= seq]
    return (before or s["outside_bytes"][:1] or [0])[-1]


def curve(run: Run, begin: int, end: int) -> list[tuple[int, int, int]]:
    """``(seq, ns, bytes)`` at ``begin`` and after every event up to ``end``."""
    points: list[tuple[int, int, int]] = []
    before = 0
    for seq, ns, total, _ in totals(run):
        if seq > end:
            break
        if seq < begin:
            before = total
        else:
            points.append((seq, ns, total))
    return [(begin, points[0][1] if points else 0, before), *points] if before or points else []


def reruns(run: Run, seq: int, step: int = -1) -> list[Rerun]:
    """Recomputation by function, in one step or (-1) the whole run, the longest first."""
    calls, roots = run.calls, rerun_roots(run)
    begin, end = span(run, step)
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def group(call: int) -> list[int]:
        if call < 0:
            return groups[("(single values)", "", 0)]
        return groups[(run.text(calls["name"][call]), run.text(calls["file"][call]), calls["line"][call])]

    for call, root in enumerate(roots):
        if call == root and begin <= calls["begin_seq"][call] <= end:
            sums = group(call)
            sums[0] += 1
            sums[1] += max(0, calls["end_ns"][call] - calls["begin_ns"][call])
    _add_bytes(run, seq, (begin, end), roots, group)
    listed = [Rerun(*key, *numbers) for key, numbers in groups.items()]
    return sorted(listed, key=lambda r: (-r.ns, -r.bytes, r.name, r.file, r.line))


def _add_bytes(
    run: Run, seq: int, within: tuple[int, int], roots: list[int], group: Callable[[int], list[int]]
) -> None:
    """What reruns brought back, and how much of it was not alive at ``seq``, though it had been made."""
    a = run.allocs
    for i, old in enumerate(a["remat_of"]):
        if old < 0 or not within[0] <= a["begin_seq"][i] <= within[1]:
            continue
        root = roots[a["call"][i]] if a["call"][i] >= 0 else -1
        sums = group(root)
        if root < 0:  # brought back one at a time, by the memory budget
            sums[0] += 1
        sums[2] += a["bytes"][i]
        if 0 <= a["end_seq"][old] <= seq < a["begin_seq"][i]:
            sums[3] += a["bytes"][i]


def rerun_roots(run: Run) -> list[int]:
    """For every call the outermost rerun in which it is (itself, if it is one), or -1."""
    roots: list[int] = []
    for call, (parent, first) in enumerate(zip(run.calls["parent"], run.calls["first"])):
        root = roots[parent] if parent >= 0 else -1
        roots.append(root if root >= 0 else call if first >= 0 else -1)
    return roots
