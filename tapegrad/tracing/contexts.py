"""Blocks that the user enters: measure counts bytes and work, scope names part of a program for profiles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tapegrad.tracing.frames import caller, program_frame
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import Measure


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


@contextmanager
def scope(name: str) -> Iterator[None]:
    """``with tg.memory.scope("encoder"):`` profiles show what is done in the block under that name.

    Functions and layers have their names without it; while nothing is profiled it does nothing.
    """
    journal = LEDGER.journal
    if journal is None:
        yield
        return
    with LEDGER.held():
        end = journal.frames.scope(str(name), program_frame(caller(2)))  # above contextlib, which enters the block
    try:
        yield
    finally:
        end()
