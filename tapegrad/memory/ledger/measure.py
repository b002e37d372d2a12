"""measure: count bytes and work of a block."""

from __future__ import annotations

import time

from tapegrad.memory.ledger.figures import Measure
from tapegrad.memory.ledger.ledger import LEDGER


class measure:
    """``with tg.measure() as m:`` counts bytes and work of the block; ``m`` is a :class:`Measure`.

    ``timeline``: also keep a sample after every change.  Blocks may be nested; other threads' bytes count, too.
    """

    _opened = False

    def __init__(self, timeline: bool = False) -> None:
        self._measure = Measure(timeline=timeline)

    def __enter__(self) -> Measure:
        self._opened = True
        self._measure.started = time.perf_counter()
        LEDGER.open(self._measure)
        return self._measure

    def __exit__(self, *exc: object) -> None:
        LEDGER.close(self._measure)
        self._opened = False

    def __del__(self) -> None:
        while self._opened:  # an interrupt came before, or in, `__exit__`
            try:
                self.__exit__()
            except KeyboardInterrupt:  # and another one here, where nobody can be told
                continue
