"""Does the stand-in's log show a race?  A happens-before checker by vector clocks.

It is asked at the end of every test that uses the stand-in (:func:`check`, in ``cuda_cases.installed`` and in the
plugin): a race fails the test.  A test that plants one takes it away by calling ``taken`` itself.

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

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from .standin import state

Line = tuple[int, int]  # (device, stream); streams other than the default ones belong to no device here
Clock = dict[Line, int]

HOST: Line = (-2, 0)
_DEFAULTS = (0, 2)
_OF_THE_HOST = ("pin", "unpin", "host read", "host write", "free", "event done", "event synchronize")
_NAMES = {"malloc": "lends again", "unpin": "gives back"}


class Access(NamedTuple):
    """What some operation did to some bytes."""

    write: bool
    line: Line
    time: int
    index: int


class Span(NamedTuple):
    """Bytes, the last write to them, and the last read by each stream since."""

    low: int
    high: int
    write: Access | None
    reads: dict[Line, Access]


def host_reads(array: Any) -> None:
    """Say that the host looks at a NumPy array now."""
    state.log("host read", host=((array.ctypes.data, array.nbytes),))


def host_writes(array: Any) -> None:
    """Say that the host changes a NumPy array now."""
    state.log("host write", host=((array.ctypes.data, array.nbytes),))


def races(log: Iterable[state.Entry] | None = None) -> list[str]:
    """The races in a log (the stand-in's own unless given), each as a sentence."""
    log = list(state.events if log is None else log)
    streams = {_line(entry) for entry in log if entry.kind not in _OF_THE_HOST}
    if len(streams) < 2 and not any(entry.kind == "pin" for entry in log):
        return []  # one stream, and memory of the host that it does not share
    checker = _Checker()
    for entry in log:
        checker.step(entry)
    return checker.found


def taken() -> list[str]:
    """The races in all that the stand-in has done since the last call, or since it was installed."""
    log = list(state.history)
    state.history.clear()
    return races(log)


def check() -> None:
    """Raises AssertionError if there is a race in all that the stand-in has done since the last call."""
    if found := taken():
        raise AssertionError(f"{len(found)} races:\n" + "\n".join(found[:10]))


class _Checker:
    def __init__(self) -> None:
        self.log: list[state.Entry] = []
        self.clocks: dict[Line, Clock] = {HOST: {}}
        self.marks: dict[int, Clock] = {}
        self.spans: list[Span] = []  # apart from each other, by address
        self.pins: list[tuple[int, int]] = []
        self.found: list[str] = []
        self.reported: set[tuple[int, int]] = set()  # numbers of entries

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
                if _home(line) in (None, entry.device):
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
        self.touch(entry, line, clock, entry.writes + entry.own + (pinned if entry.kind == "d2h" else ()), write=True)
        if entry.name == "waits" or (entry.kind == "d2h" and not pinned):
            _join(self.clocks[HOST], clock)

    def enqueue(self, entry: state.Entry) -> Clock:
        """The clock of the entry's stream after one more step, which comes after all that the host knows."""
        line = _line(entry)
        clock = self.clocks.setdefault(line, {})
        _join(clock, self.clocks[HOST])
        legacy = (entry.device, 0)
        if line == legacy:  # the legacy default stream and the blocking ones of its device wait for each other
            for other, theirs in self.clocks.items():
                if other[1] not in state.non_blocking and _home(other) in (None, entry.device):
                    _join(clock, theirs)
        elif line[1] not in state.non_blocking:
            home = _home(line)
            _join(clock, self.clocks.get(legacy if home is None else (home, 0), {}))
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
            if size:
                first, last = self.cut(at, at + size)
                del self.spans[first:last]

    def cut(self, low: int, high: int) -> tuple[int, int]:
        """The places of the spans within these bytes, none of which reaches beyond them."""
        for at in (low, high):
            place = bisect_right(self.spans, at, key=attrgetter("low")) - 1
            if place >= 0 and self.spans[place].low < at < self.spans[place].high:
                one = self.spans[place]
                self.spans[place : place + 1] = [
                    one._replace(high=at), one._replace(low=at, reads=dict(one.reads))
                ]  # fmt: skip
        return tuple(bisect_left(self.spans, at, key=attrgetter("low")) for at in (low, high))  # type: ignore

    def touch(
        self, entry: state.Entry, line: Line, clock: Clock, ranges: tuple, write: bool, note: bool = True
    ) -> None:
        """An access to some bytes comes after every earlier one that it must not overlap in time with."""
        for at, size in ranges:
            if not size:
                continue
            first, last = self.cut(at, at + size)
            for span in self.spans[first:last]:
                for one in (span.write, *(span.reads.values() if write else ())):
                    if one is not None and clock.get(one.line, 0) < one.time:
                        self.report(entry, one, span.low)
            if not note:
                continue
            mine = Access(write, line, clock.get(line, 0), len(self.log) - 1)
            if write:  # who comes after this one comes after what it came after
                self.spans[first:last] = [Span(at, at + size, mine, {})]
                continue
            noted, reached = [], at
            for span in self.spans[first:last]:
                if reached < span.low:
                    noted.append(Span(reached, span.low, None, {line: mine}))
                span.reads[line] = mine
                noted.append(span)
                reached = span.high
            if reached < at + size:
                noted.append(Span(reached, at + size, None, {line: mine}))
            self.spans[first:last] = noted

    def report(self, entry: state.Entry, one: Access, low: int) -> None:
        """Note a race between this entry and an earlier access, once, however many pieces the bytes are in."""
        if (len(self.log), one.index) in self.reported:
            return
        self.reported.add((len(self.log), one.index))
        first = self.log[one.index]
        does = _NAMES.get(entry.kind, "touches")
        self.found.append(
            f"{len(self.log) - 1}: {_says(entry)} {does} bytes at {low:#x} "
            f"that {one.index}: {_says(first)} may not have finished {'writing' if one.write else 'reading'}"
        )


def _says(entry: state.Entry) -> str:
    where = "the host" if entry.kind in ("host read", "host write", "unpin") else f"stream {entry.stream:#x}"
    return f"{entry.kind}{f' {entry.name}' if entry.name else ''} on {where}"


def _line(entry: state.Entry) -> Line:
    return (entry.device if entry.stream in _DEFAULTS else -1, entry.stream)


def _home(line: Line) -> int | None:
    """The device of a line; None where it is not known."""
    return line[0] if line[0] != -1 else state.homes.get(line[1])


def _join(clock: Clock, other: Clock) -> None:
    for line, time in other.items():
        if clock.get(line, 0) < time:
            clock[line] = time
