"""Two runs side by side, as numbers: peaks, step times, what was alive at the peaks, and gradients."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tapegrad.profile.report.rows import ordered, rerun_roots, rows, short_names, short_source
from tapegrad.sizes import SizeError, parse_bytes
from tapegrad.tracing.names import CATEGORIES, MARKS
from tapegrad.tracing.run import Run

BY = ("category", "line", "op")
_IF_ANY = ("values restored per step", "offloads per step")
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


@dataclass(frozen=True)
class Change:
    """A figure of both runs; ``unit``: bytes, ns or count; -1: not known."""

    name: str
    unit: str
    before: int
    after: int

    @property
    def known(self) -> bool:
        """Whether both runs have the figure."""
        return self.before >= 0 and self.after >= 0

    @property
    def difference(self) -> int:
        """How much more the second run has."""
        return self.after - self.before


@dataclass(frozen=True)
class Gradients:
    """How the gradients compare: ``state`` is "not recorded", "bit-identical", "different" or "none in common".

    ``compared``: gradients that both runs have; ``alone``: those that only one has; ``first``: step and name of the
    first that differs.
    """

    state: str
    compared: int = 0
    alone: int = 0
    first: tuple[int, str] | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side: ``figures`` of the whole, ``parts`` of what was alive at the peaks."""

    figures: tuple[Change, ...]
    parts: tuple[Change, ...]
    gradients: Gradients

    def figure(self, name: str) -> Change:
        """One of the figures, by its name."""
        return next(change for change in self.figures if change.name == name)


@dataclass(frozen=True)
class Threshold:
    """How much a figure may grow: by a fraction, or by an amount in the figure's unit."""

    fraction: float | None = None
    amount: int = 0

    def exceeded(self, change: Change) -> bool:
        """Whether the figure grew by more; one that was nothing and is something grew by more than any fraction."""
        if self.fraction is None:
            return change.difference > self.amount
        return change.difference > self.fraction * change.before


def parse_threshold(text: str, unit: str) -> Threshold:
    """``"5%"``, for bytes ``"100MiB"``, for ns ``"20ms"``; ``"0"`` is none at all.  Raises ValueError."""
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text):
        return Threshold(fraction=float(match[1]) / 100)
    if text.strip() == "0":
        return Threshold()
    other = "a size such as 100MiB" if unit == "bytes" else "a time such as 20ms"
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*", text):
        hint = f"write {match[1]}% or {match[1]}{'MiB' if unit == 'bytes' else 'ms'}"
        raise ValueError(f"{text!r} is neither a share such as 5% nor {other}: {hint}")
    if unit == "bytes":
        try:
            return Threshold(amount=parse_bytes(text))
        except SizeError:
            raise ValueError(f"{text!r} is neither a share such as 5% nor {other}") from None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|ms|s)\s*", text)
    if match:
        return Threshold(amount=int(float(match[1]) * _NS[match[2]]))
    raise ValueError(f"{text!r} is neither a share such as 5% nor {other}")


def compare(before: Run, after: Run, by: str = "category") -> Comparison:
    """Compare two runs; ``by``: one of BY, the groups of what was alive at the peaks."""
    pairs = zip(_figures(before), _figures(after))
    figures = [Change(name, unit, value, other) for (name, unit, value), (_, _, other) in pairs]
    return Comparison(
        tuple(f for f in figures if f.name not in _IF_ANY or f.before > 0 or f.after > 0),
        tuple(_parts(before, after, by)),
        _gradients(before, after),
    )


def outcome(run: Run) -> str:
    """How a run ended, if it did not finish; nothing if it did."""
    if run.finished:
        return ""
    ended = run.meta["outcome"]
    kinds = {"oom": "out of memory", "exception": "ended by an exception", "running": "still running",
             "killed": "killed"}  # fmt: skip
    message = ended.get("message", "")
    return f"{kinds.get(ended['kind'], ended['kind'])} (code {ended['code']})" + (f": {message}" if message else "")


def steady_steps(run: Run) -> list[int]:
    """Steps that came to their end, without the first, in which things are set up (unless it is the only one)."""
    ends = {seq for seq, kind in zip(run.marks["seq"], run.marks["kind"]) if kind == MARKS.index("step")}
    ended = [i for i, end in enumerate(run.steps["end_seq"]) if end in ends]
    return ended[1:] or ended


def _figures(run: Run) -> Iterator[tuple[str, str, int]]:
    steps, table = steady_steps(run), run.steps
    reruns, rerun_ns = _reruns(run)
    yield "peak used", "bytes", run.peak["bytes"]
    yield "peak reserved", "bytes", run.peak["reserved_bytes"]
    yield "step time", "ns", _median([max(0, table["end_ns"][i] - table["begin_ns"][i]) for i in steps])
    yield "step CPU time", "ns", _median([table["cpu_ns"][i] for i in steps])
    yield "reruns per step", "count", _median([reruns[i] for i in steps])
    yield "rerun time per step", "ns", _median([rerun_ns[i] for i in steps])
    yield "values restored per step", "count", _median([table["restored"][i] for i in steps])
    yield "offloads per step", "count", _median([table["offloads"][i] for i in steps])


def _median(values: list[int]) -> int:
    return round(statistics.median(values)) if values else -1


def _reruns(run: Run) -> tuple[Counter[int], Counter[int]]:
    """How many reruns each step had, and how long they took."""
    count: Counter[int] = Counter()
    ns: Counter[int] = Counter()
    calls = run.calls
    for call, root in enumerate(rerun_roots(run)):
        if call == root:
            count[calls["step"][call]] += 1
            ns[calls["step"][call]] += max(0, calls["end_ns"][call] - calls["begin_ns"][call])
    return count, ns


def _parts(before: Run, after: Run, by: str) -> list[Change]:
    files = short_names(before, after) if by == "line" else {}
    a, b = (_sizes(run, by, files) for run in (before, after))
    names = [c for c in CATEGORIES if c in a or c in b] if by == "category" else sorted({*a, *b})
    changes = [Change(name, "bytes", a.get(name, 0), b.get(name, 0)) for name in names]
    return changes if by == "category" else sorted(changes, key=lambda c: (-abs(c.difference), c.name))


def _sizes(run: Run, by: str, files: dict[str, str]) -> Counter[str]:
    """Bytes of the groups at the peak."""
    sizes: Counter[str] = Counter()
    for row in ordered(rows(run, run.peak["seq"], by), "name"):
        sizes[short_source(row.key, files) if by == "line" else row.key] += row.bytes
    return sizes


def _gradients(before: Run, after: Run) -> Gradients:
    a, b = _digests(before), _digests(after)
    if not a or not b:
        return Gradients("not recorded")
    common = sorted(a.keys() & b.keys())
    alone = len(a.keys() ^ b.keys())
    if not common:
        return Gradients("none in common", 0, alone)
    first = next((key for key in common if a[key] != b[key]), None)
    if first is None:
        return Gradients("bit-identical", len(common), alone)
    return Gradients("different", len(common), alone, (first[0], first[1]))


def _digests(run: Run) -> dict[tuple[int, str, int], str]:
    """Digests by step, name, and ordinal among those of that name in the step."""
    seen: dict[tuple[int, str], int] = defaultdict(int)
    digests = {}
    for step, name, digest in zip(*(run.gradients[column] for column in ("step", "name", "digest"))):
        key = step, run.text(name)
        digests[(*key, seen[key])] = run.text(digest)
        seen[key] += 1
    return digests
