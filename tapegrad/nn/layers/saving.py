"""Weights and optimizer state in safetensors files.

A variable is named by the path of attributes that leads to it (``blocks.0.attention.query_dense.kernel``), wrapped or
not, so a file does not depend on which layers are under ``recompute_grad``, nor on the order of construction.
Optimizer state is named ``optimizer/iterations`` and ``optimizer/<slot>/<path>``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tapegrad.errors import SaveError
from tapegrad.saving import files
from tapegrad.saving.disk import real_path, replaced, system_errors
from tapegrad.saving.entries import of_variable, problems, require_fit
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.optim import Optimizer

Named = list[tuple[str, Variable]]
"""The variables of a layer with their paths."""


def save(path: str | os.PathLike[str], layer: str, variables: Named, optimizer: Optimizer | None) -> None:
    """Write the ``variables`` of ``layer``, and the state of ``optimizer`` for them, to ``path``.

    The file appears only when it is complete; a file that was there is replaced.  Hyperparameters and the state of
    random generators are not saved; ``tg.distributed.save`` takes such generators, too, and whatever else is named.

    Raises SaveError for a layer without variables, a dtype that no file can hold, or an optimizer with state for other
    variables than the layer's; SaveFileError (an OSError) where the file cannot be written.
    """
    path = os.fspath(path)
    metadata = {"format": "tapegrad-1"}
    if optimizer is not None:
        metadata["optimizer"] = type(optimizer).__name__
    state = named_state(layer, variables, optimizer)
    for name, v in state.items():
        if getattr(v, "held", v.shape) != v.shape:
            raise SaveError(
                f"save: {layer} holds a piece of {name} {v.shape}, the other ranks hold the rest; "
                "tg.distributed.save writes them all"
            )
    arrays = {name: of_variable(v) for name, v in state.items()}
    with system_errors("save", path), replaced(path) as staged:
        for _ in files.write(staged, arrays, metadata, lambda nbytes: None):
            pass


def load(path: str | os.PathLike[str], layer: str, variables: Named, optimizer: Optimizer | None) -> None:
    """Set the ``variables`` of ``layer``, and the state of ``optimizer`` if given, from a file that ``save`` wrote.

    Names, shapes and dtypes must be the same on both sides; optimizer state in the file is ignored without
    ``optimizer``.  Nothing is changed unless everything fits.

    Raises SaveError naming what does not fit, SaveFileError (an OSError) for a file that cannot be read.
    """
    path = os.fspath(path)
    with system_errors("load", path):
        index, metadata = files.index_of(real_path("load", path))
    saved, new = index.entries, []
    state_names = [name.removeprefix("optimizer/") for name in saved if name.startswith("optimizer/")]
    if optimizer is None:
        saved = {name: array for name, array in saved.items() if not name.startswith("optimizer/")}
    else:
        kind = metadata.get("optimizer")
        if kind is None or "iterations" not in state_names:
            raise SaveError(f"load: {path} holds no optimizer state; call load without the optimizer")
        if kind != type(optimizer).__name__:
            raise SaveError(f"load: {path} holds the state of {kind}, not of {type(optimizer).__name__}")
        new = build_state(optimizer, variables, state_names)
    try:
        state = {name: of_variable(v) for name, v in named_state(layer, variables, optimizer).items()}
        require_fit(f"load: {path}", layer, problems(state, saved, "the file"))
        reader = files.Reader(index)
        arrays = {name: reader.read(name, *entry.slice) for name, entry in state.items()}
    except BaseException:
        if optimizer is not None:
            optimizer.forget(new)
        raise
    for name, entry in state.items():
        entry.put(arrays.pop(name))


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


def build_state(optimizer: Optimizer, variables: Named, names: Iterable[str]) -> list[Variable]:
    """Make the optimizer's state for the variables of which ``names`` has some; the variables that had none before."""
    having = {name.partition("/")[2] for name in names}
    new = [v for path, v in variables if path in having and not optimizer.slots_of(v)]
    optimizer.build(new)
    return new


def no_variables(layer: object) -> SaveError:
    """The error for a layer that has not been built."""
    return SaveError(f"{layer} has no variables yet: call it once on an input, or call its build(input_shape)")
