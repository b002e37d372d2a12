"""What a captured function reads from its surroundings is guarded: it is captured anew where they have changed."""

from __future__ import annotations

import functools
import gc
import re
import types
import weakref
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.autodiff.guards import Guards

X = tg.asarray(np.array([0.5, -1.0, 2.0]))
RATE = 2.0


def doubled(x: Any) -> Any:
    return x * RATE


class Model:
    gain = 3.0

    def __init__(self) -> None:
        self.weight = tg.Variable(np.array([1.0, 2.0, 3.0]))
        self.layers = [Scale(2.0), Scale(5.0)]
        self.training = True
        self.calls = 0

    @property
    def shift(self) -> float:
        return self.offset  # type: ignore[attr-defined, no-any-return]

    offset = 1.0

    def call(self, x: Any) -> Any:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x * self.weight * self.gain + self.shift if self.training else x

    @tg.function
    def step(self, x: Any) -> Any:
        return self.call(x)


class Scale:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def surroundings(what: str) -> tuple[Any, Any, str]:
    """A function, what changes its surroundings, and how ``explain`` calls that."""
    number, weights = 2.0, [tg.Variable(np.full(3, k)) for k in (1.0, 2.0, 3.0)]
    named, array, tensor, model = {"w": 2.0}, np.arange(3.0), tg.asarray(np.arange(3.0)), Model()
    module = types.ModuleType("user_configuration")
    module.RATE = 2.0  # type: ignore[attr-defined]
    k = 0

    def change(**cells: Any) -> None:
        nonlocal number, array, tensor, k
        number, array = cells.get("number", number), cells.get("array", array)
        tensor, k = cells.get("tensor", tensor), cells.get("k", k)

    def by_default(x: Any, factor: Any = 2.0, *, extra: float = 1.0) -> Any:
        return x * factor + extra

    @functools.wraps(doubled)
    def wrapped(x: Any) -> Any:
        return doubled(x) * number

    return {
        "cell": (lambda x: x * number, lambda: change(number=3.0), "closure variable number: 2.0 -> 3.0"),
        "element": (lambda x: x * weights[k], lambda: change(k=2), "closure variable k: 0 -> 2"),
        "list": (lambda x: x * weights[1], lambda: weights.__setitem__(1, weights[2]), r"weights\[1\]: variable"),
        "longer": (lambda x: x * len(weights), lambda: weights.append(weights[0]), r"len\(weights\): 3 -> 4"),
        "dict": (lambda x: x * named["w"], lambda: named.update(w=4.0), r"named\['w'\]: 2.0 -> 4.0"),
        "array": (lambda x: x * array, lambda: change(array=np.ones(3)), "closure variable array"),
        "in place": (lambda x: x * array, lambda: array.__setitem__(1, 9.0), "closure variable array"),
        "tensor": (lambda x: x * tensor, lambda: change(tensor=X), "closure variable tensor"),
        "global": (doubled, lambda: globals().update(RATE=globals()["RATE"] + 1), "global RATE"),
        "helper": (lambda x: doubled(x) + 1, lambda: globals().update(RATE=globals()["RATE"] + 1), "global RATE"),
        "decorated": (wrapped, lambda: change(number=7.0), "closure variable number"),
        "module": (lambda x: x * module.RATE, lambda: setattr(module, "RATE", 3.0), "module.RATE: 2.0 -> 3.0"),
        "default": (by_default, lambda: setattr(by_default, "__defaults__", (5.0,)), "default factor: 2.0 -> 5.0"),
        "keyword": (by_default, lambda: by_default.__kwdefaults__.update(extra=4.0), "default extra: 1.0 -> 4.0"),
        "partial": (functools.partial(lambda m, x: m.call(x), model), lambda: setattr(model, "offset", 2.0), "offset"),
        "bound method": (model.call, lambda: setattr(model, "training", False), "self.training: True -> False"),
        "slot": (model.call, lambda: setattr(model.layers[1], "factor", 6.0), "factor: 5.0 -> 6.0"),
        "object": (lambda x: model.call(x), lambda: setattr(model, "weight", tg.Variable(np.ones(3))), "weight"),
        "class": (lambda x: model.call(x), lambda: setattr(model, "gain", 4.0), "gain: 3.0 -> 4.0"),
        "property": (lambda x: model.call(x), lambda: setattr(model, "offset", 4.0), "offset: 1.0 -> 4.0"),
        "callable": (model.layers[0], lambda: setattr(model.layers[0], "factor", 7.0), "self.factor: 2.0 -> 7.0"),
    }[what]  # type: ignore[return-value]


KINDS = [
    "cell", "element", "list", "longer", "dict", "array", "in place", "tensor", "global", "helper", "decorated",
    "module", "default", "keyword", "partial", "bound method", "slot", "object", "class", "property", "callable",
]  # fmt: skip


def on_a_tape(f: Any) -> Any:
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = tg.sum(f(X) ** 2)
    return tape.gradient(y, X)


def in_a_checkpoint(f: Any) -> Any:
    return on_a_tape(tg.recompute_grad(lambda x: f(x)))


def in_a_loop(f: Any) -> Any:
    return on_a_tape(lambda x: tg.checkpointed_loop(f, x, 3))


WAYS = {"called": lambda f: f(X), "tape": on_a_tape, "checkpoint": in_a_checkpoint, "loop": in_a_loop}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", KINDS)
def test_a_change_is_followed(what: str, way: str) -> None:
    f, change, _ = surroundings(what)
    captured, run = tg.function(f), WAYS[way]
    before = run(f)
    for _ in range(3):
        np.testing.assert_array_equal(run(captured), before)
    change()
    after = run(f)
    assert not np.array_equal(before, after)
    for _ in range(3):
        np.testing.assert_array_equal(run(captured), after)


@pytest.mark.parametrize("what", KINDS)
def test_explain_names_the_guard(what: str) -> None:
    f, change, says = surroundings(what)
    captured = tg.function(f)
    for _ in range(3):
        captured(X)
    assert captured.explain(X).startswith("hit")
    change()
    assert re.search(f"miss: the surroundings have changed: .*{says}", captured.explain(X)), captured.explain(X)
    captured(X)
    assert captured.explain(X).startswith("hit")


def test_the_program_of_each_state_is_kept() -> None:
    ws = [tg.Variable(np.full(3, k)) for k in (1.0, 2.0, 3.0)]
    k = 0
    f = tg.function(lambda x: x * ws[k])
    for _ in range(4):
        for k in range(3):
            np.testing.assert_array_equal(f(X), np.asarray(X) * (k + 1.0))
    assert f.stats.traces == 3 and f.stats.replays >= 6 and not f.stats.fallbacks
    with tg.GradientTape() as tape:
        h = X
        for k in range(3):  # noqa: B007
            h = f(h)
        y = tg.sum(h)
    for g, w in zip(tape.gradient(y, ws), ws, strict=True):
        np.testing.assert_allclose(g, np.asarray(X) * 6 / np.asarray(w))


def test_methods_of_each_object() -> None:
    model, other = Model(), Model()
    for m in (model, other) * 3:
        np.testing.assert_array_equal(m.step(X), Model.call(m, X))
    model.training = False
    np.testing.assert_array_equal(model.step(X), np.asarray(X) * 10)
    np.testing.assert_array_equal(other.step(X), Model.call(other, X))
    assert "training: True -> False" not in model.step.explain(X)
    ref = weakref.ref(model)
    del model, m
    gc.collect()
    assert ref() is None


def test_what_the_function_changes_itself_is_no_guard() -> None:
    seen: list[int] = []
    count = 0

    def f(x: Any) -> Any:
        nonlocal count
        count += 1
        seen.append(count)
        return x * 2

    captured = tg.function(f)
    for _ in range(6):
        captured(X)
    assert captured.stats.traces == 1 and captured.stats.replays >= 4 and count == len(seen)


def test_assigned_variables_are_live() -> None:
    w = tg.Variable(np.ones(3))
    f = tg.function(lambda x: x * w)
    for k in range(5):
        w.assign(np.full(3, float(k)))
        np.testing.assert_array_equal(f(X), np.asarray(X) * k)
    assert f.stats.traces == 1


def test_a_number_that_always_changes_runs_eagerly_with_a_warning() -> None:
    rate = 0.0
    f = tg.function(lambda x: x * rate, max_signatures=3)
    with pytest.warns(UserWarning, match=r"more than 3 surroundings.*closure variable rate.*pass what changes"):
        for k in range(8):
            rate = 0.1 * k
            np.testing.assert_array_equal(f(X), np.asarray(X) * rate)
    assert f.stats.traces == 3 and "runs eagerly" in f.explain(X)


def test_layers_and_their_settings() -> None:
    tg.random.seed(0)
    model = tg.nn.Sequential([tg.nn.Dense(3), tg.nn.Dropout(0.5)])
    f = tg.function(lambda x: model(x, training=True))
    x = tg.ones((4, 3))
    for _ in range(4):
        f(x)
    assert f.stats.traces <= 2
    model.layers[1].rate = 0.0
    assert np.count_nonzero(f(x)) == 12


def test_nothing_is_kept_alive_by_guards() -> None:
    things = [Model()]
    guards = Guards(functools.partial(lambda get, x: get().call(x), weakref.ref(things[0])))
    guards.settle()
    assert guards.hold()
    ref = weakref.ref(things.pop())
    gc.collect()
    assert ref() is None and not guards.hold()


def test_sampled_elements_of_an_array_are_evenly_spaced() -> None:
    """Of a large array 64 elements at most are looked at; of a small one all."""
    for array, most in ((np.zeros((4, 5)), 20), (np.zeros((100, 100)), 64)):
        guards = Guards(functools.partial(np.multiply, array))
        guards.settle()
        noticed = 0
        for index in np.ndindex(array.shape):
            array[index] = 1
            noticed += not guards.hold()
            array[index] = 0
        assert 16 <= noticed <= most and guards.hold()


def test_printing_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    """A text shows the value in an eager run, and that there is none while a function is captured or mapped."""

    def f(x: Any) -> Any:
        y = tg.sum(x)
        print(y, repr(y), f"{y:.2f}")
        return y * 2

    captured = tg.function(f)
    for _ in range(4):
        assert captured(X).item() == 3.0
    assert captured.stats.traces == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.5 tapegrad.Tensor(array(1.5)) 1.50" and "<float64[], no single value here>" in lines[1]
    assert tg.vmap(f)(tg.ones((2, 3))).numpy().tolist() == [6.0, 6.0]
    assert "no single value here" in capsys.readouterr().out
