"""What a profiled process tells ``tapegrad top``: a small JSON file, replaced at most twice a second.

The files lie in a folder that only their user can enter, and which is refused if somebody else made it.
"""

from __future__ import annotations

import atexit
import json
import os
import stat
import tempfile
import time
from pathlib import Path

from tapegrad.errors import TapegradError

SECONDS = 0.5
"""The least time between two versions of a file."""


class RuntimeFolderError(TapegradError, OSError):
    """The folder for the files of running processes is not one that only we can write to."""


def folder() -> Path:
    """Where the files lie: in ``XDG_RUNTIME_DIR`` if that is a folder, else in the folder for temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base) and os.path.isdir(base):
        return Path(base, "tapegrad")
    uid = os.getuid() if hasattr(os, "getuid") else "user"  # Windows: temporary files are the user's own
    return Path(tempfile.gettempdir(), f"tapegrad-{uid}")


def require_ours(path: Path) -> None:
    """Raises RuntimeFolderError unless ``path`` is a folder (not a link) of ours that nobody else can enter."""
    if not hasattr(os, "getuid"):
        return
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RuntimeFolderError(f"{path} is not a folder; remove it")
    if status.st_uid != os.getuid():
        raise RuntimeFolderError(f"{path} belongs to user {status.st_uid}, not to you; set XDG_RUNTIME_DIR")
    if status.st_mode & 0o077:
        raise RuntimeFolderError(f"{path} is open to others; chmod 700 it")


class Publisher:
    """Tells ``tapegrad top`` about this process until it ends; does nothing where that is not possible."""

    def __init__(self) -> None:
        self._next = 0.0
        self._written: Path | None = None
        self._pid = os.getpid()
        self.error: OSError | None = None
        """Why nothing is published, if so."""
        atexit.register(self.close)

    def update(self, figures: dict[str, object]) -> None:
        """Publish ``figures``, unless the last ones are less than half a second old.

        Keys: ``program``, ``started`` (seconds since 1970), ``step``, ``live_bytes``, ``peak_bytes``, ``categories``
        (bytes by name), ``device``, ``reserved_bytes``; ``pid`` and ``updated`` are added.
        """
        now = time.monotonic()
        if now < self._next or self.error is not None:
            return
        self._next = now + SECONDS
        if self._pid != os.getpid():  # after a fork: the file of the parent is not ours
            self._pid, self._written = os.getpid(), None
        text = json.dumps({**figures, "pid": self._pid, "updated": time.time()})
        try:
            self._write(folder(), text)
        except OSError as error:
            self.error = error

    def _write(self, directory: Path, text: str) -> None:
        directory.mkdir(mode=0o700, parents=False, exist_ok=True)
        require_ours(directory)
        part = directory / f".{self._pid}.part"
        part.write_text(text, encoding="utf-8")
        self._written = part.replace(directory / f"{self._pid}.json")

    def close(self) -> None:
        """Stop, and remove the file."""
        atexit.unregister(self.close)
        self._next = float("inf")
        if self._written is not None and self._pid == os.getpid():
            try:
                self._written.unlink(missing_ok=True)
            except OSError as error:
                self.error = error
            self._written = None
