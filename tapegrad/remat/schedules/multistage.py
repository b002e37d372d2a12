"""Two tiers: some stored states lie in memory, some on disk.

``multistage`` takes the schedule of ``revolve`` for all of them, so the number of steps is the least possible, leaves
out states that are not read, and puts on disk the places that are written and read least often (Stumm and Walther,
"MultiStage approaches for optimal offline checkpointing", SIAM J. Sci. Comput. 31 (2009)).  ``hierarchical`` weighs
writing and reading against steps (Herrmann and Pallez, "H-Revolve: a framework for adjoint computation on synchronous
hierarchical platforms", ACM TOMS 46 (2020)): states on disk cut the chain into stretches, each of which is reversed
with all of the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from operator import add

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import DISK, RAM, Action, Advance, Drop, Restore, Store, Tape
from tapegrad.remat.schedules.revolve import beta, extra_steps, repetitions, reverse_segment, revolve


def multistage(n: int, ram: int, disk: int) -> Iterator[Action]:
    """The optimal schedule for ``n`` steps and ``ram + disk`` stored states, ``ram`` of them in memory at most.

    Raises RecomputeError if both are 0, or a number is negative.
    """
    if n < 0 or ram < 0 or disk < 0:
        raise RecomputeError(f"multistage: n={n}, ram={ram} and disk={disk} must not be negative")
    uses: list[int] = []  # of each level of the stack of stored states: how often it is written and read
    for _, level in _places(n, ram + disk):
        uses += [0] * (level + 1 - len(uses))
        uses[level] += 1
    often = sorted(range(len(uses)), key=lambda level: (-uses[level], -level))[:ram]
    for action, level in _places(n, ram + disk, every=True):
        yield Store(action.step, RAM if level in often else DISK) if isinstance(action, Store) else action


def fewest_stores_split(l: int, c: int) -> int:  # noqa: E741
    """Return the optimal split after which the fewest states are stored and read.

    A state from which a step is taped at once is not read.  See ``longest_split`` for the bounds.
    """
    c = min(c, l - 1)
    if c < 2:
        return l - 1
    r = repetitions(l, c)
    rest = beta(c - 1, r - 1)
    few = min(l - rest, beta(c, r - 2) + beta(c - 1, r - 2))
    return max(few, min(l - rest - beta(c - 2, r - 1), beta(c, r - 1)))


def _restored(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions, without those that store a state which is taped at once and never restored."""
    store: Store | None = None
    unread: set[int] = set()
    for action in actions:
        if store is not None:
            if isinstance(action, Tape):
                unread.add(store.step)
            else:
                yield store
            store = None
        if isinstance(action, Store):
            store = action
        elif isinstance(action, Drop) and action.step in unread:
            unread.remove(action.step)
        else:
            yield action


def _places(n: int, c: int, every: bool = False) -> Iterator[tuple[Action, int]]:
    """The actions of revolve that write or read a level in the stack of stored states, with it (or all actions)."""
    level: dict[int, int] = {}  # of each step whose state is stored, in order
    for action in _restored(revolve(n, c, fewest_stores_split)):
        if isinstance(action, Store):
            level[action.step] = len(level)
            yield action, level[action.step]
        elif isinstance(action, Restore):
            yield action, level[action.step]
        else:
            if isinstance(action, Drop):
                del level[action.step]
            if every:
                yield action, -1


def hierarchical(n: int, ram: int, disk: int, write: float = 2.0, read: float = 2.0) -> Iterator[Action]:
    """The cheapest schedule where writing and reading a state on disk cost as much as so many steps.

    Raises RecomputeError for ``ram < 1``.
    """
    extra_steps(n, ram)
    if not n:
        return
    plain, stored = _tables(n, ram, disk, write, read)
    a, k, on_disk = 0, disk, False
    pending: list[tuple[int, int, int]] = []
    end = n
    while True:
        length = end - a
        if on_disk and stored[k][length] == plain[0][length] or not on_disk and plain[k][length] == plain[0][length]:
            yield from (Store(a), *reverse_segment(a, end, ram), Drop(a)) if not on_disk else _over(a, end, ram)
            if not pending:
                return
            end = a
            a, k, _ = pending.pop()
            on_disk = True
            yield Restore(a)
            continue
        if not on_disk:
            yield Store(a, DISK)
        pending.append((a, k, end))
        step = _first_part(plain, stored, k, length, read)
        yield Advance(a, a + step)
        a, k, on_disk = a + step, k - 1, False


def _over(a: int, end: int, ram: int) -> Iterator[Action]:
    """State ``a`` has come from disk for the last time: from here on it lies in memory."""
    yield from (Drop(a), Store(a), *reverse_segment(a, end, ram), Drop(a))


def _first_part(plain: list[list[float]], stored: list[list[float]], k: int, length: int, read: float) -> int:
    costs = [i + read + plain[k - 1][length - i] + stored[k][i] for i in range(1, length)]
    return 1 + costs.index(min(costs))


@functools.lru_cache(maxsize=8)
def _tables(n: int, ram: int, disk: int, write: float, read: float) -> tuple[list[list[float]], list[list[float]]]:
    """By free places on disk and length: the least cost with the first state at hand, and with it stored there."""
    memory: list[float] = [extra_steps(length, ram) for length in range(n + 1)]
    plain, stored = [memory], [memory]
    for _ in range(disk):
        below = plain[-1][::-1]
        here, there, shifted = memory[:2], memory[:2], [0.0, 1 + read + memory[1]]
        for length in range(2, n + 1):
            best = min(map(add, shifted[1:length], below[n - length + 1 : n]))
            there.append(min(memory[length], best))
            here.append(min(memory[length], write + there[length]))
            shifted.append(length + read + there[length])
        plain.append(here)
        stored.append(there)
    return plain, stored
