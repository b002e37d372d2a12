"""Nested structures: tuples (named ones too), lists, mappings, dataclasses, and classes that are registered.

All else is a leaf, but for what is composed of parts (:class:`Composite`), which are its items.  Dicts go in the order
of sorted keys.  Of a dataclass the fields are items; one that holds text, None, a class or a function, or whose
metadata say ``static=True``, is a part of the structure.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

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


_LEAVES: set[type] = {int, float, complex, bool, str, bytes, type(None)}
"""Types of which it is known that they are leaves: they are told from containers without asking for base classes."""
_VALUES: set[type] = set()
"""Those of them that hold arrays."""


class Kind(NamedTuple):
    """Functions that flatten and rebuild containers of one type."""

    items: Callable[[Any], list[tuple[Any, Any]]]
    """Each item with its key."""
    rebuilt: Callable[[Any, list[Any]], Any]
    """A container like another one, of other items."""
    form: Callable[[Any], Any] = lambda tree: None
    """What it is besides its items."""


def is_leaf(kind: K) -> K:
    """Let it be known that values of exactly this type are leaves with an array (a class decorator)."""
    _LEAVES.add(kind)
    _VALUES.add(kind)
    return kind


def register(
    kind: K, flatten: Callable[[Any], tuple[Any, Any]] | None = None, unflatten: Callable[[Any, Any], Any] | None = None
) -> K:
    """Register a class as a structure, everywhere; returns it, so it is a decorator, too.

    flatten: of an object the items, in a list or tuple, and what else it is, which is compared by ``==``;
    unflatten: of the latter and other items an object.  Without them the attributes are the items (``vars(obj)``), and
    the object is copied.  Raises StructureError for what is a structure or a tensor already.
    """
    if not isinstance(kind, type) or kind in _LEAVES or (kind not in _registered and _kind_of(kind) is not None):
        raise StructureError(
            f"register: {kind!r} is no class of your own: tuples, lists, mappings, dataclasses and tensors are known"
        )
    if (flatten is None) != (unflatten is None):
        raise StructureError("register: give both flatten and unflatten, or neither")
    if flatten is None or unflatten is None:
        _registered[kind] = Kind(lambda tree: list(vars(tree).items()), _with_attributes)
    else:
        split, join = flatten, unflatten
        _registered[kind] = Kind(
            lambda tree: list(enumerate(split(tree)[0])),
            lambda tree, items: join(split(tree)[1], items),
            lambda tree: split(tree)[1],
        )
    _kind_of.cache_clear()
    return kind


_registered: dict[type, Kind] = {}
_STATIC = (str, bytes, type(None), type, enum.Enum, types.ModuleType)


def _with_attributes(tree: Any, items: list[Any], names: list[str] | None = None) -> Any:
    like = copy.copy(tree)
    for name, item in zip(vars(tree) if names is None else names, items):
        object.__setattr__(like, name, item)
    return like


def _fields(tree: Any, static: bool = False) -> list[tuple[Any, Any]]:
    """The fields of a dataclass that are items, or those that are not, with their values."""
    given = [(f, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
    return [(f.name, v) for f, v in given if (f.metadata.get("static", False) or _is_static(v)) == static]


def _is_static(value: Any) -> bool:
    return isinstance(value, _STATIC) or (callable(value) and type(value) not in _VALUES and _kind(value) is None)


def _pairs(tree: Any) -> list[tuple[Any, Any]]:
    return [(key, tree[key]) for key in _keys(tree)]


def _with_keys(tree: Any, items: list[Any]) -> Any:
    by_key = dict(zip(_keys(tree), items))
    if not isinstance(tree, dict):
        return type(tree)({key: by_key[key] for key in tree})
    like = {} if type(tree) is dict else copy.copy(tree)  # a subclass may hold more than its items
    like.update((key, by_key[key]) for key in tree)
    return like


_SEQUENCE = Kind(lambda tree: list(enumerate(tree)), lambda tree, items: _subclass(type(tree), items))
_NAMED = Kind(lambda tree: list(zip(tree._fields, tree)), lambda tree, items: type(tree)(*items))
_MAPPING = Kind(_pairs, _with_keys)
_DATACLASS = Kind(
    _fields,
    lambda tree, items: _with_attributes(tree, items, [name for name, _ in _fields(tree)]),
    lambda tree: tuple(_fields(tree, static=True)),
)
_COMPOSITE = Kind(
    lambda tree: list(zip(tree.fields, tree.parts())), lambda tree, items: tree.rebuilt(items), lambda tree: tree.form()
)


def _kind(tree: Any) -> Kind | None:
    """Return the functions that flatten and rebuild ``tree``; None for a leaf."""
    kind = type(tree)
    return None if kind in _LEAVES else _kind_of(kind)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _kind_of(kind: type) -> Kind | None:
    if kind in _registered:
        return _registered[kind]
    if issubclass(kind, dict):
        return _MAPPING
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _NAMED
    if issubclass(kind, (list, tuple)):
        return _SEQUENCE
    if issubclass(kind, Composite):
        return _COMPOSITE
    own = kind.__module__.partition(".")[0] == __name__.partition(".")[0] or hasattr(kind, "trainable_variables")
    if dataclasses.is_dataclass(kind) and not own:  # those of this package, and layers, are no structures
        return _DATACLASS
    return _MAPPING if issubclass(kind, Mapping) else None


def refuse_hidden(op: str, tree: Any) -> None:
    """Raise StructureError for a leaf that holds tensors in its attributes: a transform would not see them."""
    for leaf in leaves(tree):
        if type(leaf) in _LEAVES or not hasattr(type(leaf), "__dict__"):
            continue
        names = [*getattr(leaf, "__dict__", {}), *(n for c in type(leaf).__mro__ for n in vars(c).get("__slots__", ()))]
        inside = next((n for n in names if type(getattr(leaf, n, None)) in _VALUES), None)
        if inside is not None and not hasattr(type(leaf), "trainable_variables"):
            name = type(leaf).__qualname__
            raise StructureError(
                f"{op}: {name} holds a tensor as .{inside} but is no structure: make it a dataclass, or register it: "
                f"tg.tree.register({name}, flatten, unflatten)"
            )


def _is_flat(tree: Any) -> TypeGuard[tuple[Any, ...] | list[Any]]:
    """Whether all items of a plain tuple or list are known to be leaves, which is so most often."""
    kind = type(tree)
    return (kind is tuple or kind is list) and _LEAVES.issuperset(map(type, tree))


def _keys(tree: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:  # keys of several types have no order of their own
        return sorted(tree, key=lambda k: (type(k).__name__, repr(k)))


def leaves(tree: object) -> Iterator[Any]:
    """The leaves, left to right."""
    stack = [iter((tree,))]
    while stack:
        for item in stack[-1]:
            if _kind(item) is not None:
                stack.append(iter(_items(item)))
                break
            yield item
        else:
            stack.pop()


def flatten(tree: Any) -> list[Any]:
    """The leaves as a list."""
    if _is_flat(tree):
        return list(tree)
    if _kind(tree) is None:
        return [tree]
    leaves: list[Any] = []
    _gather(tree, leaves)
    return leaves


def _gather(tree: Any, leaves: list[Any]) -> None:
    for item in _items(tree):
        if _kind(item) is None:
            leaves.append(item)
        elif _is_flat(item):
            leaves += item
        else:
            _gather(item, leaves)


def _items(tree: Any) -> Any:
    kind = type(tree)
    if kind is list or kind is tuple:  # most often
        return tree
    return [item for _, item in _kind(tree).items(tree)]  # type: ignore[union-attr]


def whole(tree: Any) -> Any:
    """``tree`` with the arrays in place of the composite values for which they stand; itself if there are none."""
    if isinstance(tree, Composite):
        return tree.whole()
    if _kind(tree) is None:
        return tree
    items = [whole(item) for item in _items(tree)]
    return tree if all(a is b for a, b in zip(items, _items(tree))) else _with_items(tree, items)


def _with_items(tree: Any, items: list[Any]) -> Any:
    """A container like ``tree``."""
    return _kind(tree).rebuilt(tree, items)  # type: ignore[union-attr]


def named(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves, left to right, each with what leads to it: keys, fields, numbers, between slashes."""
    kind = _kind(tree)
    if kind is None:
        yield name, tree
        return
    for key, item in kind.items(tree):
        yield from named(item, f"{name}/{key}" if name else f"{key}")


def rebuild(tree: Any, values: Iterator[object]) -> Any:
    """The structure of ``tree`` with its leaves replaced by ``values``, in order."""
    kind = type(tree)
    if kind is tuple or kind is list:  # most often
        if _is_flat(tree):
            items = [next(values) for _ in tree]
        else:
            items = [next(values) if _kind(x) is None else rebuild(x, values) for x in tree]
        return items if kind is list else tuple(items)
    if _kind(tree) is not None:
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
        return tuple([f(x) if _kind(x) is None else map_leaves(f, x) for x in tree])
    return rebuild(tree, map(f, flatten(tree)))


def structure(tree: object) -> Any:
    """A value equal for structures that are alike, whatever their leaves; printable."""
    if _is_flat(tree):
        return type(tree), ("*",) * len(tree)
    kind = _kind(tree)
    if kind is None:
        return "*"
    if kind is _SEQUENCE or kind is _NAMED:
        return type(tree), tuple(map(structure, _items(tree)))
    if kind is _MAPPING:
        return type(tree), tuple((key, structure(item)) for key, item in kind.items(tree))
    return type(tree), kind.form(tree), tuple(map(structure, _items(tree)))


def shown(tree: object) -> str:
    """The structure as Python would write it, each leaf a ``*``: ``(*, {'a': [*]})``; a long one without its middle."""
    text = _shown(tree)
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"


def _shown(tree: object) -> str:
    kind, name = _kind(tree), type(tree).__name__
    if kind is None:
        return "*"
    if kind is _MAPPING:
        items = ", ".join(f"{key!r}: {_shown(item)}" for key, item in kind.items(tree))
        return f"{{{items}}}" if type(tree) is dict else f"{name}({{{items}}})"
    if kind is _SEQUENCE or kind is _NAMED:
        items = ", ".join(map(_shown, _items(tree)))
        if type(tree) is list:
            return f"[{items}]"
        inside = f"({items},)" if len(_items(tree)) == 1 else f"({items})"
        return inside if type(tree) is tuple else f"{name}{inside}"
    return f"{name}({', '.join(map(_shown, _items(tree)))})"


def alike(a: Any, b: Any) -> bool:
    """Whether values for the leaves of one may be given in the structure of the other: plain lists pass for tuples."""
    if _is_flat(a) and _is_flat(b):
        return len(a) == len(b)
    kind, other = _kind(a), _kind(b)
    if kind is None or other is None:
        return kind is other
    plain = {type(a), type(b)} <= {list, tuple}
    if not plain and type(a) is not type(b):
        return False
    if kind is _MAPPING and a.keys() != b.keys():
        return False
    xs, ys = _items(a), _items(b)
    same = plain or kind is _DATACLASS or kind.form(a) == kind.form(b)
    return same and len(xs) == len(ys) and all(map(alike, xs, ys))


def require_alike(op: str, what: str, given: object, whose: str, wanted: object) -> list[Any]:
    """The leaves of ``given``.  Raises StructureError, which shows both, unless it is like ``wanted``."""
    if not alike(given, wanted):
        raise StructureError(
            f"{op}: the structure of the {what} is {shown(given)}, that of the {whose} {shown(wanted)}; give the "
            f"{what} in the structure of the {whose}, each in its leaf's place"
        )
    return flatten(given)
