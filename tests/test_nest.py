"""Nested structures."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest

from tapegrad import nest
from tapegrad.errors import StructureError

Pair = namedtuple("Pair", "left right")


class Strict(tuple):
    """A tuple whose constructor takes no iterable."""

    def __new__(cls, *, items: tuple = ()) -> Any:
        return super().__new__(cls, items)


class Names(list):
    """A list of its own."""


TREES = [
    (3, [3]),
    (None, [None]),
    ([], []),
    ({}, []),
    ((1, [2, (3,)], {"a": 4}), [1, 2, 3, 4]),
    ({"b": 1, "a": [2, 3]}, [2, 3, 1]),
    ({2: "x", "k": "y", (1,): "z"}, ["x", "y", "z"]),
    (Pair(1, [Pair(2, 3)]), [1, 2, 3]),
    (OrderedDict(b=1, a=2), [2, 1]),
    (defaultdict(list, {"a": [1]}), [1]),
    (Names([1, (2,)]), [1, 2]),
    ("text", ["text"]),
    ({1, 2}, [{1, 2}]),
]


@pytest.mark.parametrize(("tree", "leaves"), TREES, ids=str)
def test_flatten_and_rebuild(tree: Any, leaves: list) -> None:
    assert sorted(map(str, nest.flatten(tree))) == sorted(map(str, leaves))
    if not isinstance(tree, dict) or 2 not in tree:
        assert nest.flatten(tree) == leaves
    again = nest.rebuild(tree, iter(nest.flatten(tree)))
    assert again == tree and nest.structure(again) == nest.structure(tree)
    assert type(again) is type(tree) and (not isinstance(tree, dict) or list(again) == list(tree))
    marked = nest.map_leaves(lambda x: [x], tree)
    assert nest.flatten(marked) == nest.flatten(tree)


def test_containers_are_new_and_dicts_keep_their_order() -> None:
    inner = [1]
    tree = {"b": inner, "a": (inner,)}
    copy = nest.map_leaves(lambda x: x, tree)
    inner.append(2)
    assert copy == {"b": [1], "a": ([1],)} and list(copy) == ["b", "a"]
    assert nest.rebuild({"b": 0, "a": 0}, iter("xy")) == {"a": "x", "b": "y"}


def test_a_sequence_that_cannot_be_made_again_becomes_a_plain_one() -> None:
    again = nest.rebuild(Strict(items=(1, 2)), iter("xy"))
    assert again == ("x", "y") and isinstance(again, tuple)


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ((1, 2), (3, object()), True),
        ((1, 2), [1, 2], False),
        ({"a": 1}, {"a": [1]}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1, "b": 2}, {"b": 0, "a": 0}, True),
        (Pair(1, 2), (1, 2), False),
        ([], (), False),
        ([[]], [], False),
        (None, 1, True),
    ],
)
def test_structure(a: Any, b: Any, alike: bool) -> None:
    assert (nest.structure(a) == nest.structure(b)) is alike


@pytest.mark.parametrize(
    ("given", "wanted", "alike"),
    [
        ((1, [2]), [0, (0,)], True), (1, (1,), False), ((1, 2), 0, False), (None, 0, True), ([], (), True),
        (((1, 2), 3), (1, (2, 3)), False), ({"a": 1, "b": 2}, {"b": 0, "a": 0}, True), ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, [1], False), ({"a": 1}, OrderedDict(a=1), False), (Pair(1, 2), (1, 2), False),
        (Pair(1, 2), Pair(3, None), True), ((1, 2), (1, 2, 3), False), (Names([1]), Names([2]), True),
    ],
)  # fmt: skip
def test_what_may_be_given_for_what(given: Any, wanted: Any, alike: bool) -> None:
    assert nest.alike(given, wanted) is nest.alike(wanted, given) is alike
    if alike:
        assert nest.require_alike("f", "gifts", given, "wishes", wanted) == nest.flatten(given)
        return
    with pytest.raises(StructureError) as e:
        nest.require_alike("f", "gifts", given, "wishes", wanted)
    told = f"f: the structure of the gifts is {nest.shown(given)}, that of the wishes {nest.shown(wanted)}; give"
    assert str(e.value).startswith(told)


def test_structures_are_shown_as_python_writes_them() -> None:
    tree = ({"b": 1, "a": [2, (3,)]}, Pair(1, ()), OrderedDict(x=1), Names([1]))
    assert nest.shown(tree) == "({'a': [*, (*,)], 'b': *}, Pair(*, ()), OrderedDict({'x': *}), Names(*,))"
    assert len(nest.shown([0] * 10_000)) < 300 and nest.shown([0] * 10_000).endswith("*, *]")


def test_deep_lists_are_walked_in_order() -> None:
    tree: Any = 0
    for k in range(1, 200):
        tree = [k, tree]
    assert nest.flatten(tree) == list(range(199, -1, -1))
