"""Bytes that threads have been given room for and have not taken yet: what one is about to take, no other gets."""

from __future__ import annotations

import threading


class Promises:
    """Bytes by thread; not safe for threads by itself."""

    def __init__(self) -> None:
        self._by_thread: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_thread)

    @property
    def total(self) -> int:
        """Bytes promised to all threads."""
        return sum(self._by_thread.values())

    def give(self, nbytes: int) -> None:
        """This thread is about to take so many bytes."""
        self._by_thread[threading.get_ident()] = nbytes

    def take(self, nbytes: int) -> bool:
        """This thread takes so many bytes; False if that is more than it has asked for, which then is void."""
        me = threading.get_ident()
        promised = self._by_thread.pop(me, 0)
        if promised > nbytes:
            self._by_thread[me] = promised - nbytes
        return promised >= nbytes

    def settle(self) -> None:
        """What this thread has asked for is made, or will not be."""
        self._by_thread.pop(threading.get_ident(), None)

    def clear(self) -> None:
        """No thread is about to take anything."""
        self._by_thread.clear()

    def forget_ended_threads(self) -> bool:
        """What a thread had asked for when an operation failed, and it ended, is void; False if there is none."""
        ended = self._by_thread.keys() - {t.ident for t in threading.enumerate()}
        for t in ended:
            del self._by_thread[t]
        return bool(ended)
