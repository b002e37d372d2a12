"""How files get onto the disk: whole, or not at all."""

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
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write to, which becomes ``path`` if all goes well, and otherwise is removed.

    Links are followed; what is there and is no regular file (a device, a pipe) stays, and gets the bytes.
    Raises OSError, which names ``path``.
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
    """Try now what :func:`whole` will do later; what is at ``path`` stays.  Raises OSError, which names ``path``."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        part = _beside(Path(os.path.realpath(path)))
        try:
            part.write_bytes(b"")
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _beside(target: Path) -> Path:
    """The file that is written first, and renamed to ``target`` when it is whole."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    target = Path(os.path.realpath(path))
    part = _beside(target)
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
    """A file that cannot be made of this run, or on this machine."""


def write_text(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """Write text to ``path``, in UTF-8: all of it, or (on an error) nothing.  Raises OSError."""
    # names that were no UTF-8 where they came from are written as escapes; line ends stay as they are
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.writelines(parts)
