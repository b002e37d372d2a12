"""A lock that does not lose what is told at odd times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tapegrad.core import locks

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """A lock.  What had to wait (``after``) is done by whoever leaves it last, or finds it free.

    Finalizers run anywhere: in another thread, or in the middle of a guarded call of their own.  They queue what they
    have to say and call :meth:`try_now`.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._lock = locks.lock()
        self._after = after

    @locks.section
    def run(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns, called inside."""
        nested = self._lock._is_owned()
        try:
            with self._lock:
                result = f(*args)
                if not nested:
                    self._after()
                return result
        except BaseException:
            if locks.let_go(self._lock, self) <= 0:
                self.try_now()
            raise

    @locks.section
    def try_now(self) -> None:
        """Do what had to wait unless somebody, perhaps this very thread, is inside, who then will."""
        if self._lock._is_owned():
            return
        try:
            if self._lock.acquire(blocking=False):
                self._after()
                self._lock.release()
        except BaseException:
            while self._lock._is_owned():  # it was not before; `run`, which may have called, has left it
                self._lock.release()
            raise


def guarded(method: F) -> F:
    """A method that runs inside ``self.guard``."""

    def run(self: Any, *args: Any) -> Any:
        return self.guard.run(method, self, *args)

    run.__doc__, run.__name__, run.__qualname__ = method.__doc__, method.__name__, method.__qualname__
    return run  # type: ignore[return-value]
