"""What a step is predicted to take on a network, and with which buckets of gradients it would take least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tapegrad.distributed.buckets import buckets
from tapegrad.profile.plan.ranks.collectives import seconds
from tapegrad.profile.plan.ranks.network import Network
from tapegrad.profile.plan.ranks.timeline import Step, passages

_FEWEST_BYTES = 1 << 16


@dataclass(frozen=True)
class Line:
    """Collectives of one kind that one line of the program calls; times in seconds."""

    kind: str
    file: str
    line: int
    calls: int
    nbytes: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """How much of their time the program computes."""
        return self.seconds - self.exposed


@dataclass(frozen=True)
class Prediction:
    """Of a step; times in seconds.  ``efficiency``: the part of the step that computes.

    ``lines``: what the program waits for most comes first.
    """

    ranks: int
    seconds: float
    exposed: float
    efficiency: float
    lines: list[Line]


def predict(step: Step, network: Network) -> Prediction:
    """What ``step`` takes on ``network``."""
    on_the_way = passages(step.collectives, lambda c: seconds(c, network))
    lines: dict[tuple[str, str, int], list[float]] = {}
    for c, p in zip(step.collectives, on_the_way, strict=True):
        sums = lines.setdefault((c.kind, c.file, c.line), [0, 0, 0.0, 0.0])
        for i, value in enumerate((1, c.nbytes, p.seconds, p.exposed)):
            sums[i] += value
    exposed = sum(p.exposed for p in on_the_way)
    total = step.computation + exposed
    found = [Line(*key, int(calls), int(nbytes), *times) for key, (calls, nbytes, *times) in lines.items()]
    found.sort(key=lambda line: (-line.exposed, -line.seconds))
    return Prediction(network.ranks, total, exposed, step.computation / total if total else 1.0, found)


def regrouped(step: Step, bucket_bytes: int) -> Step:
    """``step`` with its buckets joined as a tape of ``bucket_bytes`` would, and ready when the last one of them is."""
    found = [c for c in step.collectives if c.walk < 0]
    for _, of_walk in groupby((c for c in step.collectives if c.walk >= 0), lambda c: c.walk):
        parts = list(of_walk)
        for bucket in buckets([(c.nbytes, c.common) for c in parts], bucket_bytes):
            last = parts[bucket[-1]]
            found.append(replace(last, nbytes=sum(parts[i].nbytes for i in bucket)))
    return Step(step.computation, sorted(found, key=lambda c: c.ready))


def bucket_sizes(step: Step, network: Network) -> Iterator[tuple[int, Prediction]]:
    """Other ``bucket_bytes``, powers of 2, that join buckets of ``step``, and what they give; each grouping once."""
    before, gradients = [c.nbytes for c in step.collectives], sum(c.nbytes for c in step.collectives if c.walk >= 0)
    size = _FEWEST_BYTES
    while size < 8 * gradients:
        other = regrouped(step, size)
        after = [c.nbytes for c in other.collectives]
        if after != before:
            yield size, predict(other, network)
        before, size = after, 2 * size


def doublings(ranks: int) -> Sequence[int]:
    """1, 2, 4, ... and ``ranks``."""
    return sorted({1 << k for k in range(ranks.bit_length())} | {ranks})
