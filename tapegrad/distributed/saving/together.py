"""Steps that succeed on every rank, or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from tapegrad.errors import DistributedError, SaveError, SaveExistsError, SaveFileError, SaveMissingError
from tapegrad.nn.layers.saving import of_system

T = TypeVar("T")
Rounds = Generator[None, None, T]
"""Work that yields now and then."""


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


_KINDS = {kind.__name__: kind for kind in (SaveError, SaveFileError, SaveMissingError, SaveExistsError)}


def on_every_rank(
    group: Ranks, op: str, path: str, step: Callable[[], Any], undo: Callable[[], object] | None = None
) -> list[Any]:
    """What ``step`` returns, by rank.  Where it fails on any rank every rank calls ``undo``, and waits for all.

    Raises the exception of ``step``, an OSError as SaveFileError with the ``path`` and what to do; on the other ranks
    the same SaveError, which names the rank, or DistributedError.
    """
    error: Exception | None = None
    value = failure = None
    try:
        value = step()
    except Exception as e:
        error = e
        if isinstance(e, OSError) and not isinstance(e, SaveError):
            error = of_system(op, path, e)
            error.__cause__ = e
        failure = _Failure(type(error).__name__, str(error), getattr(error, "errno", None))
    told = group.exchange_objects((value, failure))
    failed = [(rank, failure) for rank, (_, failure) in enumerate(told) if failure is not None]
    if not failed:
        return [value for value, _ in told]
    if undo is not None:
        undo()
        group.exchange_objects(None)
    raise error if error is not None else _of_other(op, *failed[0])


def in_rounds(group: Ranks, op: str, path: str, work: Rounds[T], undo: Callable[[], object] | None = None) -> list[T]:
    """What ``work`` returns, by rank.  At each of its yields ranks hear whether all goes well, and that all are there.

    Raises as :func:`on_every_rank`.
    """
    result: list[T] = []

    def step() -> list[T]:
        if not result:
            try:
                next(work)
            except StopIteration as end:
                result.append(end.value)
        return result

    while not all(told := on_every_rank(group, op, path, step, undo)):
        pass
    return [value for (value,) in told]


def on_first_rank(
    group: Ranks, op: str, path: str, step: Callable[[], Any], undo: Callable[[], object] | None = None
) -> Any:
    """What ``step`` returns on rank 0, the only one that takes it, on every rank.  Raises as :func:`on_every_rank`."""
    return on_every_rank(group, op, path, lambda: step() if group.rank == 0 else None, undo)[0]


def _of_other(op: str, rank: int, failure: _Failure) -> Exception:
    """The exception for what has failed on another rank."""
    text = f"{op}: rank {rank}: {failure.text.removeprefix(f'{op}: ')}"
    if failure.kind not in _KINDS:
        return DistributedError(f"{text} ({failure.kind})")
    error = _KINDS[failure.kind](text)
    if isinstance(error, OSError):
        error.errno = failure.errno
    return error
