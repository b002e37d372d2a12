"""Variables that all ranks have: found in what a program gives, and compared."""

from __future__ import annotations

from typing import Any

from tapegrad import nest
from tapegrad.distributed.group import Group
from tapegrad.errors import DistributedError
from tapegrad.variable import Variable


def all_variables(op: str, tree: Any) -> list[Variable]:
    """The variables of a nested structure of variables and layers.  Raises DistributedError naming ``op``."""
    leaves = [x for part in nest.flatten(tree) for x in getattr(part, "trainable_variables", [part])]
    for x in leaves:
        if not isinstance(x, Variable):
            raise DistributedError(f"{op}: takes variables, or layers that have some, not {type(x).__name__}")
    return leaves


def check_alike(variables: list[Variable], group: Group) -> None:
    """Raise DistributedError on every rank if these differ in number, names, shapes or dtypes."""
    told = group.exchange_objects([(v.name, v.shape, str(v.dtype)) for v in variables])
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            here = next((i for i, (a, b) in enumerate(zip(told[0], theirs, strict=False)) if a != b), None)
            counts = f"{len(told[0])} and {len(theirs)} variables"
            where = counts if here is None else f"{told[0][here]}, {theirs[here]}"
            raise DistributedError(f"ranks 0 and {rank} have different variables: {where}")
