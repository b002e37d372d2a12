"""Does the stand-in's log show a race?  A happens-before checker by vector clocks.

The stand-in runs everything at once, so its values are right whatever the streams; only the order that the streams,
events and waits *promise* tells what a GPU might do.  An operation comes after what its stream was given before, after
what its stream was made to wait for, and after everything that the host had seen to be done when it was enqueued.

Found are: two accesses to the same bytes, one of them a write, with no order between them, on the device or in pinned
host memory; memory that the pool lends again to a stream while another may still use its bytes; pinned memory that is
given back, or looked at by the host, while a copy may still use it.  Threads of the host count as one: what they
enqueue is in the log in the order in which it happened.  Host memory that is not pinned is not followed: a copy from it
has read it on return, and a copy to it has been waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .standin import state

Line = tuple[int, int]  # (device, stream); streams other than the default ones belong to no device here
Clock = dict[Line, int]

HOST: Line = (-2, 0)
_DEFAULTS = (0, 2)
_NAMES = {"malloc": "lends again", "unpin": "gives back"}


class Access(NamedTuple):
    """What some operation did to some bytes."""

    low: int
    high: int
    write: bool
    line: Line
    time: int
    index: int


def host_reads(array: Any) -> None:
    """Say that the host looks at a NumPy array now."""
    state.log("host read", host=((array.ctypes.data, array.nbytes),))


def host_writes(array: Any) -> None:
    """Say that the host changes a NumPy array now."""
    state.log("host write", host=((array.ctypes.data, array.nbytes),))


def races(log: Iterable[state.Entry] | None = None) -> list[str]:
    """The races in a log (the stand-in's own unless given), each as a sentence."""
    checker = _Checker()
    for entry in list(state.events if log is None else log):
        checker.step(entry)
    return checker.found


class _Checker:
    def __init__(self) -> None:
        self.log: list[state.Entry] = []
        self.clocks: dict[Line, Clock] = {HOST: {}}
        self.marks: dict[int, Clock] = {}
        self.past: list[Access] = []
        self.pins: list[tuple[int, int]] = []
        self.found: list[str] = []

    def step(self, entry: state.Entry) -> None:
        """Take in one entry."""
        self.log.append(entry)
        host = self.clocks[HOST]
        kind = entry.kind
        if kind in ("event synchronize", "event done"):
            _join(host, self.marks.get(entry.event, {}))
        elif kind in ("stream synchronize", "stream done"):
            _join(host, self.enqueue(entry))
        elif kind == "device synchronize":
            for line, clock in list(self.clocks.items()):
                if line[0] in (-1, entry.device):
                    _join(host, clock)
        elif kind == "pin":
            self.forget(entry.host)
            self.pins += [(at, at + size) for at, size in entry.host]
        elif kind == "unpin":
            self.touch(entry, HOST, host, entry.host, write=True)
            self.forget(entry.host)
            self.pins = [(low, high) for low, high in self.pins if (low, high - low) not in entry.host]
        elif kind in ("host read", "host write"):
            host[HOST] = host.get(HOST, 0) + 1
            self.touch(entry, HOST, host, self.pinned(entry.host), kind == "host write")
        elif kind == "malloc" and entry.name == "new":
            self.forget(entry.writes)
        elif kind == "malloc":
            self.touch(entry, _line(entry), self.enqueue(entry), entry.writes, write=True, note=False)
        elif kind != "free":
            self.run(entry)

    def run(self, entry: state.Entry) -> None:
        """Something that a stream does."""
        line, clock = _line(entry), self.enqueue(entry)
        if entry.kind == "record":
            self.marks[entry.event] = dict(clock)
        elif entry.kind == "wait":
            _join(clock, self.marks.get(entry.event, {}))
        pinned = self.pinned(entry.host)
        self.touch(entry, line, clock, entry.reads + (pinned if entry.kind == "h2d" else ()), write=False)
        self.touch(entry, line, clock, entry.writes + (pinned if entry.kind == "d2h" else ()), write=True)
        if entry.name == "waits" or (entry.kind == "d2h" and not pinned):
            _join(self.clocks[HOST], clock)

    def enqueue(self, entry: state.Entry) -> Clock:
        """The clock of the entry's stream after one more step, which comes after all that the host knows."""
        line = _line(entry)
        clock = self.clocks.setdefault(line, {})
        _join(clock, self.clocks[HOST])
        legacy = (entry.device, 0)
        if line == legacy:  # the legacy default stream and the blocking ones wait for each other
            for other, theirs in self.clocks.items():
                if other[1] not in state.non_blocking and other[0] in (-1, entry.device):
                    _join(clock, theirs)
        elif line[1] not in state.non_blocking:
            _join(clock, self.clocks.get(legacy, {}))
        clock[line] = clock.get(line, 0) + 1
        return clock

    def pinned(self, ranges: tuple) -> tuple:
        """Those of some ranges of host memory that are pinned."""
        return tuple(
            (at, size) for at, size in ranges if any(low <= at and at + size <= high for low, high in self.pins)
        )

    def forget(self, ranges: tuple) -> None:
        """These bytes are new: what was at their addresses is gone, and the system saw to it that it was done."""
        for at, size in ranges:
            self.past = [one for one in self.past if one.high <= at or at + size <= one.low]

    def touch(
        self, entry: state.Entry, line: Line, clock: Clock, ranges: tuple, write: bool, note: bool = True
    ) -> None:
        """An access to some bytes comes after every earlier one that it must not overlap in time with."""
        for at, size in ranges:
            end = at + size
            if not size:
                continue
            kept = []
            for one in self.past:
                apart = one.high <= at or end <= one.low
                ordered = clock.get(one.line, 0) >= one.time
                if not apart and not ordered and (write or one.write):
                    self.report(entry, one)
                # What an ordered access has hidden: whoever comes after this one comes after that one.
                hidden = not apart and ordered and note and at <= one.low and one.high <= end and write >= one.write
                if not hidden:
                    kept.append(one)
            if note:
                kept.append(Access(at, end, write, line, clock.get(line, 0), len(self.log) - 1))
            self.past = kept

    def report(self, entry: state.Entry, one: Access) -> None:
        """Note a race between this entry and an earlier access."""
        first = self.log[one.index]
        does = _NAMES.get(entry.kind, "touches")
        self.found.append(
            f"{len(self.log) - 1}: {_says(entry)} {does} bytes at {one.low:#x} "
            f"that {one.index}: {_says(first)} may not have finished {'writing' if one.write else 'reading'}"
        )


def _says(entry: state.Entry) -> str:
    where = "the host" if entry.kind in ("host read", "host write", "unpin") else f"stream {entry.stream:#x}"
    return f"{entry.kind}{f' {entry.name}' if entry.name else ''} on {where}"


def _line(entry: state.Entry) -> Line:
    return (entry.device if entry.stream in _DEFAULTS else -1, entry.stream)


def _join(clock: Clock, other: Clock) -> None:
    for line, time in other.items():
        if clock.get(line, 0) < time:
            clock[line] = time
