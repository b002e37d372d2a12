"""Structures are the same everywhere: each kind through each transform, checkpoint, loop and captured function."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import StructureError

X = np.array([1.0, 2.0])


class Named(NamedTuple):
    a: Any
    b: Any


@dataclass
class Data:
    a: Any
    b: Any
    name: str = "data"
    f: Callable[..., Any] = np.sin
    size: int = field(default=3, metadata={"static": True})


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any
    inner: Any = None


@dataclass
class Derived(Data):
    c: Any = field(init=False, default=None)


class Registered:
    def __init__(self, a: Any, b: Any, tag: str = "kept") -> None:
        self.a, self.b, self.tag = a, b, tag


tg.tree.register(Registered, lambda r: ((r.a, r.b), r.tag), lambda tag, items: Registered(*items, tag))


@tg.tree.register
class Attributes:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Unknown:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "OrderedDict": lambda a, b: collections.OrderedDict(b=b, a=a),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=a, b=b),
    "mapping": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "named tuple": Named, "dataclass": Data, "frozen": Frozen, "derived": Derived, "registered": Registered,
    "attributes": Attributes, "nested": lambda a, b: Frozen(a, b, [None, Data(1.0, {"x": 2.0})]),
}  # fmt: skip


def parts(s: Any) -> tuple[Any, Any]:
    return (s["a"], s["b"]) if hasattr(s, "keys") else (s.a, s.b)


def total(s: Any) -> Any:
    a, b = parts(s)
    return tg.sum(a * b)


def check(s: Any, make: Callable[[Any, Any], Any], a: Any, b: Any) -> None:
    assert type(s) is type(make(a, b))
    for ours, expected in zip(parts(s), (a, b), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_through_everything(kind: str) -> None:
    make = KINDS[kind]
    x = tg.asarray(X)
    check(tg.grad(total)(make(x, x * 3)), make, 3 * X, X)
    check(tg.value_and_grad(total)(make(x, x))[1], make, X, X)
    y, pull = tg.vjp(lambda x: make(x**2, x), x)
    check(y, make, X**2, X)
    np.testing.assert_allclose(pull(make(np.ones(2), np.ones(2)))[0], 2 * X + 1)
    value, tangent = tg.jvp(
        lambda s: make(parts(s)[0] ** 2, parts(s)[1]), (make(x, x),), (make(np.ones(2), np.ones(2)),)
    )
    check(value, make, X**2, X)
    check(tangent, make, 2 * X, np.ones(2))
    check(tg.vmap(lambda x: make(x * 2, x))(np.stack([X, X])), make, np.stack([X, X]) * 2, np.stack([X, X]))
    jacobian = tg.jacobian(lambda s: parts(s)[0] * parts(s)[1])(make(x, x))
    check(jacobian, make, np.diag(X), np.diag(X))
    captured = tg.function(lambda s: make(parts(s)[0] * 2, parts(s)[1]))
    for _ in range(3):
        check(captured(make(x, x)), make, 2 * X, X)
    for wrap in (
        tg.recompute_grad(lambda s: make(parts(s)[0] * 2, parts(s)[1])),
        lambda s: tg.checkpointed_loop(lambda s: make(parts(s)[0] * 2, parts(s)[1]), s, 1),
        lambda s: tg.checkpoint_sequential([lambda s: make(parts(s)[0] * 2, parts(s)[1])], s),
    ):
        with tg.GradientTape() as tape:
            tape.watch(x)
            s = wrap(make(x, x * 3))
            loss = total(s)
        check(s, make, 2 * X, 3 * X)
        np.testing.assert_allclose(tape.gradient(loss, x), 12 * X)
    if kind == "nested":  # a tape's sources are tensors alone
        return
    with tg.GradientTape() as tape:
        sources = make(tg.asarray(X), tg.asarray(X))
        tape.watch(sources)
        y = total(sources)
    check(tape.gradient(y, sources), make, X, X)


def test_what_is_static_is_part_of_the_structure() -> None:
    gradient = tg.grad(total)(Data(tg.asarray(X), tg.asarray(X), name="mine", size=7))
    assert (gradient.name, gradient.f, gradient.size) == ("mine", np.sin, 7)
    assert tg.tree.structure(Data(1.0, 2.0)) != tg.tree.structure(Data(1.0, 2.0, name="other"))
    assert tg.grad(total)(Registered(tg.asarray(X), tg.asarray(X), "tag")).tag == "tag"
    assert tg.grad(lambda s: tg.sum(s[0]))([tg.asarray(X), None])[1] is None


@pytest.mark.parametrize("kind", [Unknown, Slots])
def test_an_object_that_hides_tensors_is_refused(kind: Any) -> None:
    x = tg.asarray(X)
    for name, run in {
        "grad": lambda: tg.grad(total)(kind(x, x)),
        "vjp": lambda: tg.vjp(lambda x: kind(x, x), x),
        "jvp": lambda: tg.jvp(lambda x: kind(x, x), (x,), (x,)),
        "vmap": lambda: tg.vmap(lambda x: kind(x, x))(np.stack([X, X])),
        "tg.function": lambda: tg.function(lambda x: kind(x, x))(x),
        "checkpointed_loop": lambda: on_a_tape(lambda x: tg.checkpointed_loop(lambda s: s, kind(x, x), 2), x),
    }.items():
        with pytest.raises(StructureError, match=rf"^{name}.*: {kind.__name__} holds a tensor as .a.*tg.tree.register"):
            run()


def on_a_tape(f: Callable[[Any], Any], x: Any) -> Any:
    with tg.GradientTape() as tape:
        tape.watch(x)
        return f(x)


def test_registering_is_refused() -> None:
    for kind in (dict, tuple, tg.Tensor, Data, 3):
        with pytest.raises(StructureError, match="register: .* is no class of your own"):
            tg.tree.register(kind)  # type: ignore[type-var]
    with pytest.raises(StructureError, match="give both"):
        tg.tree.register(Unknown, lambda u: ((u.a, u.b), None))


def test_leaves_and_maps() -> None:
    tree = {"b": [1, (2,)], "a": Frozen(3, 4, "text")}
    assert tg.tree.flatten(tree) == [3, 4, 1, 2]
    assert tg.tree.unflatten(tree, [30, 40, 10, 20]) == {"b": [10, (20,)], "a": Frozen(30, 40, "text")}
    assert tg.tree.map(lambda x, y: x - y, tree, tree) == {"b": [0, (0,)], "a": Frozen(0, 0, "text")}
    with pytest.raises(StructureError, match="3 leaves for"):
        tg.tree.unflatten(tree, [1, 2, 3])
    with pytest.raises(StructureError, match="map: "):
        tg.tree.map(lambda x, y: x, tree, {"a": 1})
