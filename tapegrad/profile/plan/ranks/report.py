"""The answer to ``tapegrad plan --ranks``, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tapegrad.profile.plan.ranks.network import Link, Network
from tapegrad.profile.plan.ranks.predicting import Line, Prediction, bucket_sizes, doublings, predict
from tapegrad.profile.plan.ranks.recorded import step_of
from tapegrad.profile.plan.text import change_in_time, file_line
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import counted, ms, percent
from tapegrad.sizes import format_bytes
from tapegrad.tracing.run import Run

_WORTH = 0.99
"""Another size of buckets is named if a step takes at most this part of its time then."""
_TIMES = "{:>15}  {:>8}  {:>8}"


class Answer:
    """What a run is predicted to take on ``ranks`` ranks; ``network``: that of so many."""

    def __init__(self, run: Run, ranks: int, network: Callable[[int], Network]) -> None:
        self.now = step_of(run)
        self.step = self.now.step
        self.network = network(ranks)
        self.there = predict(self.step, self.network)
        self.fewer = [predict(self.step, network(n)) for n in doublings(ranks)]
        self.sizes = list(bucket_sizes(self.step, self.network))
        self.on_gpu = not run.meta["device"]["name"].startswith("cpu")

    @property
    def best(self) -> tuple[int, Prediction] | None:
        """The best ``bucket_bytes`` and what it gives, if that is worth a change."""
        size, best = min(self.sizes, key=lambda pair: pair[1].seconds, default=(0, self.there))
        return (size, best) if best.seconds <= _WORTH * self.there.seconds else None

    @property
    def assumed(self) -> str:
        """What the prediction rests on."""
        parts = [
            "each rank computes what the recorded one did, at the same speed, also while bytes are on their way",
            "a message of n bytes takes latency + n / bandwidth, and each rank sends and receives one at a time",
            "collectives go by the engine's own algorithms, one after the other, among all ranks",
            "what a rank adds up of others' values takes "
            + ("it as long as the recorded process, which had its own alone" if self.now.ranks == 1 else "no time"),
        ]
        if self.on_gpu:
            parts.append("a GPU has done its work when the host has asked for it")
        return "; ".join(parts)


def as_json(answer: Answer) -> dict[str, Any]:
    """All figures; times in ns."""
    n, now = answer.network, answer.now
    return {
        "ranks": n.ranks, "links": [_link(link) for link in n.links],
        "measured_ranks": now.ranks, "measured_step_ns": now.ns, "computation_ns": _ns(now.step.computation),
        "predicted": _figures(answer.there),
        "collectives": [{
            "kind": line.kind, "file": line.file, "line": line.line, "calls": line.calls, "bytes": line.nbytes,
            "predicted_ns": _ns(line.seconds), "predicted_hidden_ns": _ns(line.hidden),
            "predicted_exposed_ns": _ns(line.exposed),
        } for line in answer.there.lines],
        "by_ranks": [_figures(p) for p in answer.fewer],
        "by_bucket_bytes": [{"bucket_bytes": size, **_figures(p)} for size, p in answer.sizes],
        "best_bucket_bytes": None if answer.best is None else answer.best[0],
        "assumed": answer.assumed,
    }  # fmt: skip


def _figures(p: Prediction) -> dict[str, float]:
    return {
        "ranks": p.ranks, "predicted_step_ns": _ns(p.seconds), "predicted_exposed_ns": _ns(p.exposed),
        "predicted_efficiency": round(p.efficiency, 4),
    }  # fmt: skip


def _link(link: Link) -> dict[str, float]:
    return {"bytes_per_second": link.bytes_per_second, "latency_ns": link.latency * 1e9}


def print_answer(answer: Answer, console: Console) -> None:
    """Print a headline, collectives by line, fewer ranks, other buckets, and what all that assumes."""
    out, now, there = Output(console), answer.now, answer.there
    before = f"Step on {counted(now.ranks, 'rank')} {ms(now.ns)}"
    after = f"predicted on {counted(there.ranks, 'rank')} {_ms(there.seconds)}, efficiency {_share(there)}"
    out.line(f"{before}; {after}", "bold")
    out.line()
    out.table(
        [Column("Collective", flexible=True, source=True), Column("Calls", right=True), Column("Bytes", right=True),
         Column(_TIMES.format("Predicted: time", "hidden", "exposed"), right=True)],
        [_cells(line) for line in [*there.lines, _sum(there)]], rule=True,
    )  # fmt: skip
    out.line()
    titles = ["Ranks", "Predicted step", "Predicted exposed", "Predicted efficiency"]
    rows = [[f"{p.ranks:,}", _ms(p.seconds), _ms(p.exposed), _share(p)] for p in answer.fewer]
    out.table([Column(title, right=True) for title in titles], rows)
    out.line()
    if answer.sizes:
        out.line(_buckets(answer))
    for line in textwrap.wrap(f"Assumed: {answer.assumed}.", min(console.width, 120)):
        out.line(line, "dim")


def _sum(p: Prediction) -> Line:
    calls, nbytes = sum(line.calls for line in p.lines), sum(line.nbytes for line in p.lines)
    return Line("all", "", 0, calls, nbytes, sum(line.seconds for line in p.lines), p.exposed)


def _cells(line: Line) -> list[str]:
    where = f"{file_line(line.file, line.line)} " if line.file else ""
    times = _TIMES.format(_ms(line.seconds), _ms(line.hidden), _ms(line.exposed))
    return [where + line.kind, f"{line.calls:,}", format_bytes(line.nbytes), times]


def _buckets(answer: Answer) -> str:
    if answer.best is None:
        return "Larger buckets: predicted no faster."
    size, best = answer.best
    change = change_in_time(_ns(best.seconds), _ns(answer.there.seconds))
    return f"Best bucket_bytes: predicted {format_bytes(size)}, step {_ms(best.seconds)} ({change})"


def _share(p: Prediction) -> str:
    return percent(_ns(p.seconds - p.exposed), _ns(p.seconds))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _ms(seconds: float) -> str:
    return ms(_ns(seconds))
