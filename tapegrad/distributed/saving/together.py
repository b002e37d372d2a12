"""Steps that succeed on every rank, or fail on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tapegrad.errors import DistributedError
from tapegrad.nn.layers.saving import SaveError, SaveFileError, SaveMissingError


class Ranks(Protocol):
    """What is asked of a group."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def exchange_objects(self, x: object) -> list[Any]:
        """What each rank gives, by rank."""


class _Failure(NamedTuple):
    """An exception, as it is told to the other ranks."""

    kind: str
    text: str
    errno: int | None
    of_saving: bool


def on_every_rank(
    group: Ranks, op: str, step: Callable[[], Any], undo: Callable[[], object] | None = None
) -> list[Any]:
    """What ``step`` returns, by rank.  Where it fails on any rank every rank calls ``undo``, and waits for all.

    Raises the exception of ``step``; on the other ranks SaveFileError (an OSError), SaveError or DistributedError,
    which name the rank.
    """
    error: Exception | None = None
    value = failure = None
    try:
        value = step()
    except Exception as e:
        error = e
        errno = e.errno if isinstance(e, OSError) else None
        failure = _Failure(type(e).__name__, str(e), errno, isinstance(e, SaveError))
    told = group.exchange_objects((value, failure))
    failed = [(rank, failure) for rank, (_, failure) in enumerate(told) if failure is not None]
    if not failed:
        return [value for value, _ in told]
    if undo is not None:
        undo()
        group.exchange_objects(None)
    raise error if error is not None else _of_other(op, *failed[0])


def on_first_rank(group: Ranks, op: str, step: Callable[[], Any], undo: Callable[[], object] | None = None) -> Any:
    """What ``step`` returns on rank 0, the only one that takes it, on every rank.  Raises as :func:`on_every_rank`."""
    return on_every_rank(group, op, lambda: step() if group.rank == 0 else None, undo)[0]


def _of_other(op: str, rank: int, failure: _Failure) -> Exception:
    """The exception for what has failed on another rank."""
    text = f"{op}: rank {rank}: {failure.text.removeprefix(f'{op}: ')}"
    if failure.errno is None:
        return SaveError(text) if failure.of_saving else DistributedError(f"{text} ({failure.kind})")
    error = (SaveMissingError if failure.kind == SaveMissingError.__name__ else SaveFileError)(text)
    error.errno, error.strerror = failure.errno, os.strerror(failure.errno)
    return error
