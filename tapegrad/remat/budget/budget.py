"""memory_budget: the live bytes of the ledger never exceed a number, and no gradient changes by a bit.

Before bytes are taken, memory is freed by evicting values (``eviction`` says which): their buffers are emptied.  A read
of an evicted value, by a rule or by the user, recomputes it from its recipe (``recipes``): what is missing is
collected, and each node run once, in the order of the tape, while other values may be evicted in turn.  Values that
tapes save go first, then those that only the user holds.  Where none is left, BudgetError says who holds the bytes.

The limit is the process's, as the ledger is: other threads' tapes are kept within it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from threading import get_ident
from typing import TypeVar

from tapegrad import nest
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.remat.budget.manager import MANAGER
from tapegrad.remat.policies import Policy, checked
from tapegrad.sizes import parse_bytes
from tapegrad.tensor import Tensor
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import Measure

T = TypeVar("T")

__all__ = ["MANAGER", "keep", "memory_budget", "policy", "watched", "yielding"]


def keep(tensors: T) -> T:
    """Keep the values of ``tensors`` in memory: a budget evicts none of them from now on.

    ``tensors``: a tensor, or a structure of them, which is returned.  One that has been evicted is recomputed first;
    a lazy one is evaluated.  Outside of a budget nothing is evicted, and nothing is done.  Raises BudgetError.
    """
    for leaf in nest.flatten(tensors):
        if isinstance(leaf, Tensor):
            MANAGER.keep(leaf._buffer)
    return tensors


class memory_budget:
    """``with tg.memory_budget("2GiB") as m:`` keeps the live bytes of the block within a limit; ``m``: a Measure.

    ``limit``: bytes, or a size such as ``"512MiB"``.  Values recorded inside the block are evicted when memory is
    needed, and recomputed, bit for bit, when a derivative rule or the program reads them, in the block or after it: a
    list of hidden states may hold empty ones (:func:`keep` keeps values from that).  (Gradients through ``reversible``
    blocks are equal to rounding, with or without a budget.)  Blocks may be nested (the smallest limit counts) and hold
    for all threads.  Everything that is alive counts: parameters, data, exported memory.

    ``policy`` (``tg.memory.policies``; the innermost one is in force) is asked about each value that tapes want when it
    is recorded: what it saves is never evicted; what it offloads moves to another memory when bytes are needed, and is
    fetched, before the backward pass needs it where memory allows.

    Raises BudgetError (a MemoryError) where what is needed at once exceeds the limit, PolicyError for no policy.
    """

    def __init__(self, limit: int | str, policy: Policy | None = None) -> None:
        self._begin(parse_bytes(limit), None if policy is None else checked("memory_budget", policy))

    def _begin(self, limit: float, policy: Policy | None, yields: bool = False) -> None:
        self._limit = limit
        self._policy = policy
        self._yields = yields
        self._blocks: list[tuple[int, Measure]] = []  # with their threads: those it is used for now

    def __enter__(self) -> Measure:
        measure = Measure(detailed=False)
        with ExitStack() as undo:  # a block that is not entered is not left
            undo.callback(self._close, measure)
            self._blocks.append((get_ident(), measure))
            LEDGER.open(measure)
            MANAGER.enter(self._bytes(), self._policy, measure, self._yields)
            undo.pop_all()
        measure.peak_bytes = LEDGER.live_bytes  # what was evicted on entering was live before the block
        return measure

    def _bytes(self) -> float:
        return self._limit

    def __exit__(self, *exc: object) -> None:
        me = get_ident()
        mine = [m for t, m in self._blocks if t == me]  # none: it was entered in another thread
        self._close(mine[-1] if mine else self._blocks[-1][1])

    def __del__(self) -> None:
        while getattr(self, "_blocks", None):  # an interrupt came before, or in, `__exit__`
            try:
                self._close(self._blocks[-1][1])
            except KeyboardInterrupt:  # and another one here, where nobody can be told
                continue

    def _close(self, measure: Measure) -> None:
        """May be done again after an interrupt."""
        MANAGER.leave(measure)
        LEDGER.close(measure)
        self._blocks = [(t, m) for t, m in self._blocks if m is not measure]


class yielding(memory_budget):
    """Room for ``more`` bytes than are alive when it is entered; where these are not enough, for what is needed.

    ``read``: bytes of what is alive then that count, too; what is read beyond these leaves less room.
    """

    def __init__(self, more: int, read: int = 0) -> None:
        self._begin(more - read, None, yields=True)
        self._unread = read
        self._measure = Measure()
        self._before = 0

    def __enter__(self) -> Measure:
        self._measure = super().__enter__()
        return self._measure

    def _bytes(self) -> float:
        self._before = LEDGER.live_bytes
        return self._before + self._limit

    def has_read(self, nbytes: int) -> None:
        """So many bytes of what was alive before are read."""
        beyond = max(0, nbytes - self._unread)
        self._unread -= nbytes - beyond
        if beyond:
            MANAGER.reduce_limit(self._measure, beyond)

    @property
    def taken(self) -> int:
        """The most bytes alive at once beyond those that were when it was entered."""
        return self._measure.peak_bytes - self._before


class policy(memory_budget):
    """``with tg.memory.policy(p) as m:`` a policy is in force without a limit; ``m``: a Measure.

    What ``p`` offloads is moved to another memory as soon as only tapes want it (seen when the next value is made), and
    brought back for the backward walk, which may run in the block or after it; in the block, the value after the next
    ones is on its way while these are used.  So the activations of a plain tape leave the device, as under torch's
    ``save_on_cpu``, but while kernels run.  Nothing is evicted and recomputed.

    Raises PolicyError if ``p`` is no policy.
    """

    def __init__(self, p: Policy) -> None:
        self._begin(inf, checked("policy", p))


class watched(memory_budget):
    """``with watched(f):`` ``f`` is told of every node before it is applied, and may have values evicted.

    What tapes save in the block can be recomputed, as within a budget.  There is one such block at a time.
    """

    def __init__(self, f: Callable[[Node, tuple[Buffer, ...]], None]) -> None:
        self._begin(inf, None)
        self._watch = f

    def __enter__(self) -> Measure:
        measure = super().__enter__()
        MANAGER.watch(self._watch)
        return measure

    def _close(self, measure: Measure) -> None:
        MANAGER.watch(None)
        super()._close(measure)
