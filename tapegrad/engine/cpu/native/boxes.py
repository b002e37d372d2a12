"""Boxes: padded arrays, and what is computed of them, cut where the padding ends.

A pad is a fill of a whole array and a copy into a window of it; a sum of pads adds to windows.  Entries that go over
the same positions, or over windows of them, are done box by box, where no edge of a window crosses a box.  Then kernels
can stand for the entries of a box, and nothing padded need be stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from tapegrad.device import cuda_types
from tapegrad.device.types import Array
from tapegrad.engine.cpu.native.entries import entry_on
from tapegrad.engine.cpu.native.group import Entry, meet

_LEAST = 1 << 14
"""Elements of an array that is worth cutting: each box takes a call for each kernel."""
_LEAST_ROW = 64
"""Elements of its rows: each row of a border takes a call, and to fill a short one whole costs less."""
_MOST = 40
"""Entries of one run: as many as a kernel takes."""
_MOST_PARTS = 1152
"""Entries of one run in all its boxes: the gradient of a stencil of 7 points in 3 dimensions has 9 in 125."""

Point = tuple[int, ...]


class Part(NamedTuple):
    """Entry ``number`` in a box: of its arrays, which have ``shape``, the elements from ``low`` up to ``high``."""

    number: int
    shape: tuple[int, ...]
    low: Point
    high: Point

    def of(self, entry: Entry) -> Entry | None:
        """Return the part of ``entry`` as an entry; None if it cannot be one."""
        box = tuple(map(slice, self.low, self.high))
        arrays = tuple([x.reshape(self.shape)[box] if x.ndim else x for x in entry.arrays])
        return entry_on(arrays, entry.name, entry.is_exact, entry.loop, entry.silenced)


class Run(NamedTuple):
    """Entries from ``first`` up to ``last``, and their parts in each box."""

    first: int
    last: int
    boxes: list[list[Part]]


def runs(entries: Sequence[Entry], first: int, last: int) -> Iterator[Run]:
    """Yield the runs among entries ``first`` up to ``last``."""
    while first < last:
        growing = _Growing(entries, first)
        while growing.last < last and growing.joins():
            pass
        boxes = growing.boxes()
        if len(boxes) > 1:
            yield Run(first, growing.last, boxes)
        first = max(growing.last, first + 1)


class _Item(NamedTuple):
    """An entry that goes over the positions from ``low`` up to ``high``."""

    number: int
    low: Point
    high: Point

    def part(self, low: Point, high: Point) -> Part | None:
        """Return the part of the entry in the box from ``low`` up to ``high``, if it does something there."""
        if not all(a <= c and d <= b for a, b, c, d in zip(self.low, self.high, low, high, strict=True)):
            return None
        shape, first, last = (_apart(self.low, point) for point in (self.high, low, high))
        return Part(self.number, shape, first, last)


class _Used(NamedTuple):
    """An array that is read or written.

    ``origin``: the address that its element at position (0, ..., 0) has, or would have.
    """

    span: tuple[int, int]
    origin: int
    strides: tuple[int, ...]
    is_written: bool


class _Growing:
    """A run so far, which begins with a fill."""

    def __init__(self, entries: Sequence[Entry], first: int) -> None:
        self.last = first
        self._entries = entries
        self._items: list[_Item] = []
        self._shape: tuple[int, ...] = ()
        self._size = 0
        self._results: list[Array] = []
        """Those that are as large as the whole."""
        self._used: list[_Used] = []

    def joins(self) -> bool:
        """Add the next entry, if it can join."""
        item = self._follows() if self._items else self._begins()
        if item is None or len(self._items) == _MOST:
            return False
        used = list(self._uses(item))
        if any(_conflict(u, v) for u in used for v in (*self._used, *used)):
            return False
        items = [*self._items, item]
        if len(items) * prod(len(cuts) - 1 for cuts in self._cuts(items)) > _MOST_PARTS:
            return False
        self._items.append(item)
        self._used += used
        result = self._entries[item.number].arrays[-1]
        if result.size == self._size:
            self._results.append(result.reshape(self._shape))
        self.last += 1
        return True

    def boxes(self) -> list[list[Part]]:
        """Return the parts of all entries, box by box."""
        boxes: list[list[Part]] = []
        for box in product(*map(pairwise, self._cuts(self._items))):
            low, high = tuple(a for a, _ in box), tuple(b for _, b in box)
            boxes.append([part for item in self._items if (part := item.part(low, high)) is not None])
        return boxes

    def _cuts(self, items: Sequence[_Item]) -> list[list[int]]:
        edges = [zip(item.low, item.high, strict=True) for item in items]
        return [sorted({n for edge in axis for n in edge}) for axis in zip(*edges, strict=True)]

    def _begins(self) -> _Item | None:
        """A fill of a whole array."""
        entry = self._entries[self.last]
        number, whole = entry.arrays[0], entry.arrays[-1]
        if entry.name != "copyto" or number.ndim or not whole.flags.c_contiguous:
            return None
        if whole.size < _LEAST or whole.shape[-1] < _LEAST_ROW:
            return None
        self._shape, self._size = whole.shape, whole.size
        return self._everywhere()

    def _follows(self) -> _Item | None:
        """An entry that goes over all positions, or over a window that one of its arrays is."""
        entry = self._entries[self.last]
        arrays = [x for x in entry.arrays if x.ndim]
        if not entry.is_exact or not arrays or any(x.shape != arrays[-1].shape for x in arrays):
            return None
        flat = all(x.flags.c_contiguous for x in arrays) and arrays[-1].size == self._size  # as NumPy would run it
        if flat or arrays[-1].shape == self._shape:
            return self._everywhere()
        places = (_place(x, whole) for x in arrays for whole in self._results)
        low = next((place for place in places if place is not None), None)
        return None if low is None else _Item(self.last, low, _shifted(low, arrays[-1].shape))

    def _everywhere(self) -> _Item:
        return _Item(self.last, (0,) * len(self._shape), self._shape)

    def _uses(self, item: _Item) -> Iterator[_Used]:
        entry = self._entries[item.number]
        shape = _apart(item.low, item.high)
        for k, (x, span) in enumerate(zip(entry.arrays, entry.spans, strict=True)):
            strides = x.reshape(shape).strides if x.ndim else ()
            at = cuda_types.address(x) - sum(n * s for n, s in zip(item.low, strides, strict=False))
            yield _Used(span, at, strides, k == len(entry.arrays) - 1)


def _conflict(a: _Used, b: _Used) -> bool:
    """Whether one is written, and they share bytes without having the same position at each."""
    aligned = a.origin == b.origin and a.strides == b.strides
    return (a.is_written or b.is_written) and not aligned and meet(a.span, b.span)


def _apart(low: Point, high: Point) -> Point:
    return tuple(b - a for a, b in zip(low, high, strict=True))


def _shifted(low: Point, shape: Sequence[int]) -> Point:
    return tuple(a + n for a, n in zip(low, shape, strict=True))


def _place(window: Array, whole: Array) -> Point | None:
    """Return the position in ``whole`` of the first element of ``window``; None if that is no window of it."""
    if window.ndim != whole.ndim or window.strides != whole.strides or not whole.flags.c_contiguous:
        return None
    rest = cuda_types.address(window) - cuda_types.address(whole)
    if not 0 <= rest < whole.nbytes:
        return None
    low = []
    for stride in whole.strides:
        at, rest = divmod(rest, stride)
        low.append(at)
    inside = not rest and all(a + n <= m for a, n, m in zip(low, window.shape, whole.shape, strict=True))
    return tuple(low) if inside else None
