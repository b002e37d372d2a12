"""What exports share: text files, and the error where there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tapegrad.errors import TapegradError
from tapegrad.profile.runs.whole import whole


class ExportError(TapegradError):
    """A file that cannot be made of this run, or on this machine."""


def write_text(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """Write text to ``path``, in UTF-8: all of it, or (on an error) nothing.  Raises OSError."""
    # names that were no UTF-8 where they came from are written as escapes; line ends stay as they are
    with whole(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.writelines(parts)
