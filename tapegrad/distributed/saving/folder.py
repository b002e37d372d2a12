"""A folder that appears when it is complete, and is never replaced by less than a complete one.

Everything is written into ``.NAME.tmp-...`` beside ``NAME`` and renamed when it is on the disk.  A folder that was
there before steps aside under the name ``.NAME.old-...`` first.  A process that is killed between these two renames
leaves the old folder under that name: ``find`` reads it there, and the next ``begin`` puts it back.  Hidden folders of
processes that were killed are removed by the next ``begin``.

Only rank 0 calls these functions: the view that other machines have of a shared disk may be late.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress

from tapegrad.distributed.saving import index
from tapegrad.distributed.saving.shards import sync
from tapegrad.errors import SaveError, SaveExistsError, SaveFileError, SaveMissingError
from tapegrad.nn.layers.saving import possible


def begin(target: str, overwrite: bool) -> str:
    """Make the hidden folder to write into; its path.

    Raises OSError, SaveExistsError if ``target`` exists and may not be replaced, SaveError if it can be no path.
    """
    real = os.path.realpath(possible("save", target))
    if _is_free(real) and (old := _left(real, "old")):
        os.rename(old[-1], real)
    _require_replaceable(target, real, overwrite)
    for path in _left(real, "old"):
        os.rename(path, _hidden(real, "tmp"))  # so nobody takes what is left of it for an old folder
    for path in _left(real, "tmp"):
        shutil.rmtree(path)
    made = _hidden(real, "tmp")
    os.mkdir(made)
    return made


def commit(made: str, target: str, text: str, sizes: dict[str, int]) -> None:
    """Write the index and give the folder its name.  Nothing has changed if this raises OSError.

    ``sizes``: of the files that must be there.
    """
    real = os.path.realpath(target)
    for written, nbytes in sizes.items():
        path = os.path.join(made, written)
        if not os.path.exists(path) or os.path.getsize(path) != nbytes:
            raise SaveFileError(
                f"save: rank 0 does not see all of {path}, which was written: all ranks must save to one disk that "
                "they share, and no two jobs to one folder"
            )
    with open(os.path.join(made, index.NAME), "x", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    _sync_names(made)
    renames = [(made, real)]
    if not _is_free(real):
        renames.insert(0, (real, _hidden(real, "old")))
    done: list[tuple[str, str]] = []
    try:
        for old, new in renames:
            os.rename(old, new)
            done.append((old, new))
        _sync_names(os.path.dirname(real))
    except BaseException:
        for old, new in reversed(done):
            os.rename(new, old)
        raise
    if len(renames) > 1:
        garbage = _hidden(real, "tmp")
        with suppress(OSError):  # the next begin removes it
            os.rename(renames[0][1], garbage)
            shutil.rmtree(garbage)


def discard(made: str) -> None:
    """Remove the hidden folder, if that is possible."""
    shutil.rmtree(made, ignore_errors=True)


def find(target: str) -> tuple[str, bytes]:
    """The folder to read, and the text of its index.  Raises OSError, SaveMissingError, SaveError."""
    real = os.path.realpath(possible("load", target))
    if _is_free(real) and os.path.isdir(os.path.dirname(real)) and (old := _left(real, "old")):
        real = old[-1]
    if not os.path.lexists(real):
        raise _numbered(SaveMissingError, errno.ENOENT, f"load: {target}: there is no such folder")
    if not os.path.isdir(real):
        raise SaveError(f"load: {target} is a file; what Layer.save has written, Layer.load reads")
    path = os.path.join(real, index.NAME)
    if not os.path.exists(path):
        text = f"load: {target} has no {index.NAME}: it is not a folder that tg.distributed.save wrote"
        raise _numbered(SaveMissingError, errno.ENOENT, text)
    with open(path, "rb") as file:
        return real, file.read()


def _require_replaceable(target: str, real: str, overwrite: bool) -> None:
    if _is_free(real):
        return
    inside = os.listdir(real) if os.path.isdir(real) else []
    strangers = sorted(name for name in inside if not index.is_file_of_ours(name))
    if not overwrite:
        why = f"{target} exists; give another path, or overwrite=True"
    elif index.NAME not in inside:
        why = f"{target} is not a folder that save wrote; give another path"
    elif strangers:
        why = f"{target} holds {strangers[0]}, which would be lost; give another path"
    else:
        return
    raise _numbered(SaveExistsError, errno.EEXIST, f"save: {why}")


def _numbered(kind: type[SaveFileError], number: int, text: str) -> SaveFileError:
    error = kind(text)
    error.errno = number
    return error


def _is_free(real: str) -> bool:
    """Whether nothing of that name exists, or an empty folder."""
    return not os.path.lexists(real) or os.path.isdir(real) and not os.listdir(real)


def _hidden(real: str, kind: str) -> str:
    """A new name beside the folder."""
    parent, name = os.path.split(real)
    return os.path.join(parent, f".{name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _left(real: str, kind: str) -> list[str]:
    """Hidden folders beside the folder, which a process that was killed has left."""
    parent, name = os.path.split(real)
    return sorted(os.path.join(parent, other) for other in os.listdir(parent) if other.startswith(f".{name}.{kind}-"))


def _sync_names(folder: str) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # Windows opens no folders
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
