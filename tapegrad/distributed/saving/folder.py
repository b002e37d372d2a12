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
from tapegrad.nn.layers.saving import SaveError, SaveFileError, SaveMissingError, of_system, possible


def begin(target: str, overwrite: bool) -> str:
    """Make the hidden folder to write into; its path.

    Raises SaveError if ``target`` exists and may not be replaced, SaveFileError.
    """
    parent, name = os.path.split(os.path.realpath(possible("save", target)))
    real = os.path.join(parent, name)
    try:
        if _is_free(real) and (old := _left(parent, name, "old")):
            os.rename(old[-1], real)
        _require_replaceable(target, real, overwrite)
        for path in _left(parent, name, "old"):
            os.rename(path, _hidden(parent, name, "tmp"))  # so nobody takes what is left of it for an old folder
        for path in _left(parent, name, "tmp"):
            shutil.rmtree(path)
        made = _hidden(parent, name, "tmp")
        os.mkdir(made)
    except OSError as error:
        raise error if isinstance(error, SaveError) else of_system("save", target, error) from error
    return made


def commit(made: str, target: str, text: str, sizes: dict[str, int]) -> None:
    """Write the index and give the folder its name.  Nothing has changed if this raises SaveFileError.

    ``sizes``: of the files that must be there.
    """
    real = os.path.realpath(target)
    parent, name = os.path.split(real)
    try:
        for written, nbytes in sizes.items():
            path = os.path.join(made, written)
            if not os.path.exists(path) or os.path.getsize(path) != nbytes:
                raise SaveFileError(
                    f"save: rank 0 does not see all of {path}, which was written: all ranks must save to one disk that "
                    "they share, and no two jobs to one folder"
                )
        with open(os.path.join(made, index.NAME), "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(made)
        renames = [(made, real)]
        if not _is_free(real):
            renames.insert(0, (real, _hidden(parent, name, "old")))
        done: list[tuple[str, str]] = []
        try:
            for old, new in renames:
                os.rename(old, new)
                done.append((old, new))
            _sync(parent)
        except BaseException:
            for old, new in reversed(done):
                os.rename(new, old)
            raise
    except OSError as error:
        raise error if isinstance(error, SaveError) else of_system("save", target, error) from error
    if len(renames) > 1:
        garbage = _hidden(parent, name, "tmp")
        with suppress(OSError):  # the next begin removes it
            os.rename(renames[0][1], garbage)
            shutil.rmtree(garbage)


def discard(made: str) -> None:
    """Remove the hidden folder, if that is possible."""
    shutil.rmtree(made, ignore_errors=True)


def find(target: str) -> tuple[str, bytes]:
    """The folder to read, and the text of its index.  Raises SaveError, SaveFileError."""
    real = os.path.realpath(possible("load", target))
    parent, name = os.path.split(real)
    try:
        if _is_free(real) and os.path.isdir(parent) and (old := _left(parent, name, "old")):
            real = old[-1]
        elif not os.path.lexists(real):
            raise _missing(f"load: {target}: there is no such folder")
        elif not os.path.isdir(real):
            raise SaveError(f"load: {target} is a file; what Layer.save has written, Layer.load reads")
        path = os.path.join(real, index.NAME)
        if not os.path.exists(path):
            raise _missing(f"load: {target} has no {index.NAME}: it is not a folder that tg.distributed.save wrote")
        with open(path, "rb") as file:
            return real, file.read()
    except OSError as error:
        raise error if isinstance(error, SaveError) else of_system("load", target, error) from error


def _require_replaceable(target: str, real: str, overwrite: bool) -> None:
    if _is_free(real):
        return
    if not overwrite:
        raise _of_errno(errno.EEXIST, f"save: {target} exists; give another path, or overwrite=True")
    inside = os.listdir(real) if os.path.isdir(real) else []
    if index.NAME not in inside:
        raise _of_errno(errno.EEXIST, f"save: {target} is not a folder that save wrote; give another path")
    if strangers := sorted(name for name in inside if not index.is_file_of_ours(name)):
        raise _of_errno(errno.EEXIST, f"save: {target} holds {strangers[0]}, which would be lost; give another path")


def _is_free(real: str) -> bool:
    """Whether nothing of that name exists, or an empty folder."""
    return not os.path.lexists(real) or os.path.isdir(real) and not os.listdir(real)


def _of_errno(number: int, text: str) -> SaveFileError:
    error = (SaveMissingError if number == errno.ENOENT else SaveFileError)(text)
    error.errno = number
    return error


def _missing(text: str) -> SaveFileError:
    return _of_errno(errno.ENOENT, text)


def _hidden(parent: str, name: str, kind: str) -> str:
    return os.path.join(parent, f".{name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _left(parent: str, name: str, kind: str) -> list[str]:
    """Hidden folders beside ``name``, which a process that was killed has left."""
    beginning = f".{name}.{kind}-"
    return sorted(os.path.join(parent, other) for other in os.listdir(parent) if other.startswith(beginning))


def _sync(folder: str) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # Windows opens no folders
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
