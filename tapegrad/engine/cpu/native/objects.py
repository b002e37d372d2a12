"""Machine code on disk, so that each structure is compiled once a machine, not once a process.

The folder is ``TAPEGRAD_NATIVE_CACHE``, or ``tapegrad/native`` in the cache of the user; ``TAPEGRAD_NATIVE_CACHE=0`` is
none.  Whoever can write there can have this user run anything, so a folder or file of another user's, or one that
others may write, is not used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_MOST_FILES = 2000
_DIGEST = hashlib.sha256().digest_size


def folder() -> tuple[Path | None, str]:
    """Return the folder, made if there is none, and the reason why it is not used."""
    given = os.environ.get("TAPEGRAD_NATIVE_CACHE", "")
    if given == "0":
        return None, "TAPEGRAD_NATIVE_CACHE=0"
    path = Path(given) if given else _users() / "tapegrad" / "native"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as e:
        return None, f"{path}: {e.strerror}"
    if not stat.S_ISDIR(info.st_mode):
        return None, f"{path} is no folder"
    return (path, "") if _is_private(info) else (None, f"{path} belongs to another user, or others may write there")


def _users() -> Path:
    """The folder for caches of this user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _is_private(info: os.stat_result) -> bool:
    """Whether this user owns it and nobody else may write it.  (Windows keeps the folder for its user by itself.)"""
    return sys.platform == "win32" or (info.st_uid == os.geteuid() and not info.st_mode & 0o022)


def key(*parts: str) -> str:
    """Return the name of an object that depends on ``parts``."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(name: str) -> bytes | None:
    """Return the object of this name; None if there is none that is whole and this user's."""
    path, _ = folder()
    if path is None:
        return None
    try:
        with (path / name).open("rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or not _is_private(info):
                return None
            content = file.read()
    except OSError:
        return None
    data = content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == content[:_DIGEST] else None


def store(name: str, data: bytes) -> None:
    """Keep an object under this name.  Where that fails it is compiled anew next time."""
    path, _ = folder()
    if path is None:
        return
    with suppress(OSError):
        handle, beside = tempfile.mkstemp(dir=path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            Path(beside).replace(path / name)
        finally:
            Path(beside).unlink(missing_ok=True)
        _prune(path)


def _prune(path: Path) -> None:
    """Remove the older half of too many files."""
    files = list(path.iterdir())
    if len(files) > _MOST_FILES:
        for file in sorted(files, key=lambda f: f.stat().st_mtime)[: len(files) // 2]:
            file.unlink(missing_ok=True)
