"""Nested structures of tuples (named ones too), lists and dicts (in the order of sorted keys); all else is a leaf."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any


def _keys(tree: dict) -> list:
    try:
        return sorted(tree)
    except TypeError:  # keys of several types have no order of their own
        return sorted(tree, key=lambda k: (type(k).__name__, repr(k)))


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves, left to right."""
    if isinstance(tree, dict):
        for key in _keys(tree):
            yield from leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def flatten(tree: Any) -> list[Any]:
    """The leaves as a list."""
    return list(leaves(tree))


def rebuild(tree: Any, values: Iterator[Any]) -> Any:
    """The structure of ``tree`` with its leaves replaced by ``values``, in order."""
    if isinstance(tree, dict):
        found = {key: rebuild(tree[key], values) for key in _keys(tree)}
        like = {} if type(tree) is dict else copy.copy(tree)  # a subclass may hold more than its items
        like.update((key, found[key]) for key in tree)
        return like
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rebuild(item, values) for item in tree))
    if isinstance(tree, (list, tuple)):
        return _like(tree, [rebuild(item, values) for item in tree])
    return next(values)


def _like(tree: Any, items: Any) -> Any:
    kind = type(tree)
    return items if kind is list else kind(items) if kind is tuple else _subclass(kind, items)


def _subclass(kind: type, items: Any) -> Any:
    try:
        return kind(items)
    except TypeError:  # a subclass with a constructor of its own
        return tuple(items) if issubclass(kind, tuple) else items


def map_leaves(f: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``f`` applied to each leaf; containers are new."""
    return rebuild(tree, (f(leaf) for leaf in leaves(tree)))


def structure(tree: Any) -> Any:
    """A value equal for structures that are alike, whatever their leaves; printable."""
    if isinstance(tree, dict):
        return (type(tree).__name__, tuple((k, structure(tree[k])) for k in _keys(tree)))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, tuple(structure(item) for item in tree))
    return "*"
