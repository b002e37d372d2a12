"""Memory as kernels see it: every access is checked for bounds and alignment, shared memory for races and rubbish too.

Addresses of global memory are the host's own; the bytes are a copy.  Shared, local and parameter memory begin at 0, and
as generic addresses at windows that no host address reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOWS = {"shared": 1 << 60, "local": 2 << 60, "param": 3 << 60}
U8, I64 = np.uint8, np.int64
_VIEWS = {1: U8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_UNIT = 256


class Fault(Exception):
    """A forbidden access: what, and by which of the threads that took part."""

    def __init__(self, what: str, thread: int) -> None:
        super().__init__(what)
        self.what, self.thread = what, thread


class _Bytes:
    """A run of bytes, seen as numbers of each size."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(-(-size // 16) * 2, np.uint64).view(U8)
        self.views = {n: self.bytes.view(kind) for n, kind in _VIEWS.items()}


def _check(bad: np.ndarray, threads: np.ndarray, addresses: np.ndarray, what: str) -> None:
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise Fault(f"{what} at {int(addresses[i]):#x}", int(threads[i]))


class Space:
    """What loads and stores need; ``places`` finds an address's byte."""

    name = "global"
    store: _Bytes

    def places(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> np.ndarray:
        raise NotImplementedError

    def load(self, addresses: np.ndarray, threads: np.ndarray, size: int, count: int = 1) -> list[np.ndarray]:
        """``count`` neighbours of ``size`` bytes each, for each of the threads."""
        place = self.find(addresses, threads, size * count)
        self.note_read(place, threads, size * count)
        first, view = place >> (size.bit_length() - 1), self.store.views[size]
        return [view[first + i] for i in range(count)]

    def save(self, addresses: np.ndarray, threads: np.ndarray, values: Sequence[np.ndarray], size: int) -> None:
        """The other way round."""
        place = self.find(addresses, threads, size * len(values))
        self.note_write(place, threads, size * len(values))
        first, view = place >> (size.bit_length() - 1), self.store.views[size]
        for i, value in enumerate(values):
            view[first + i] = value

    def find(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> np.ndarray:
        if size > 1:
            odd = (addresses & addresses.dtype.type(size - 1)) != 0
            _check(odd, threads, addresses, f"{size} bytes of {self.name} memory are not aligned")
        return self.places(addresses, threads, size)

    def note_read(self, place: np.ndarray, threads: np.ndarray, size: int) -> None:
        pass

    def note_write(self, place: np.ndarray, threads: np.ndarray, size: int) -> None:
        pass


class Global(Space):
    """Copies of pieces of the host's memory at their addresses, and variables of the text at addresses of their own."""

    def __init__(self, pieces: Sequence[tuple[int, int]], variables: int = 0) -> None:
        merged = _merged(pieces)
        self._starts = np.array([start for start, _ in merged], np.uint64)
        self._sizes = np.array([size for _, size in merged], np.uint64)
        offsets, at = [], 0
        for start, size in merged:
            at = -(-at // _UNIT) * _UNIT + start % _UNIT
            offsets.append(at)
            at += size
        self._offsets = np.array(offsets, I64)
        self.pieces = list(zip(merged, offsets))
        self.store = _Bytes(at)

    def part(self, start: int, size: int) -> np.ndarray:
        """The copy of these bytes."""
        found = int(np.searchsorted(self._starts, np.uint64(start), "right")) - 1
        at = int(self._offsets[found]) + start - int(self._starts[found])
        return self.store.bytes[at : at + size]

    def places(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> np.ndarray:
        addresses = addresses.astype(np.uint64, copy=False)
        if not len(self._starts):
            _check(np.ones(len(addresses), bool), threads, addresses, f"{size} bytes outside of all arrays")
        found = np.searchsorted(self._starts, addresses, "right") - 1
        inside = addresses - self._starts[found]
        bad = (found < 0) | (inside + np.uint64(size) > self._sizes[found]) | (inside > self._sizes[found])
        _check(bad, threads, addresses, f"{size} bytes outside of all arrays")
        return inside.astype(I64) + self._offsets[found]


def _merged(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without overlaps: pieces that share bytes are one, neighbours stay apart."""
    out: list[tuple[int, int]] = []
    for start, size in sorted({piece for piece in pieces if piece[1]}):
        if out and start < sum(out[-1]):
            out[-1] = (out[-1][0], max(sum(out[-1]), start + size) - out[-1][0])
        else:
            out.append((start, size))
    return out


class Own(Space):
    """Memory that begins at 0 for each owner: local memory of a thread, parameters of a kernel."""

    def __init__(self, name: str, owners: np.ndarray, count: int, size: int) -> None:
        self.name, self.owners, self.size = name, owners.astype(I64), size
        self.stride = -(-max(size, 1) // 16) * 16
        self.store = _Bytes(self.stride * count)

    def places(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> np.ndarray:
        addresses = addresses.astype(I64)
        bad = (addresses < 0) | (addresses + size > self.size)
        _check(bad, threads, addresses, f"{size} bytes outside of the {self.size} of {self.name} memory")
        return addresses + self.owners[threads] * self.stride


class Shared(Own):
    """Shared memory of each block: nothing may be read that was not written, nor without a barrier in between.

    Two accesses of a byte by different threads of which one writes need a barrier of the block between them, or one of
    their warp.  ``passed`` counts each thread's barriers of the block, ``synced`` those of its warp.
    """

    def __init__(self, owners: np.ndarray, count: int, size: int, warps: np.ndarray) -> None:
        super().__init__("shared", owners, count, size)
        total = self.stride * count
        self.warps = warps
        self.passed, self.synced = np.zeros(len(owners), np.int32), np.zeros(len(owners), np.int32)
        self.written = np.zeros(total, bool)
        # Of the last write and of the last reads, by byte: the thread, its counts; -2: several threads (warps).
        self.writer, self.writer_passed, self.writer_synced = (np.full(total, -1, np.int32) for _ in range(3))
        self.reader, self.reader_passed, self.reader_synced = (np.full(total, -1, np.int32) for _ in range(3))
        self.reader_warp = np.full(total, -1, np.int32)

    def _each(self, place: np.ndarray, threads: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        return (place[:, None] + np.arange(size)).reshape(-1), np.repeat(threads, size)

    def _apart(self, at: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Where the last write came from another thread with no barrier since."""
        writer = self.writer[at]
        same_warp = self.warps[np.maximum(writer, 0)] == self.warps[threads]
        ordered = same_warp & (self.writer_synced[at] < self.synced[threads])
        ordered |= self.writer_passed[at] < self.passed[threads]
        return (writer >= 0) & (writer != threads) & ~ordered

    def note_read(self, place: np.ndarray, threads: np.ndarray, size: int) -> None:
        at, who = self._each(place, threads, size)
        _check(~self.written[at], who, at % self.stride, "shared memory is read that nobody has written")
        _check(self._apart(at, who), who, at % self.stride, "shared memory is read without a barrier after its write")
        passed, synced, warp = self.passed[who], self.synced[who], self.warps[who]
        fresh = (self.reader[at] == -1) | (self.reader_passed[at] < passed)
        others = ~fresh & (self.reader[at] != who)
        mixed = ~fresh & (self.reader_warp[at] != warp)
        self.reader[at[fresh]] = who[fresh]
        self.reader_warp[at[fresh]] = warp[fresh]
        self.reader[at[others]] = -2
        self.reader_warp[at[mixed]] = -2
        # Several may have been fresh in this very instruction: all but the one that was kept are others.
        lost = fresh & (self.reader[at] != who)
        self.reader_warp[at[lost & (self.reader_warp[at] != warp)]] = -2
        self.reader[at[lost]] = -2
        self.reader_passed[at], self.reader_synced[at] = passed, synced

    def note_write(self, place: np.ndarray, threads: np.ndarray, size: int) -> None:
        at, who = self._each(place, threads, size)
        _check(self._apart(at, who), who, at % self.stride, "shared memory is written twice without a barrier")
        warp_ordered = (self.reader_warp[at] == self.warps[who]) & (self.reader_synced[at] < self.synced[who])
        ordered = warp_ordered | (self.reader_passed[at] < self.passed[who])
        bad = (self.reader[at] != -1) & (self.reader[at] != who) & ~ordered
        _check(bad, who, at % self.stride, "shared memory is written without a barrier after it was read")
        self.writer[at] = who
        twice = self.writer[at] != who
        _check(twice, who, at % self.stride, "shared memory is written by two threads at once")
        self.writer_passed[at], self.writer_synced[at] = self.passed[who], self.synced[who]
        self.written[at] = True
