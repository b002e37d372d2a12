"""Attention on the CPU: which keys a query sees, and how scores are cut in blocks that lie in a core's cache.

A block holds whole rows, so that no running maximum is needed.  The cut depends on shapes alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from tapegrad.core.aval import Shape
from tapegrad.device.types import Array

_BLOCK = 65536
"""Scores of a block: 256 KiB of float32."""
_LEAST_ROWS = 64
"""Queries of a block at least, however long the rows are: products of fewer are slower by a third."""
_MOST_CUTS = 256


class Weighting(NamedTuple):
    """Which keys a query sees, and how.

    ``scale`` is multiplied with the scores.  ``causal``: query i sees keys 0 to i.  ``masked``: ``"none"``, ``"see"``
    (true where a query may look) or ``"add"`` (numbers to add to the scores).  ``blind``: what a query gets that may
    look nowhere: ``"zero"``, or the ``"mean"`` of all values.  ``p``: the share of weights that become 0.  ``tf32``:
    whether products round float32 operands to 10 bits of fraction.
    """

    scale: float
    causal: bool
    masked: str
    blind: str
    p: float
    tf32: bool = False

    @property
    def threshold(self) -> int:
        """A weight is kept if its 16 random bits are below this."""
        return round((1.0 - self.p) * 65536)

    @property
    def inflation(self) -> float:
        """By what the weights that are kept are multiplied."""
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0


class Cut(NamedTuple):
    """How blocks are cut: the examples and groups of a family, the heads of a group and queries of a block, at most.

    A family are examples and groups whose keys nobody else reads: what one task of a derivative deals with.
    """

    n: int
    g: int
    r: int
    t: int
    causal: bool

    @classmethod
    @lru_cache(_MOST_CUTS)
    def of(cls, shape: Shape, how: Weighting) -> Cut:
        """Of (examples, groups, heads of a group, queries, keys)."""
        n, g, r, t, s = shape
        causal = how.causal and not (how.masked != "none" and how.blind == "mean")
        rows = t
        if t * s > _BLOCK or causal:
            rows = min(t, max(_LEAST_ROWS, min(_BLOCK // max(1, s), t // 4 if causal else t)))
        scores = max(1, r * t * s)
        if g * scores <= _BLOCK:
            scores = max(1, g * r * rows * s)  # of one example
            n = min(n, _BLOCK // scores)
        else:
            n, g = min(n, 1), min(g, max(1, _BLOCK // scores))
        return cls(max(1, n), max(1, g), max(1, min(r, _BLOCK // max(1, t * s))), max(1, rows), causal)

    def families(self, shape: Shape) -> list[tuple[slice, slice]]:
        """Examples and groups of each."""
        return _families(self, shape)

    def parts(self, shape: Shape, family: tuple[slice, slice]) -> list[Part]:
        """The blocks of a family; none sees more keys than the last one."""
        a, b = family
        return _parts(self, shape, a.start, a.stop, b.start, b.stop)


class Part(NamedTuple):
    """A block: examples, groups of heads that share keys, heads of a group, queries; and how many keys they see."""

    n: slice
    g: slice
    r: slice
    t: slice
    seen: int


def lengths(part: Part) -> tuple[int, int, int, int]:
    a, b, c, d, _ = part
    return a.stop - a.start, b.stop - b.start, c.stop - c.start, d.stop - d.start


def of_part(mask: Array, part: Part) -> Array:
    """The part of a mask (n, g, r, t, s), whose axes of length 1 are for all."""
    index: list[Any] = [slice(None) if n == 1 else s for n, s in zip(mask.shape[:4], part)]
    return mask[(*index, slice(None) if mask.shape[-1] == 1 else slice(part.seen))]


# The same for all calls of one shape, in lists that are not to be changed.


@lru_cache(_MOST_CUTS)
def _families(cut: Cut, shape: Shape) -> list[tuple[slice, slice]]:
    return [(a, b) for a in _steps(shape[0], cut.n) for b in _steps(shape[1], cut.g)]


@lru_cache(_MOST_CUTS)
def _parts(cut: Cut, shape: Shape, n: int, n_stop: int, g: int, g_stop: int) -> list[Part]:
    _, _, r, t, s = shape
    pairs = [(c, d) for c in _steps(r, cut.r) for d in _steps(t, cut.t)]
    family = slice(n, n_stop), slice(g, g_stop)
    return [Part(*family, c, d, min(s, d.stop) if cut.causal else s) for c, d in pairs]


def _steps(length: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]
