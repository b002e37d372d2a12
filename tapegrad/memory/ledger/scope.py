"""scope: a name for part of a program, under which profiles show what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tapegrad.memory.ledger.frames import caller, program_frame
from tapegrad.memory.ledger.ledger import LEDGER


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
