"""A lock that does not lose what is told at odd times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tapegrad.core import locks

Item = TypeVar("Item")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Guard(Generic[Item]):
    """A lock, and a queue of what finalizers have to say, which is handled inside.

    Finalizers run anywhere: in another thread, or in the middle of a guarded call of their own.  So :meth:`tell` never
    waits: who is inside handles the queue when it leaves.  It looks once more when the lock is free, because a
    finalizer may have found the lock taken just before.
    """

    def __init__(self, handle: Callable[[Item], None]) -> None:
        self._lock = locks.lock()
        self._handle = handle
        self._waiting: deque[Item] = deque()

    def run(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns, called inside."""
        nested = self._lock._is_owned()
        try:
            with self._lock:
                return f(*args)
        finally:
            if self._waiting and not nested:
                self._try_now()

    def tell(self, item: Item) -> None:
        """Handle ``item`` now, or when nobody is inside any more."""
        self._waiting.append(item)
        self._try_now()

    def forget(self) -> None:
        """What waits is not handled."""
        self._waiting.clear()

    def _try_now(self) -> None:
        """Handle the queue, unless somebody, perhaps this very thread, is inside, who then will."""
        if self._lock._is_owned():
            return
        try:
            while self._waiting and self._lock.acquire(blocking=False):
                self._handle_all()
                self._lock.release()
        finally:
            while self._lock._is_owned():  # it was not before; `run`, which may have called, has left it
                self._lock.release()

    def _handle_all(self) -> None:
        while self._waiting:
            self._handle(self._waiting[0])
            self._waiting.popleft()  # only now: an interrupt may come at any time, and all this can be done twice


def guarded(method: F) -> F:
    """A method that runs inside ``self.guard``."""

    def run(self: Any, *args: Any) -> Any:
        return self.guard.run(method, self, *args)

    run.__doc__, run.__name__, run.__qualname__ = method.__doc__, method.__name__, method.__qualname__
    return run  # type: ignore[return-value]
