"""Waiting for other ranks: with a deadline, and listening to what befalls them meanwhile.

A rank that waits for too long tells all others, who then give up, too, and tell where they are: so the message of each
names those who have not come.  A rank that ends tells the others (``faults.py``); who waits for it in vain learns why.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tapegrad.distributed.engine import WrongSizeError
from tapegrad.distributed.watching import WATCHING, Entered
from tapegrad.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from tapegrad.distributed.engine import Engine, Transfer

LATE, LEAVING = 0, 1
"""Kinds of messages that are left for others."""
_SPINS = 64
_LONGEST_PAUSE = 1e-3
_FOR_ANSWERS = 1.0
"""Seconds in which others say where they are."""
_AFTER_LEAVING = 1.0
"""Seconds in which what a rank has sent before it left may still come."""


def digest(before: bytes, kind: str, detail: str) -> bytes:
    """Of what must be the same: a collective, and ``before``, that of all before it."""
    return hashlib.blake2b(before + f"{kind}|{detail}".encode(), digest_size=16).digest()


class Home:
    """All ranks of the job, and what is known of those that have ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.left: dict[int, str] = {}
        self._told = False
        self.waiting: deque[Any] = deque()
        """Collectives under way whose transfers have not begun, of all groups: they begin in one order."""

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self.engine.rank

    def tell_of_end(self, how: str = "its program has ended") -> None:
        """Tell the others, once, that this rank takes part in nothing more."""
        if not self._told:
            self._told = True
            for rank in range(self.engine.size):
                if rank != self.rank:
                    self.engine.post(rank, LEAVING, how.encode())

    def leave(self) -> None:
        """Tell the others that this rank ends, and wait until they do, too: who waits for this rank ends all."""
        self.tell_of_end()
        while len(self.left) < self.engine.size - 1:
            self.listen()
            time.sleep(_LONGEST_PAUSE)
        self.engine.close()

    def listen(self) -> None:
        """Hear who has ended."""
        while (message := self.engine.pick_up(LEAVING)) is not None:
            self.left[message[0]] = message[1].decode()


def wait(transfer: Transfer, entered: Entered, home: Home, timeout: float) -> None:
    """Wait until a transfer is done.  ``timeout``: seconds.

    Raises DistributedTimeoutError if other ranks do not come, DistributedError if one has left, or has sent something
    else.
    """
    WATCHING.now.waits(entered)
    try:
        _wait(transfer, entered, home, timeout)
        WATCHING.now.waited(entered)
    except WrongSizeError as e:
        lines, _ = _places(entered, home, [])
        raise DistributedError("; ".join([str(e), *lines])) from None


def _wait(transfer: Transfer, entered: Entered, home: Home, timeout: float) -> None:
    for _ in range(_SPINS):
        if transfer.done():
            return
    began, pause = time.monotonic(), 1e-5
    gone: float | None = None
    while not transfer.done():
        now = time.monotonic()
        home.listen()
        left = [r for r in entered.ranks if r in home.left]
        if left:
            gone = now if gone is None else gone
            if now - gone > _AFTER_LEAVING:
                home.engine.give_up()
                raise DistributedError(
                    f"rank {home.rank} waits in {entered}, but rank {left[0]} is not there: {home.left[left[0]]}"
                )
        late = home.engine.pick_up(LATE)
        if late is not None or now - began > timeout:
            error = _timeout(entered, home, timeout, [] if late is None else [late])
            home.engine.give_up()
            raise error
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)


def _places(entered: Entered, home: Home, known: list[tuple[int, bytes]]) -> tuple[list[str], list[int]]:
    """Tell the others where this rank waits, and hear where they do; who is missing.  ``known``: heard before."""
    others = [r for r in entered.ranks if r != home.rank]
    for rank in others:
        home.engine.post(rank, LATE, pickle.dumps(str(entered)))
    until = time.monotonic() + _FOR_ANSWERS
    while time.monotonic() < until and len({r for r, _ in known}) < len(others):
        answer = home.engine.pick_up(LATE)
        if answer is None:
            time.sleep(_LONGEST_PAUSE)
        else:
            known.append(answer)
    places = {rank: pickle.loads(data) for rank, data in known}
    lines = [f"rank {home.rank} waits in {entered}"]
    lines += [f"rank {rank} waits in {place}" for rank, place in sorted(places.items())]
    return lines, [r for r in others if r not in places]


def _timeout(entered: Entered, home: Home, timeout: float, known: list[tuple[int, bytes]]) -> DistributedTimeoutError:
    """Who waits where, and who is missing."""
    lines, missing = _places(entered, home, known)
    who = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
    have = "has" if len(missing) == 1 else "have"
    lines += [f"{who} {have} not come, and {have} not said anything for {timeout:g} s" for _ in missing[:1]]
    lines += [f"before, rank {home.rank} was in {entered.before}"] if entered.before else []
    return DistributedTimeoutError("; ".join(lines))
