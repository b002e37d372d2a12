"""Nodes: recipes of values.

The one idea: a **node** is a recipe: a primitive, its inputs, its parameters.  A **buffer** is a cache of what the
recipe yields.  Losing a buffer costs time, never truth.  Fusing, freeing, checkpointing, evicting and offloading are
all answers to one question: *which values get to keep a buffer?*

Only what may still need a recipe's inputs refers to them:

* a pending (lazy, not yet evaluated) buffer refers to them as buffers, and so keeps their bytes;
* a tape's record refers to them as nodes (a few bytes each) and keeps the buffers that its rules declare;
* an evaluated value that no tape has recorded does not refer to its inputs.  So a tensor carried from step to step
  never carries its history along.

Corner cases, one answer each.  An index grows with every node, so index order is a topological order, and sorting
replaces every search.  A view is a node whose buffer owns no bytes and keeps its base's buffer.  A constant, an input
and a variable's value are leaves: nodes without a recipe.  Nothing here is ever changed after it is made.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tapegrad.core.primitive import Primitive

if TYPE_CHECKING:
    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.primitive import Site
    from tapegrad.core.rule import Params

next_index = itertools.count(1).__next__


class Node:
    """One application of a primitive: ``prim`` with ``params`` yielded a value of ``aval``.

    ``site``: of an elementwise primitive, what is known of it for operands of these avals.
    """

    __slots__ = ("aval", "index", "params", "place", "prim", "required", "site")
    place: Any
    """Where the program applied it; noted where somebody asks for source lines."""
    required: bool
    """Set where a rule reads the value, or a value computed from it in the same kernel, while somebody measures."""

    def __init__(self, prim: Primitive, params: Params, aval: ShapedArray, site: Site | None = None) -> None:
        self.prim = prim
        self.params = params
        self.aval = aval
        self.site = site
        self.index = next_index()

    def __repr__(self) -> str:
        return f"%{self.index}:{self.aval!r} = {self.prim.name}"


def _no_recipe(*avals: ShapedArray, **params: object) -> ShapedArray:
    raise TypeError("a leaf has no recipe")


class Leaf(Primitive):
    """The primitive of what no operation has made."""


LEAF = Leaf(name="leaf", operands=(), infer=_no_recipe, doc="An input, a constant, or the content of a variable.")
ARENA = Leaf(name="arena", operands=(), infer=_no_recipe, doc="The memory of a captured function, which it keeps.")
"""The only leaves; they are in no registry."""
NO_PARAMS: Params = {}


SHARED: Params = {"shared": True}
"""The parameters of a leaf in memory that others can write to."""


def leaf(aval: ShapedArray, shared: bool = False) -> Node:
    """A value without a recipe: an input, a constant, a variable's content; ``shared``: in memory of the user's."""
    return Node(LEAF, SHARED if shared else NO_PARAMS, aval)
