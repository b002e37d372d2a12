"""Write files atomically: all of a file appears, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tapegrad.errors import TapegradError


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file to write to, which becomes ``path`` at the end of the block, or is removed by an error.

    Links are followed; a device or a pipe at ``path`` stays, and gets the bytes.  Raises OSError, which names ``path``.
    """
    path = Path(path)
    try:
        with _sent(path) if path.exists() and not path.is_file() else _replaced(path) as part:
            yield part
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Check that :func:`atomic` will be able to write ``path``, and leave it as it is.  Raises OSError."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        part = _temporary(Path(os.path.realpath(path)))
        try:
            part.write_bytes(b"")
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _temporary(target: Path) -> Path:
    """Return the file that is written first, and renamed to ``target`` when it is complete."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    target = Path(os.path.realpath(path))
    part = _temporary(target)
    try:
        yield part
        part.replace(target)
    finally:
        with suppress(OSError):  # the first error tells more
            part.unlink()


@contextmanager
def _sent(path: Path) -> Iterator[Path]:
    # not written directly, since some writers seek
    with tempfile.TemporaryDirectory(prefix="tapegrad-") as folder:
        part = Path(folder, "part")
        yield part
        with part.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


class ExportError(TapegradError):
    """An export that this run does not allow, or this machine."""


def write_text(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """Write text to ``path`` in UTF-8, atomically.  Raises OSError."""
    # names that were no UTF-8 where they came from are written as escapes; line ends stay as they are
    with atomic(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.writelines(parts)
