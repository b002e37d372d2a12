"""Work that succeeds on every rank, or fails on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from tapegrad.errors import DistributedError, SaveError, SaveExistsError, SaveFileError, SaveMissingError
from tapegrad.saving.disk import numbered, of_system

T = TypeVar("T")
Work = Generator[Any, list[Any], T]
"""Work that meets the other ranks: ``yield x`` gives what each of them yields, by rank; ``yield error`` fails."""
Rounds = Generator[None, None, T]
"""Work of this rank that yields now and then."""


class _Failure(NamedTuple):
    """An exception, as the other ranks hear of it."""

    kind: str
    text: str
    errno: int | None


_KINDS = {kind.__name__: kind for kind in (SaveFileError, SaveMissingError, SaveExistsError)}


def run(exchange: Callable[[object], list[Any]], op: str, path: str, work: Work[T]) -> T:
    """Do ``work`` on every rank, and return its result.  They meet at its end, too.

    exchange: gives what each rank gives, by rank.
    Where it fails on any rank it is closed on the others, and all wait until their ``finally`` blocks are done.
    Raises the exception of this rank, an OSError as SaveFileError with the ``path`` and a remedy; on the other ranks
    the same SaveError, which names the rank, or DistributedError.
    """
    answer: Any = None
    with closing(work):
        while True:
            error: Exception | None = None
            ended, value, result = False, None, None
            try:
                value = work.send(answer)
                if isinstance(value, Exception):
                    raise value
            except StopIteration as end:
                ended, result = True, end.value
            except Exception as e:
                value, error = None, of_system(op, path, e) if isinstance(e, OSError) else e
            failure = error and _Failure(type(error).__name__, str(error), getattr(error, "errno", None))
            heard = exchange((value, failure))
            failed = [(rank, failure) for rank, (_, failure) in enumerate(heard) if failure is not None]
            if failed:
                work.close()
                exchange(None)
                try:
                    raise error if error is not None else _of_other(op, *failed[0])
                finally:
                    del error, value  # else this frame and the error keep each other, and all arrays that were read
            if ended:
                return result  # type: ignore[return-value]
            answer = [value for value, _ in heard]


def rounds(work: Rounds[T]) -> Work[list[T]]:
    """Meet the other ranks whenever ``work`` yields, until it has ended on all; its results, by rank."""
    ended, result = False, None
    with closing(work):
        while True:
            if not ended:
                try:
                    next(work)
                except StopIteration as end:
                    ended, result = True, end.value
                except Exception as error:
                    yield error  # the others hear of it before this rank removes what they write to
            heard = yield ended, result
            if all(ended for ended, _ in heard):
                return [result for _, result in heard]


def _of_other(op: str, rank: int, failure: _Failure) -> Exception:
    """The exception for a failure of another rank."""
    text = f"{op}: rank {rank}: {failure.text.removeprefix(f'{op}: ')}"
    if failure.kind == SaveError.__name__:
        return SaveError(text)
    kind = _KINDS.get(failure.kind)
    return numbered(kind, failure.errno, text) if kind else DistributedError(f"{text} ({failure.kind})")
