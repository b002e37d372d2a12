"""A lock that does not lose what is told at odd times."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Guard:
    """A lock.  What had to wait (``after``) is done by whoever leaves it last, or finds it free.

    Finalizers run anywhere: in another thread, or in the middle of a guarded block of their own.  They queue what they
    have to say and call :meth:`try_now`.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._after = after

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        try:
            if self._depth == 1:
                self._after()
        finally:
            self._depth -= 1
            self._lock.release()

    def try_now(self) -> None:
        """Do it unless somebody, perhaps this very thread, is inside, who then will."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:
                    self._depth = 1
                    try:
                        self._after()
                    finally:
                        self._depth = 0
            finally:
                self._lock.release()
