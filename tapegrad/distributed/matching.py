"""Matching: before ranks communicate, they compare what each of them is about to do.

MPI and NCCL do not: with different shapes, dtypes or orders of calls they hang, or yield numbers that are wrong.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.distributed.engine import Engine, Notice, Transfer
from tapegrad.distributed.waiting import Home, digest, wait
from tapegrad.distributed.watching import WATCHING, Entered
from tapegrad.errors import DistributedError, users_line

_SHORT = 112
"""Bytes of an object that go at once with its length."""
_HEAD = struct.Struct(f"<q{_SHORT}s")
_REMEMBERED = 1000


class Line:
    """The collectives of one group, in their order, and what all of its ranks tell each other."""

    def __init__(
        self, engine: Engine, home: Home, ranks: Sequence[int], timeout: float, check: str | None, group: str
    ) -> None:
        self.engine, self.home, self.ranks, self.timeout, self.check = engine, home, ranks, timeout, check
        self.group = group
        """Its name."""
        self.number = 0
        self.waiting: deque[UnderWay] = home.waiting
        self.digest = b""
        """Of all that was entered, in its order."""
        self.history: deque[Entered] = deque(maxlen=_REMEMBERED)

    def enter(self, kind: str, detail: str, nbytes: int) -> Entered:
        """Enter a collective.  Raises DistributedError, on every rank, if another rank enters another one."""
        self.begin_all()
        entered = self._entered(kind, detail, nbytes)
        if self.engine.size > 1 and self.check == "each":
            self._compare(entered)
        return entered

    def begin_all(self, until: UnderWay | None = None) -> None:
        """Let the transfers of what was started begin (``until``: as far as that one), in their order on every rank.

        Before anything else: what this rank waits for may be where another rank waits for such a transfer.
        """
        while self.waiting:
            first = self.waiting[0]
            first.begin()
            if first is until:
                return

    def _entered(self, kind: str, detail: str, nbytes: int, under_way: bool = False) -> Entered:
        self.number += 1
        last = self.history[-1] if self.history else None
        if last is not None:
            last.before = None  # or each would hold all before it
        entered = Entered(self.group, kind, detail, self.number, self.ranks, nbytes, users_line(), last)
        self.digest = entered.digest = digest(self.digest, kind, detail)
        self.history.append(entered)
        WATCHING.now.entered(entered, under_way)
        return entered

    def _compare(self, entered: Entered) -> None:
        notice = self._asked(entered)
        wait(notice, entered, self.home, self.timeout)
        self._check(notice, entered)

    def _asked(self, entered: Entered) -> Notice:
        return self.engine.notice(entered.digest)

    def _check(self, notice: Notice, entered: Entered) -> None:
        if any(told != entered.digest for told in notice.told()):
            mine = {e.number: (e.digest, str(e)) for e in (*self.history, entered)}
            known = self._gathered(mine, entered)
            texts = _first_difference(known)
            # who catches the error, and goes on, begins anew with the others
            self.number, self.digest = max(max(one) for one in known), b""
            self.history.clear()
            raise DistributedError("ranks do not do the same: " + _sides(self.ranks, texts))

    def start(self, kind: str, detail: str, nbytes: int, start: Callable[[], Transfer]) -> UnderWay:
        """Enter a collective whose transfer goes on while the program does."""
        entered = self._entered(kind, detail, nbytes, True)
        compares = self.engine.size > 1 and self.check == "each"
        return UnderWay(self, entered, self._asked(entered) if compares else None, start)

    def between_two(self, kind: str, detail: str, nbytes: int, key: Sequence[int]) -> Entered:
        """Enter a message between two ranks, in which nobody else takes part; ``key``: see ``collectives/pairs.py``."""
        source, to, number, turns = key
        group = f"{source}-{to}" + turns * "'"
        entered = Entered(group, kind, detail, number, (source, to), nbytes, users_line())
        WATCHING.now.entered(entered, False)
        return entered

    def told(self, x: object, entered: Entered) -> list[Any]:
        """What each rank gives for ``x``, by rank: anything that can be pickled.

        Raises DistributedError, on every rank, if they have not entered the same collectives until now.
        """
        if self.engine.size == 1:
            return [x]
        if self.check == "step":
            self._compare(entered)
        return self._gathered(x, entered)

    def _gathered(self, x: object, entered: Entered) -> list[Any]:
        data = pickle.dumps(x, protocol=pickle.HIGHEST_PROTOCOL)
        notice = self._noticed(_HEAD.pack(len(data), data[:_SHORT]), entered)
        heads = [_HEAD.unpack(told) for told in notice.told()]
        most = max(length for length, _ in heads) - _SHORT
        if most <= 0:
            return [pickle.loads(head[:length]) for length, head in heads]
        rest = self._noticed(data[_SHORT:].ljust(most, b"\0"), entered).told()
        return [pickle.loads((head + tail)[:length]) for (length, head), tail in zip(heads, rest, strict=True)]

    def _noticed(self, data: bytes, entered: Entered) -> Notice:
        notice = self.engine.notice(data)
        wait(notice, entered, self.home, self.timeout)
        return notice


class UnderWay:
    """A collective under way: first the ranks compare what they do, then its transfer starts.

    :meth:`done` helps it on; so what is called now and then goes on while the program computes.
    """

    def __init__(self, line: Line, entered: Entered, notice: Notice | None, start: Callable[[], Transfer]) -> None:
        self._line, self._entered, self._notice = line, entered, notice
        self._start: Callable[[], Transfer] | None = start
        self._transfer: Transfer | None = None
        if notice is None:
            self._start_now()
        else:
            line.waiting.append(self)

    def _start_now(self) -> None:
        WATCHING.now.begun(self._entered)
        assert self._start is not None
        self._transfer, self._start = self._start(), None  # what it uses goes with the transfer

    def begin(self) -> None:
        """Compare, and begin the transfer.  Raises DistributedError if ranks do not do the same."""
        assert self._notice is not None
        wait(self._notice, self._entered, self._line.home, self._line.timeout)
        self._line.waiting.popleft()  # also where ranks differ, or each later collective would say that again
        self._line._check(self._notice, self._entered)
        self._start_now()

    def done(self) -> bool:
        """Whether it is done.  Raises DistributedError if ranks do not do the same."""
        if self._transfer is None:
            assert self._notice is not None
            if self._line.waiting[0] is not self or not self._notice.done():
                return False  # transfers begin in one order on all ranks
            self.begin()
        assert self._transfer is not None
        if not self._transfer.done():
            return False
        WATCHING.now.arrived(self._entered)
        return True

    def wait(self) -> None:
        """Wait until it is done.  Raises DistributedError."""
        if self._transfer is None:
            self._line.begin_all(self)
        wait(self, self._entered, self._line.home, self._line.timeout)


def _first_difference(known: Sequence[dict[int, tuple[bytes, str]]]) -> list[str]:
    """What each rank did where they first did not do the same; ``known``: digest and text by number, for each rank."""
    first = max(min(one) for one in known)  # what is older, not all remember
    numbers = range(first, max(max(one) for one in known) + 1)
    at = next((n for n in numbers if len({one[n][0] if n in one else b"" for one in known}) > 1), numbers[-1])
    return [one[at][1] if at in one else "nothing more" for one in known]


def _sides(ranks: Sequence[int], texts: list[str]) -> str:
    """Who does what: ``ranks 0, 2: ...; rank 1: ...``."""
    sides: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        sides.setdefault(text, []).append(rank)
    return "; ".join(f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}: {text}"
                     for text, who in sides.items())  # fmt: skip
