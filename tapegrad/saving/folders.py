"""Folders that appear when they are complete, and are never replaced by less than a complete one.

All is written into ``.NAME.tmp-...`` beside ``NAME``, and that is renamed when it is on the disk.  A folder that was
there before steps aside first, as ``.NAME.old-...``.  A process that is killed between these two renames leaves the old
folder under that name: ``find`` reads it there, and the next ``stage`` puts it back, and removes the hidden folders of
processes that were killed.

Only rank 0 calls these functions: the view that other machines have of a shared disk may be late.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress

from tapegrad.errors import SaveError, SaveExistsError, SaveFileError, SaveMissingError
from tapegrad.saving import index
from tapegrad.saving.disk import hidden, numbered, real_path, sync, sync_names
from tapegrad.saving.files import Index


def stage(target: str, overwrite: bool) -> str:
    """Make the hidden folder to write into; its path.

    Raises OSError, SaveExistsError if ``target`` exists and may not be replaced, SaveError if it can be no path.
    """
    real = real_path("save", target)
    if (old := _aside(real)) is not None:
        os.rename(old, real)
    _require_replaceable(target, real, overwrite)
    for path in _left(real, "old"):
        os.rename(path, hidden(real, "tmp"))  # so nobody takes what is left of it for an old folder
    for path in _left(real, "tmp"):
        shutil.rmtree(path)
    staged = hidden(real, "tmp")
    os.mkdir(staged)
    return staged


def commit(staged: str, target: str, text: str, sizes: Mapping[str, int]) -> None:
    """Write the index and give the folder its name.  Nothing has changed if this raises OSError.

    ``sizes``: of the files that must be there.
    """
    real = real_path("save", target)
    for name, nbytes in sizes.items():
        path = os.path.join(staged, name)
        if not os.path.exists(path) or os.path.getsize(path) != nbytes:
            raise SaveFileError(
                f"save: rank 0 does not see all of {path}, which was written: all ranks must save to one disk that "
                "they share, and no two jobs to one folder"
            )
    with open(os.path.join(staged, index.NAME), "x", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    sync_names(staged)
    aside = None if _is_free(real) else hidden(real, "old")
    if aside is not None:
        os.rename(real, aside)
    try:
        os.rename(staged, real)
        try:
            sync_names(os.path.dirname(real))
        except BaseException:
            os.rename(real, staged)
            raise
    except BaseException:
        if aside is not None:
            os.rename(aside, real)
        raise
    if aside is not None:
        with suppress(OSError):  # the next stage removes it
            garbage = hidden(real, "tmp")
            os.rename(aside, garbage)
            shutil.rmtree(garbage)


def discard(staged: str) -> None:
    """Remove the hidden folder, if that is possible."""
    shutil.rmtree(staged, ignore_errors=True)


def exists(target: str) -> bool:
    """Whether there is a folder to load, or something else of its name."""
    real = real_path("load", target)
    return _aside(real) is not None or not _is_free(real)


def find(target: str) -> Index:
    """The index of a folder.  Raises OSError, SaveMissingError, SaveError."""
    real = real_path("load", target)
    real = _aside(real) or real
    if not os.path.lexists(real):
        raise numbered(SaveMissingError, errno.ENOENT, f"load: {target}: there is no such folder")
    if not os.path.isdir(real):
        raise SaveError(f"load: {target} is a file; what Layer.save has written, Layer.load reads")
    path = os.path.join(real, index.NAME)
    if not os.path.exists(path):
        text = f"load: {target} has no {index.NAME}: it is not a folder that tg.distributed.save wrote"
        raise numbered(SaveMissingError, errno.ENOENT, text)
    with open(path, "rb") as file:
        return index.parse(file.read(), real, os.path.join(target, index.NAME))


def _require_replaceable(target: str, real: str, overwrite: bool) -> None:
    if _is_free(real):
        return
    names = os.listdir(real) if os.path.isdir(real) else []
    others = sorted(name for name in names if not index.is_file_of_ours(name))
    if not overwrite:
        why = f"{target} exists; give another path, or overwrite=True"
    elif index.NAME not in names:
        why = f"{target} is not a folder that save wrote; give another path"
    elif others:
        why = f"{target} holds {others[0]}, which would be lost; give another path"
    else:
        return
    raise numbered(SaveExistsError, errno.EEXIST, f"save: {why}")


def _is_free(real: str) -> bool:
    """Whether nothing of that name exists, or an empty folder."""
    return not os.path.lexists(real) or os.path.isdir(real) and not os.listdir(real)


def _aside(real: str) -> str | None:
    """The folder that stepped aside for one that did not come."""
    if _is_free(real) and os.path.isdir(os.path.dirname(real)) and (old := _left(real, "old")):
        return old[-1]
    return None


def _left(real: str, kind: str) -> list[str]:
    """Hidden folders beside the folder, which a process that was killed has left."""
    parent, name = os.path.split(real)
    return sorted(os.path.join(parent, other) for other in os.listdir(parent) if other.startswith(f".{name}.{kind}-"))
