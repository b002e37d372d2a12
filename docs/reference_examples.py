"""The examples of the API reference: for each public name a few lines of a Python session, in ``reference/examples``.

A file there is about one subject.  An example begins with a line ``[tapegrad.linalg.det]``, the name it is about; its
session follows, and an empty line ends it.  ``np`` and ``tg`` (tapegrad) are there without import.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "reference" / "examples"
_HEAD = re.compile(r"^\[(tapegrad[\w.]*)\]\n", re.MULTILINE)


def examples() -> dict[str, str]:
    """The session of each public name, such as ``"tapegrad.linalg.det"``.  Raises ValueError for a name told twice."""
    sessions: dict[str, str] = {}
    for file in sorted(FOLDER.glob("*.txt")):
        for name, session in parsed(file.read_text(encoding="utf-8")):
            if name in sessions:
                raise ValueError(f"{file.name}: {name} has another example already")
            sessions[name] = session
    return sessions


def parsed(text: str) -> list[tuple[str, str]]:
    """Names and sessions of the text of a file.  Raises ValueError for text before the first name."""
    before, *parts = _HEAD.split(text)
    if before.strip():
        raise ValueError(f"a name in brackets should come first: {before[:60]!r}")
    return [(name, session.strip() + "\n") for name, session in zip(parts[::2], parts[1::2])]
