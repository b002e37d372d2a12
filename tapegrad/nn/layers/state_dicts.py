"""State as dictionaries: the values of variables by their names, taken and put back without a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tapegrad import ops
from tapegrad.core.state import unrecorded
from tapegrad.errors import NotATensorError
from tapegrad.nn.layers import saving
from tapegrad.saving.entries import problems, require_fit
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable

State: TypeAlias = dict[str, Tensor]


class Differences(NamedTuple):
    """Names that a state did not have, and names that only it has."""

    missing: list[str]
    unexpected: list[str]


def named(of: Any) -> saving.Named:
    """Variables with names: a layer's by their paths, a mapping's by its keys, other variables' by their positions.

    Raises NotATensorError for what is none of these.
    """
    if isinstance(of, Variable):
        return [("0", of)]
    if hasattr(of, "named_variables"):
        return list(of.named_variables())
    if not isinstance(of, Iterable):
        raise NotATensorError(f"wanted a layer, variables, or a mapping of these by name, got {type(of).__name__}")
    found: saving.Named = []
    for name, held in of.items() if isinstance(of, Mapping) else ((str(i), v) for i, v in enumerate(of)):
        inside = [("", held)] if isinstance(held, Variable) else named(held)
        found += [(f"{name}.{path}" if path else str(name), v) for path, v in inside]
    return found


def taken(variables: saving.Named) -> State:
    """The present values, which no later assignment changes."""
    return {name: unrecorded(v.read) for name, v in variables}


def put(what: str, variables: saving.Named, state: Mapping[str, TensorLike], strict: bool) -> Differences:
    """Give variables the values of ``state``; see :meth:`Layer.load_state_dict`."""
    wanted, given = dict(variables), {name: ops.asarray(x) for name, x in state.items()}
    found = Differences([n for n in wanted if n not in given], [n for n in given if n not in wanted])
    both = given if strict else {name: x for name, x in given.items() if name in wanted}
    required = wanted if strict else {n: wanted[n] for n in both}
    require_fit("load_state_dict: the state", what, problems(required, both, "the state"))
    for name, x in both.items():
        wanted[name].assign(x.to_device(wanted[name].device))
    return found
