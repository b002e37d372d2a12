"""Files that appear whole or not at all, and what the user can do about an error of the system."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from tapegrad.errors import SaveError, SaveFileError, SaveMissingError

_REMEDIES = {
    errno.EISDIR: "give the name of a file in it",
    errno.ENOTDIR: "a part of the path is a file, not a folder; give another path",
    errno.EACCES: "get the permission, or give another path",
    errno.EPERM: "get the permission, or give another path",
    errno.EROFS: "give a path on a disk that can be written to",
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EDQUOT: "free some space, or give a path on another disk",
    errno.ENAMETOOLONG: "give a shorter name",
}


def numbered(kind: type[SaveFileError], number: int | None, text: str) -> SaveFileError:
    """An error with the system's number."""
    error = kind(text)
    error.errno = number
    return error


def of_system(op: str, path: str, error: OSError) -> SaveFileError:
    """The error for a file that the system cannot write or read, with a remedy."""
    if isinstance(error, SaveFileError):
        return error
    folder = os.path.dirname(path) or "."
    kind, remedy = SaveFileError, _REMEDIES.get(error.errno or 0, "")
    if isinstance(error, FileNotFoundError):
        kind, remedy = (
            SaveMissingError,
            "there is no such file" if os.path.isdir(folder) else f"make the folder {folder} first",
        )
    text = f"{op}: {path}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")
    result = numbered(kind, error.errno, text)
    result.__cause__ = error
    return result


@contextmanager
def system_errors(op: str, path: str) -> Iterator[None]:
    """Raise an OSError of the block as SaveFileError."""
    try:
        yield
    except OSError as error:
        raise of_system(op, path, error)  # noqa: B904  # it has its cause


def real_path(op: str, path: str) -> str:
    """Where ``path`` leads to when links are followed.  Raises SaveError for what cannot be a path."""
    if not path or "\0" in path:
        raise SaveError(f"{op}: {path!r} cannot be the name of a file; give another path")
    return os.path.realpath(path)


def hidden(real: str, kind: str) -> str:
    """A new name beside ``real``."""
    parent, name = os.path.split(real)
    return os.path.join(parent, f".{name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def replaced(path: str) -> Iterator[str]:
    """The name of a file to write in the block; at its end it replaces ``path``, or is removed if the block fails.

    Raises OSError, SaveError for a path that no file can have.
    """
    real = real_path("save", path)
    if os.path.isdir(real):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), real)
    if os.path.exists(real) and not os.path.isfile(real):
        raise SaveFileError(f"save: {path} is a device or pipe, which a file would replace; give another path")
    staged = hidden(real, "partial")
    try:
        yield staged
        os.replace(staged, real)
    finally:
        with suppress(OSError):  # the first error says more
            os.unlink(staged)


def sync(file: IO[Any]) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_names(folder: str) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # Windows opens no folders
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
