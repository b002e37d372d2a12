"""What collectives take on a network, by the algorithms that ``tapegrad.distributed`` really uses.

Formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19, 2005.  With N ranks, a seconds a message and b a
byte:

- a sum in the order of ranks is a pairwise exchange and an all-gather: 2 (N-1) a + 2 (N-1)/N B b, what a ring takes;
- ``exact=False`` is taken for a ring, too; all-gather and reduce-scatter are half of it;
- a broadcast goes along a binomial tree: ceil(log2 N) (a + B b);
- a root takes the ranks' messages one after the other: (N-1) (a + B b); a neighbour's is one: a + B b.

Where ranks of a node have a link of their own, the slower one counts as soon as there are more ranks than that.

Additions are not counted, nor are the few bytes by which ranks compare what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tapegrad.distributed.ordered import AT_ONCE
from tapegrad.profile.plan.ranks.network import Network


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    ``nbytes``: of each rank's part; of a variable in pieces, of the whole.  ``ready``, ``wanted``: seconds of the
    step's computation before it can begin, and before the program waits for it; equal where it waits at once.
    ``walk``: of a bucket of gradients, the walk back that started it (-1: it is none); those of one walk that agree in
    ``common`` (dtype, device) could travel together.
    """

    kind: str
    nbytes: int
    ready: float
    wanted: float
    file: str = ""
    line: int = 0
    exact: bool = True
    walk: int = -1
    common: str = ""


def seconds(c: Collective, network: Network) -> float:
    """What ``c`` takes on ``network`` from its beginning to its end."""
    return _SECONDS.get(c.kind, _told)(c, network) if network.ranks > 1 else 0.0


def _all_reduce(c: Collective, n: Network) -> float:
    if c.exact and c.nbytes <= AT_ONCE:
        return _whole_to_each(c, n)
    return 2 * _part_to_each(c, n)


def _whole_to_each(c: Collective, n: Network) -> float:
    """Every rank's part goes to all others; or all of them to a root, or from it."""
    return n.rounds(n.ranks - 1, c.nbytes)


def _part_to_each(c: Collective, n: Network) -> float:
    return n.rounds(n.ranks - 1, c.nbytes / n.ranks)


def _broadcast(c: Collective, n: Network) -> float:
    """After each round twice as many ranks have it."""
    return n.rounds((n.ranks - 1).bit_length(), c.nbytes)


def _neighbour(c: Collective, n: Network) -> float:
    """A message each way at most, however many ranks there are."""
    return n.rounds(1, c.nbytes)


def _told(c: Collective, n: Network) -> float:
    """A few bytes of each rank to all, by recursive doubling."""
    return n.rounds((n.ranks - 1).bit_length(), 0)


_SECONDS: dict[str, Callable[[Collective, Network], float]] = {
    "all_reduce": _all_reduce, "all_gather": _whole_to_each, "gather_pieces": _part_to_each,
    "reduce_scatter": _part_to_each, "all_to_all": _part_to_each, "gather": _whole_to_each, "scatter": _whole_to_each,
    "reduce": _whole_to_each, "broadcast": _broadcast, "shift": _neighbour, "recv": _neighbour,
}  # fmt: skip
"""By kind; of any other kind ranks tell each other something small."""
