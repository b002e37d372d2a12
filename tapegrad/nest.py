"""Nested structures of tuples (named ones too), lists and dicts (in the order of sorted keys); all else is a leaf.

But for what is composed of parts (:class:`Composite`), which are its items.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

from tapegrad.errors import StructureError

K = TypeVar("K", bound=type)


class Composite:
    """A value that consists of several, and that stands for one array."""

    __slots__ = ()
    fields: tuple[str, ...] = ()
    """Names of the parts."""

    def form(self) -> Any:
        """What it is besides its parts: equal for those whose parts may be exchanged."""

    def rebuilt(self, parts: list[Any]) -> Any:
        """The same with other parts."""

    def whole(self) -> Any:
        """The array."""

    def parts(self) -> list[Any]:
        """What it consists of."""
        return [getattr(self, name) for name in self.fields]


_CONTAINERS = dict, list, tuple, Composite
_LEAVES: set[type] = {int, float, complex, bool, str, bytes, type(None)}
"""Types of which it is known that they are leaves: they are told from containers without asking for base classes."""


def is_leaf(kind: K) -> K:
    """Let it be known that values of exactly this type are leaves (a class decorator)."""
    _LEAVES.add(kind)
    return kind


def _is_flat(tree: Any) -> TypeGuard[tuple[Any, ...] | list[Any]]:
    """Whether all items of a plain tuple or list are known to be leaves, which is so most often."""
    kind = type(tree)
    return (kind is tuple or kind is list) and _LEAVES.issuperset(map(type, tree))


def _keys(tree: dict[str, object]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:  # keys of several types have no order of their own
        return sorted(tree, key=lambda k: (type(k).__name__, repr(k)))


def leaves(tree: object) -> Iterator[Any]:
    """The leaves, left to right."""
    stack = [iter((tree,))]
    while stack:
        for item in stack[-1]:
            if isinstance(item, dict):
                stack.append(iter([item[key] for key in _keys(item)]))
                break
            if isinstance(item, (list, tuple)):
                stack.append(iter(item))
                break
            if isinstance(item, Composite):
                stack.append(iter(item.parts()))
                break
            yield item
        else:
            stack.pop()


def flatten(tree: Any) -> list[Any]:
    """The leaves as a list."""
    if _is_flat(tree):
        return list(tree)
    if not isinstance(tree, _CONTAINERS):
        return [tree]
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Any]) -> None:
    for item in _items(tree):
        if type(item) in _LEAVES or not isinstance(item, _CONTAINERS):
            found.append(item)
        elif _is_flat(item):
            found += item
        else:
            _gather(item, found)


def _items(tree: Any) -> Any:
    if isinstance(tree, dict):
        return [tree[key] for key in _keys(tree)]
    return tree.parts() if isinstance(tree, Composite) else tree


def whole(tree: Any) -> Any:
    """``tree`` with the arrays in place of the composite values for which they stand; itself if there are none."""
    if isinstance(tree, Composite):
        return tree.whole()
    if not isinstance(tree, _CONTAINERS):
        return tree
    items = [whole(item) for item in _items(tree)]
    return tree if all(a is b for a, b in zip(items, _items(tree))) else _with_items(tree, items)


def _with_items(tree: Any, items: list[Any]) -> Any:
    """A container like ``tree``, of a dict in the order of sorted keys."""
    if isinstance(tree, dict):
        found = dict(zip(_keys(tree), items))
        like = {} if type(tree) is dict else copy.copy(tree)  # a subclass may hold more than its items
        like.update((key, found[key]) for key in tree)
        return like
    if isinstance(tree, Composite):
        return tree.rebuilt(items)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*items)
    return _subclass(type(tree), items)


def named(tree: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves, left to right, each with what leads to it: keys, fields of named tuples, numbers, between slashes."""
    if isinstance(tree, dict):
        items = [(key, tree[key]) for key in _keys(tree)]
    elif isinstance(tree, (list, tuple)):
        items = list(zip(getattr(tree, "_fields", range(len(tree))), tree))
    elif isinstance(tree, Composite):
        items = list(zip(tree.fields, tree.parts()))
    else:
        yield name, tree
        return
    for key, item in items:
        yield from named(item, f"{name}/{key}" if name else f"{key}")


def rebuild(tree: object, values: Iterator[object]) -> Any:
    """The structure of ``tree`` with its leaves replaced by ``values``, in order."""
    kind = type(tree)
    if kind is tuple or kind is list:  # most often
        if _is_flat(tree):
            items = [next(values) for _ in tree]
        else:
            items = [rebuild(x, values) if isinstance(x, _CONTAINERS) else next(values) for x in tree]  # type: ignore[attr-defined]
        return items if kind is list else tuple(items)
    if isinstance(tree, _CONTAINERS):
        return _with_items(tree, [rebuild(x, values) for x in _items(tree)])
    return next(values)


def _subclass(kind: type, items: Any) -> Any:
    try:
        return kind(items)
    except TypeError:  # a subclass with a constructor of its own
        return tuple(items) if issubclass(kind, tuple) else items


def map_leaves(f: Callable[[Any], object], tree: object) -> Any:
    """``tree`` with ``f`` applied to each leaf; containers are new."""
    if type(tree) is tuple:  # most often
        if _is_flat(tree):
            return tuple(map(f, tree))
        return tuple([map_leaves(f, x) if isinstance(x, _CONTAINERS) else f(x) for x in tree])
    return rebuild(tree, map(f, flatten(tree)))


def structure(tree: object) -> Any:
    """A value equal for structures that are alike, whatever their leaves; printable."""
    if _is_flat(tree):
        return type(tree), ("*",) * len(tree)
    if not isinstance(tree, _CONTAINERS):
        return "*"
    if isinstance(tree, dict):
        return (type(tree), tuple((k, structure(tree[k])) for k in _keys(tree)))
    if isinstance(tree, Composite):
        return type(tree), tree.form(), tuple(map(structure, tree.parts()))
    return type(tree), tuple([structure(x) if isinstance(x, _CONTAINERS) else "*" for x in tree])


def shown(tree: object) -> str:
    """The structure as Python would write it, each leaf a ``*``: ``(*, {'a': [*]})``; a long one without its middle."""
    text = _shown(tree)
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"


def _shown(tree: object) -> str:
    if isinstance(tree, dict):
        items, name = ", ".join(f"{k!r}: {_shown(tree[k])}" for k in _keys(tree)), type(tree).__name__
        return f"{{{items}}}" if type(tree) is dict else f"{name}({{{items}}})"
    if isinstance(tree, (list, tuple)):
        items = ", ".join(map(_shown, tree))
        if type(tree) is list:
            return f"[{items}]"
        inside = f"({items},)" if len(tree) == 1 else f"({items})"
        return inside if type(tree) is tuple else f"{type(tree).__name__}{inside}"
    if isinstance(tree, Composite):
        return f"{type(tree).__name__}({', '.join(map(_shown, tree.parts()))})"
    return "*"


def alike(a: object, b: object) -> bool:
    """Whether values for the leaves of one may be given in the structure of the other: plain lists pass for tuples."""
    if _is_flat(a) and _is_flat(b):
        return len(a) == len(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, Composite) and isinstance(b, Composite):
        return type(a) is type(b) and a.form() == b.form() and all(map(alike, a.parts(), b.parts()))
    if not (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple))):
        return not isinstance(a, _CONTAINERS) and not isinstance(b, _CONTAINERS)
    plain = {type(a), type(b)} <= {list, tuple}
    return (plain or type(a) is type(b)) and len(a) == len(b) and all(map(alike, a, b))


def require_alike(op: str, what: str, given: object, whose: str, wanted: object) -> list[Any]:
    """The leaves of ``given``.  Raises StructureError, which shows both, unless it is like ``wanted``."""
    if not alike(given, wanted):
        raise StructureError(
            f"{op}: the structure of the {what} is {shown(given)}, that of the {whose} {shown(wanted)}; give the "
            f"{what} in the structure of the {whose}, each in its leaf's place"
        )
    return flatten(given)
