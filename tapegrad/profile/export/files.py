"""How exports get onto the disk: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tapegrad.errors import TapegradError


class ExportError(TapegradError):
    """A file that cannot be made of this run, or on this machine."""


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write to, which becomes ``path`` if all goes well, and otherwise is removed.  Raises OSError."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """Write text to ``path``, in UTF-8: all of it, or (on an error) nothing.  Raises OSError."""
    # names that were no UTF-8 where they came from are written as escapes; line ends stay as they are
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.writelines(parts)
