"""Blocks: a long sequence of steps, divided where few bytes cross from earlier steps to later ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def crossing_bytes(values: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """Return, for each of ``count`` steps, the bytes there after it that a later step reads.

    ``values``: the step that computes each, the last step that reads it (or the same), and its bytes.
    """
    change = [0] * count
    for first, last, nbytes in values:
        change[first] += nbytes
        change[last] -= nbytes
    return list(accumulate(change))


def blocks(crossing: Sequence[int], saved: Sequence[int], costs: Sequence[float], count: int) -> list[range]:
    """Divide steps into at most ``count`` blocks, each of which ends where the fewest bytes cross.

    For each step, ``crossing``: see :func:`crossing_bytes`; ``saved``: bytes that the backward pass reads of what it
    computes; ``costs``: of running it.  There is one cut in each of ``count`` parts,
    which are equal in the sum of their shares of the cost and of the saved bytes.
    """
    all_saved, all_costs, end = max(1, sum(saved)), max(1.0, sum(costs)), len(costs) - 1
    share = list(accumulate(n / all_saved + c / all_costs for n, c in zip(saved, costs, strict=True)))
    bounds = [0, *(bisect_left(share, share[-1] * k / count, hi=end) for k in range(1, count)), end]
    cuts = [min(range(a, b), key=crossing.__getitem__) + 1 for a, b in pairwise(bounds) if a < b]
    return [range(a, b) for a, b in pairwise([0, *cuts, end + 1])]
