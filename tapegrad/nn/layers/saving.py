"""Weights and optimizer state in safetensors files.

A variable is named by the path of attributes that leads to it (``blocks.0.attention.query_dense.kernel``), wrapped or
not, so a file does not depend on which layers are under ``recompute_grad``, nor on the order of construction.
Optimizer state is named ``optimizer/iterations`` and ``optimizer/<slot>/<path>``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tapegrad.errors import MissingSafetensorsError, SaveError, SaveFileError, SaveMissingError
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from numpy import generic
    from numpy.typing import NDArray

    from tapegrad.optim import Optimizer

    Arrays = dict[str, NDArray[generic]]

_FORMAT = "tapegrad-1"

Named = list[tuple[str, Variable]]
"""The variables of a layer with their paths."""


def save(path: str | os.PathLike[str], layer: str, variables: Named, optimizer: Optimizer | None) -> None:
    """Write the ``variables`` of ``layer``, and the state of ``optimizer`` for them, to ``path``.

    The file appears only when it is complete; a file that was there is replaced.  Hyperparameters and the state of
    random generators are not saved; ``tg.distributed.save`` takes such generators, too, and whatever else is named.

    Raises SaveError for a layer without variables or an optimizer with state for other variables than the layer's,
    SaveFileError (an OSError) where the file cannot be written, MissingSafetensorsError.
    """
    _require_safetensors()
    state = named_state(layer, variables, optimizer)
    metadata = {"format": _FORMAT}
    if optimizer is not None:
        metadata["optimizer"] = type(optimizer).__name__
    # safetensors writes the bytes as they lie in memory, so they must lie in C order.
    arrays = {name: variable.numpy().copy(order="C") for name, variable in state.items()}
    for name, array in arrays.items():
        if array.shape != state[name].shape:
            raise SaveError(
                f"save: {layer} holds a piece of {name} {state[name].shape}, the other ranks hold the rest; "
                "tg.distributed.save writes them all"
            )
    _write(os.fspath(path), arrays, metadata)


def load(path: str | os.PathLike[str], layer: str, variables: Named, optimizer: Optimizer | None) -> None:
    """Set the ``variables`` of ``layer``, and the state of ``optimizer`` if given, from a file that ``save`` wrote.

    Names, shapes and dtypes must be the same on both sides; optimizer state in the file is ignored without
    ``optimizer``.  Nothing is changed unless everything fits.

    Raises SaveError naming what does not fit, SaveFileError (an OSError) for a file that cannot be read,
    MissingSafetensorsError.
    """
    _require_safetensors()
    from safetensors import SafetensorError, safe_open

    where = possible("load", os.fspath(path))
    try:
        with open(where, "rb"):
            pass  # the system's message says why
        with safe_open(where, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise of_system("load", where, error) from error
    except SafetensorError as error:
        raise SaveError(f"load: {where} is not a complete safetensors file: {error}; save it again") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # a dtype that NumPy does not have
        raise SaveError(f"load: {where} holds something that NumPy cannot: {error}") from error
    if optimizer is None:
        arrays = {name: array for name, array in arrays.items() if not name.startswith("optimizer/")}
    else:
        _build_for(where, metadata, arrays, variables, optimizer)
    state = named_state(layer, variables, optimizer)
    wrong = list(problems(state, arrays, "the file"))
    if wrong:
        raise does_not_fit(f"load: {where}", layer, wrong)
    for name, variable in state.items():
        variable.assign(arrays[name])


def named_state(layer: str, variables: Named, optimizer: Optimizer | None) -> dict[str, Variable]:
    """Every variable to save or load, by its name in the file.

    Raises SaveError where there is none, or two of them have one name.
    """
    if not variables:
        raise no_variables(layer)
    named = list(variables)
    if optimizer is not None:
        named += [(f"optimizer/{name}", v) for name, v in state_of(optimizer, variables, layer)]
    state: dict[str, Variable] = {}
    for name, variable in named:
        if name in state:
            raise SaveError(f"{layer}: two variables have the path {name!r}; use other attribute names or dict keys")
        state[name] = variable
    return state


def state_of(optimizer: Optimizer, variables: Named, owner: str) -> Named:
    """The state of ``optimizer``, named ``iterations`` and ``<slot>/<path>``, for the ``variables`` of ``owner``.

    Raises SaveError where it has state for others.
    """
    named = list(optimizer.counters.items())
    for path, variable in variables:
        named += [(f"{slot}/{path}", v) for slot, v in optimizer.slots_of(variable).items()]
    strangers = len(optimizer.variables) - len(named)
    if strangers:
        raise SaveError(f"{optimizer} keeps {strangers} state variables for variables that are not in {owner}")
    return named


def _build_for(where: str, metadata: dict[str, str], arrays: Arrays, variables: Named, optimizer: Optimizer) -> None:
    """Make the optimizer's state for the variables that have some in the file."""
    kind = metadata.get("optimizer")
    if kind is None or "optimizer/iterations" not in arrays:
        raise SaveError(f"load: {where} holds no optimizer state; call load without the optimizer")
    if kind != type(optimizer).__name__:
        raise SaveError(f"load: {where} holds the state of {kind}, not of {type(optimizer).__name__}")
    having = {name.split("/", 2)[2] for name in arrays if name.startswith("optimizer/") and name.count("/") > 1}
    optimizer.build(variable for path, variable in variables if path in having)


def does_not_fit(where: str, what: str, problems: list[str]) -> SaveError:
    """The error for what was saved of something else; it lists ten of the problems."""
    more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
    listed = "".join(f"\n  {problem}" for problem in problems[:10])
    return SaveError(f"{where} does not fit {what}; nothing was changed:{listed}{more}")


def no_variables(layer: object) -> SaveError:
    """The error for a layer that has not been built."""
    return SaveError(f"{layer} has no variables yet: call it once on an input, or call its build(input_shape)")


def problems(state: dict[str, Variable], given: Mapping[str, Any], source: str) -> Iterator[str]:
    """Where arrays or tensors from ``source`` do not fit the variables of ``state``, one line each."""
    for name, variable in state.items():
        x = given.get(name)
        if x is None:
            yield f"{name}: missing in {source}"
        elif x.shape != variable.shape:
            yield f"{name}: wanted shape {variable.shape}, {source} has {x.shape}"
        elif x.dtype != variable.dtype:
            yield f"{name}: wanted dtype {variable.dtype}, {source} has {x.dtype}"
    for name in given:
        if name not in state:
            yield f"{name}: in {source} only"


def _write(path: str, arrays: Arrays, metadata: dict[str, str]) -> None:
    """The whole file or nothing: written beside ``path``, and renamed when it is on the disk.  Links are followed."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    target = os.path.realpath(possible("save", path))
    partial = f"{target}.{os.getpid()}.partial"
    try:
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if os.path.exists(target) and not os.path.isfile(target):
            raise SaveFileError(f"save: {path} is a device or pipe, which a file would replace; give another path")
        with open(partial, "wb"):
            pass  # the system's message says why
        save_file(arrays, partial, metadata=metadata)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except SaveError:
        raise
    except OSError as error:
        raise of_system("save", path, error) from error
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number:
            cause = OSError(int(number[1]), os.strerror(int(number[1])))
            raise of_system("save", path, cause) from error
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays.values()}))
        raise SaveError(
            f"save: {path}: {error}; the variables are {dtypes}: convert them, or pickle the layer"
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays.values()}))
        raise SaveError(f"save: {path}: safetensors cannot hold variables of {dtypes} ({error})") from error
    finally:
        with suppress(OSError):  # the first error says more
            os.unlink(partial)


_WHAT_TO_DO = {
    errno.EISDIR: "give the name of a file in it",
    errno.ENOTDIR: "a part of the path is a file, not a folder; give another path",
    errno.EACCES: "get the permission, or give another path",
    errno.EPERM: "get the permission, or give another path",
    errno.EROFS: "give a path on a disk that can be written to",
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EDQUOT: "free some space, or give a path on another disk",
    errno.ENAMETOOLONG: "give a shorter name",
}


def possible(op: str, path: str) -> str:
    """``path``, if that can be a path.  Raises SaveError."""
    if not path or "\0" in path:
        raise SaveError(f"{op}: {path!r} cannot be the name of a file; give another path")
    return path


def of_system(op: str, path: str, error: OSError) -> SaveFileError:
    """The error for a file that the system cannot write or read."""
    folder = os.path.dirname(path) or "."
    what = _WHAT_TO_DO.get(error.errno or 0, "")
    if isinstance(error, FileNotFoundError):
        what = "there is no such file" if os.path.isdir(folder) else f"make the folder {folder} first"
    kind = SaveMissingError if isinstance(error, FileNotFoundError) else SaveFileError
    told = kind(f"{op}: {path}: {error.strerror or error}" + (f"; {what}" if what else ""))
    told.errno = error.errno
    return told


def _require_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise MissingSafetensorsError("saving needs safetensors: pip install 'tapegrad[io]'") from error
