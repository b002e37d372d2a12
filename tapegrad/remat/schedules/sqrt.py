"""Square-root checkpointing: cut a chain into segments, keep their first states, rerun one segment at a time.

Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016): section 4.1 for
even segments, algorithm 3 for steps of unequal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import Action, Advance, Drop, Restore, Reverse, Store, Tape


def even_starts(n: int, segments: int | None = None) -> list[int]:
    """Where each segment begins: sizes differ by at most one, the longer ones last (the last is not run again).

    ``segments``: the square root of ``n``, rounded, unless given.  Raises RecomputeError for ``segments < 1``.
    """
    k = isqrt(4 * n + 1) + 1 >> 1 if segments is None else segments
    if k < 1:
        raise RecomputeError(f"a chain is cut into at least one segment, not {k}")
    k = min(k, max(n, 1))
    return [i * (n // k) + max(0, i - (k - n % k)) for i in range(k)]


def starts_by_bytes(inside: Sequence[int], boundary: Sequence[int]) -> list[int]:
    """Where each segment begins, for the least peak of boundaries kept plus the largest segment.

    ``inside``: bytes of each step's tape; ``boundary``: bytes of the state that goes into each step.  Steps are taken
    into a segment until its bytes exceed a threshold, and the best of all thresholds that matter is taken.
    """
    best: tuple[int, list[int]] | None = None
    total = sum(inside)
    threshold = max(inside, default=0)
    while best is None or threshold <= total:
        starts, bytes_, following = _cut(inside, threshold)
        peak = sum(boundary[i] for i in starts) + max(bytes_, default=0)
        if best is None or peak < best[0]:
            best = peak, starts
        threshold = following
    return best[1]


def _cut(inside: Sequence[int], threshold: int) -> tuple[list[int], list[int], int]:
    """Starts and bytes of the segments, and the least threshold that would cut otherwise."""
    starts: list[int] = []
    bytes_: list[int] = []
    least = sum(inside) + 1
    for i, more in enumerate(inside):
        if not starts or bytes_[-1] + more > threshold:
            if starts:
                least = min(least, bytes_[-1] + more)
            starts.append(i)
            bytes_.append(0)
        bytes_[-1] += more
    return starts, bytes_, least


def by_segments(n: int, starts: Sequence[int]) -> Iterator[Action]:
    """The schedule that keeps the states at ``starts`` (ascending from 0): all but the last segment run twice."""
    ends = [*starts[1:], n]
    if not n:
        return
    yield Store(0)
    for start, end in zip(starts, ends[:-1], strict=False):
        yield from (Advance(start, end), Store(end))
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        if end < n:
            yield Restore(start)
        yield Drop(start)
        yield from map(Tape, range(start, end))
        yield from map(Reverse, range(end - 1, start - 1, -1))


def sqrt(n: int, segments: int | None = None) -> Iterator[Action]:
    """Even segments: at most ``segments`` states and ``ceil(n / segments)`` tapes at once."""
    return by_segments(n, even_starts(n, segments))
