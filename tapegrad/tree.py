"""Structures of tensors: what transforms, checkpoints, loops and captured functions take and return.

Tuples (named ones too), lists, mappings and dataclasses are structures, and classes of your own that are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tapegrad import nest
from tapegrad.errors import StructureError
from tapegrad.nest import flatten, register, structure
from tapegrad.spellings import open_to_users

__all__ = ["flatten", "map", "register", "structure", "unflatten"]


def unflatten(tree: Any, leaves: Iterable[object]) -> Any:
    """Return the structure of ``tree`` with other leaves, in order.  Raises StructureError unless they are as many."""
    given = list(leaves)
    count = len(flatten(tree))
    if len(given) != count:
        raise StructureError(f"unflatten: {len(given)} leaves for {nest.shown(tree)}, which has {count}")
    return nest.rebuild(tree, iter(given))


def map(f: Callable[..., object], tree: Any, *trees: Any) -> Any:
    """Return ``tree`` with ``f`` applied to each leaf, and to those of ``trees`` in its place.

    Raises StructureError for trees of another structure.
    """
    others = [nest.require_alike("map", "others", other, "first", tree) for other in trees]
    return nest.rebuild(tree, iter([f(*leaves) for leaves in zip(flatten(tree), *others, strict=True)]))


open_to_users(globals(), __name__)
