"""One owner of the processor's cores: BLAS libraries run small factorizations on the calling thread alone.

NumPy and SciPy each bring an OpenBLAS with threads of its own, which go on spinning for some 25 ms after a call.  On
the cores where they spin, the other library's threads and those of the tiles (see ``threads``) wait.  Up to ``MOST``
rows a second thread gains less than it costs there; ``bench/linalg_threads.py`` measures it.  In the main
thread shapes alone decide whether one thread computes: up to there bits do not depend on the number of cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from tapegrad.device.numerics import blas
from tapegrad.device.types import Array

LEAST, MOST = 64, 1024
"""Rows or columns: below, BLAS uses no threads itself; above, they pay."""


_Pool = tuple[Callable[[], int], Callable[[int], object]]
"""What gets the number of threads, and what sets it."""


class _Pools:
    """The threads of the BLAS libraries that are loaded; a block sets them to one, and back.

    Only the main thread sets it: OpenBLAS ignores a number of threads that another thread sets.
    """

    def __init__(self) -> None:
        self._found: list[_Pool] | None = None
        self._with_scipy = False
        self._before: list[tuple[Callable[[int], object], int]] = []

    def __enter__(self) -> None:
        if self._before:  # a signal's handler computes, too
            return
        self._before = [(put, n) for get, put in self._pools() if (n := get()) and n > 1]
        for put, _ in self._before:
            put(1)

    def __exit__(self, *exc: object) -> None:
        before, self._before = self._before, []
        for put, n in before:
            put(n)

    def _pools(self) -> list[_Pool]:
        """Looked for at first use, and again when SciPy's has been loaded."""
        scipy = "scipy.linalg" in sys.modules
        if self._found is None or scipy != self._with_scipy:
            self._with_scipy = scipy
            try:
                from threadpoolctl import ThreadpoolController
            except ImportError:  # an unknown library keeps its threads
                self._found = []
            else:
                pools = ThreadpoolController().select(user_api="blas").lib_controllers
                searching = lambda pool: (pool.get_num_threads, pool.set_num_threads)
                self._found = [blas.thread_functions(pool.filepath) or searching(pool) for pool in pools]
        return self._found


class _AsTheyAre:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_pools, _as_they_are = _Pools(), _AsTheyAre()


def for_matrices(arrays: Sequence[Array]) -> _Pools | _AsTheyAre:
    """A block in which BLAS has the threads that matrices like ``arrays`` (the last two dimensions) are worth."""
    most = 0
    for a in arrays:
        most = max(most, *a.shape[-2:])
    alone = LEAST <= most <= MOST and threading.get_ident() == threading.main_thread().ident
    return _pools if alone else _as_they_are
