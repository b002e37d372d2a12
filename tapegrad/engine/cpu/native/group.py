"""Groups: runs of entries of a table that one kernel can stand for.

Entries in order join while they are exact, share one nest of loops and all report errors or none, and as long as no
result overlaps what another entry reads or writes but in the very same elements.  A result is stored only if something
behind the group needs it; all others stay in registers, so that it does not matter whose bytes the arena has lent them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from tapegrad.device.types import Array
from tapegrad.engine.cpu.native.emit import SAME, SCALAR, STRIDED, Structure
from tapegrad.engine.cpu.native.loops import Core, Loop

MOST_OPERANDS = 24
_MOST_OPS = 40


class Entry(NamedTuple):
    """One call of a ufunc on ``arrays``, the result last; or a copy, or the sum of an array.

    ``is_exact``: whether compiled code may stand for it.  ``shape`` and ``strides`` (bytes; per array) are those of the
    loops, outermost first: one where NumPy would run one.  ``spans``: of each array the address of its first byte, and
    of the one behind its last.
    """

    name: str
    is_exact: bool
    loop: Loop
    arrays: tuple[Array, ...]
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int], ...]
    silenced: bool = False
    """Whether it reports no floating-point errors."""
    core: Core = ((), ())
    """Sizes and strides that the loop reads behind its own; there are no other loops around it."""


class Lifetime(NamedTuple):
    """The step that an entry is a part of, and the last step that needs its result."""

    step: int
    until: int


class Group(NamedTuple):
    """Entries from ``first`` up to ``last``, and the kernel that stands for them.

    ``operands``: the memory of each operand of the kernel: the number of an entry, and of one of its arrays.
    """

    first: int
    last: int
    structure: Structure
    operands: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def groups(
    entries: Sequence[Entry], lifetimes: Sequence[Lifetime], first: int, last: int, then: int
) -> Iterator[Group]:
    """Yield the groups among entries ``first`` up to ``last``, behind which comes step ``then``.

    A single copy is a group, too (NumPy fills arrays by vectors), and a single choice, which NumPy has no loop for.
    """
    while first < last:
        growing = _grown(entries, lifetimes, first, last)
        while stored := growing.stored_over_a_leaf(lifetimes[growing.last].step if growing.last < last else then):
            growing = _grown(entries, lifetimes, first, stored)
        if growing.last - first > 1 or (growing.last > first and entries[first].name in ("copyto", "where")):
            yield growing.group(lifetimes[growing.last].step if growing.last < last else then)
        first = max(growing.last, first + 1)


def _grown(entries: Sequence[Entry], lifetimes: Sequence[Lifetime], first: int, last: int) -> _Growing:
    """The group that begins with entry ``first`` and ends before ``last``, or earlier."""
    growing = _Growing(entries, lifetimes, first)
    while growing.last < last and growing.joins():
        growing.last += 1
    return growing


class _Operand(NamedTuple):
    """The layout of an array: its first address, its strides along the loops, its dtype's character."""

    address: int
    strides: tuple[int, ...]
    char: str

    @property
    def kind(self) -> str:
        """The layout along the inner loop."""
        size = {"f": 4, "d": 8, "?": 1}[self.char]
        return SAME if self.strides[-1] == size else STRIDED if self.strides[-1] else SCALAR


class _Value(NamedTuple):
    """The result of op ``number``, which is in memory from entry ``entry`` on."""

    number: int
    entry: int


class _Growing:
    """Entries that are a group so far, ``last`` excluded."""

    def __init__(self, entries: Sequence[Entry], lifetimes: Sequence[Lifetime], first: int) -> None:
        self.first = self.last = first
        self._entries, self._lifetimes = entries, lifetimes
        self._leaves: dict[_Operand, tuple[int, int]] = {}
        self._ops: dict[tuple[str, str, tuple[int, ...], str], int] = {}
        """The number of each op: its name, its operands' dtype, their numbers (of a leaf; ~ of an op), its dtype."""
        self._values: dict[_Operand, _Value] = {}
        """Results by their layouts, but for those that later ones have overwritten."""
        self._written: list[tuple[int, int]] = []
        self._shape: tuple[int, ...] = ()
        self._over_leaves: list[int] = []
        """Entries whose results overlap what the kernel reads: it must not store them."""

    def joins(self) -> bool:
        """Add the next entry, if it can join."""
        entry = self._entries[self.last]
        if not entry.is_exact or entry.silenced != self._entries[self.first].silenced or len(self._ops) >= _MOST_OPS:
            return False
        if not self._shares_loops(entry):
            return False
        operands = [
            _Operand(
                span[0], (x.itemsize,) if x.size == 1 == prod(entry.shape) else self._nested(strides), x.dtype.char
            )
            for span, strides, x in zip(entry.spans, entry.strides, entry.arrays, strict=True)
        ]
        reads, result = operands[:-1], operands[-1]
        fresh = {r: k for k, r in enumerate(reads) if r not in self._values and r not in self._leaves}
        if len(self._leaves) + len(fresh) + len(self._values) >= MOST_OPERANDS:
            return False
        loaded = [span for r, span in zip(reads, entry.spans, strict=False) if r not in self._values]
        if any(meet(span, written) for span in loaded for written in self._written):
            return False
        span = entry.spans[-1]
        leaves = {r: self._entries[i].spans[k] for r, (i, k) in self._leaves.items()}
        leaves.update((r, entry.spans[k]) for r, k in fresh.items())
        if any(r != result and meet(span, s) for r, s in leaves.items()):
            self._over_leaves.append(self.last)
        gone = [
            v for v, value in self._values.items() if v != result and meet(span, self._entries[value.entry].spans[-1])
        ]
        step = self._lifetimes[self.last].step
        if any(self._lifetimes[self._values[v].entry].until >= step for v in gone):
            return False  # a part of it is needed yet
        for v in gone:
            del self._values[v]
        for r, k in fresh.items():
            self._leaves[r] = self.last, k
        numbers = list(self._leaves)
        refs = tuple(~self._values[r].number if r in self._values else numbers.index(r) for r in reads)
        op = entry.name, reads[-1].char, refs, result.char
        self._values[result] = _Value(self._ops.setdefault(op, len(self._ops)), self.last)
        self._written.append(span)
        return True

    def stored_over_a_leaf(self, then: int) -> int:
        """The first entry whose result overlaps a leaf and is needed by step ``then`` or later; 0: there is none."""
        return next((i for i in self._over_leaves if self._lifetimes[i].until >= then), 0)

    def group(self, then: int) -> Group:
        """The group, behind which comes step ``then``."""
        count = len(self._leaves)
        number = lambda ref: ref if ref >= 0 else count + ~ref
        stored = [(operand, v) for operand, v in self._values.items() if self._lifetimes[v.entry].until >= then]
        structure = Structure(
            tuple((leaf.char, leaf.kind) for leaf in self._leaves),
            tuple((name, char, tuple(map(number, refs)), to) for name, char, refs, to in self._ops),
            tuple((count + v.number, operand.kind) for operand, v in stored),
        )
        operands = (*self._leaves.values(), *((v.entry, len(self._entries[v.entry].arrays) - 1) for _, v in stored))
        strides = tuple(operand.strides for operand in (*self._leaves, *(operand for operand, _ in stored)))
        return Group(self.first, self.last, structure, operands, self._shape, strides)

    def _shares_loops(self, entry: Entry) -> bool:
        """Whether the entry runs the loops of the group; these may become a nest of as many turns for it."""
        if not self._ops:
            self._shape = entry.shape
        if entry.shape == self._shape:
            return True
        if prod(entry.shape) != prod(self._shape):
            return False
        if len(entry.shape) == 1:
            return all(s[0] in (0, x.itemsize) for s, x in zip(entry.strides, entry.arrays, strict=True))
        if len(self._shape) > 1 or any(v.kind == STRIDED for v in (*self._leaves, *self._values)):
            return False
        self._shape = entry.shape
        nested = lambda v: v._replace(strides=self._nested(v.strides))
        self._leaves = {nested(v): place for v, place in self._leaves.items()}
        self._values = {nested(v): value for v, value in self._values.items()}
        return True

    def _nested(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of an array without gaps, or of one element for all, along the loops of the group."""
        if len(strides) == len(self._shape):
            return strides
        return tuple(strides[0] * prod(self._shape[a + 1 :]) for a in range(len(self._shape)))


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two spans of addresses share bytes."""
    return a[0] < b[1] and b[0] < a[1]
