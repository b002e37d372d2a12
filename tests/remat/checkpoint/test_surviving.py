"""Values that a rerun of a checkpoint leaves behind: the right gradient, or an error with a remedy."""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import RecomputeError

WEIGHT = np.array([0.3, 0.2])
INPUT = np.array([0.5, -1.0])
REFUSED = r", (called|rerun) at \S*test_surviving\.py:\d+: .*side door.*return it from the function"


def plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def nested(f: Callable[..., Any]) -> Callable[..., Any]:
    inner = tg.recompute_grad(f)
    return tg.recompute_grad(lambda x: inner(x) * 1.0)


def inner_loop(f: Callable[..., Any]) -> Callable[..., Any]:
    return tg.recompute_grad(lambda x: tg.checkpointed_loop(f, x, 1))


def saving(f: Callable[..., Any]) -> Callable[..., Any]:
    return tg.recompute_grad(f, policy=tg.memory.policies.save_everything)


def looped(n: int) -> Callable[..., Any]:
    return lambda f: lambda x: tg.checkpointed_loop(f, x, n)


def repeated(n: int) -> Callable[..., Any]:
    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def g(x: Any) -> Any:
            for _ in range(n):
                x = f(x)
            return x

        return g

    return of


def chained(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: tg.checkpoint_sequential([f, tg.sin, tg.sin, tg.sin, tg.sin], x)


def chained_plainly(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: repeated(4)(tg.sin)(f(x))


def halves(block: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    def g(x: Any) -> Any:
        a, b = x * 1.0, x * 2.0
        for _ in range(count):
            a, b = block(a, b)
        return a + b

    return g


def reversible(f: Callable[..., Any]) -> Callable[..., Any]:
    return halves(tg.reversible(f, tg.sin))


def inverted(f: Callable[..., Any]) -> Callable[..., Any]:
    return halves(tg.reversible(f, tg.sin), 3)


def reversible_plainly(f: Callable[..., Any]) -> Callable[..., Any]:
    def block(a: Any, b: Any) -> tuple[Any, Any]:
        a = a + f(b)
        return a, b + tg.sin(a)

    return halves(block)


KINDS = {
    "recompute_grad": (tg.recompute_grad, plain),
    "nested": (nested, plain),
    "inner loop": (inner_loop, plain),
    "policy": (saving, plain),
    "loop": (looped(2), repeated(2)),
    "long loop": (looped(9), repeated(9)),
    "chain": (chained, chained_plainly),
    "reversible": (reversible, reversible_plainly),
}
kinds = pytest.mark.parametrize("kind", KINDS)
WRAPS = {kind: wrap for kind, (wrap, _) in KINDS.items()} | {"first step": looped(1), "inverted": inverted}


class Program:
    """``f`` keeps an intermediate value each time it runs."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        self.kept: list[Any] = []
        self.w, self.x = tg.Variable(WEIGHT), tg.asarray(INPUT)
        self.wrapped = wrap(self.f)

    def f(self, x: Any) -> Any:
        h = tg.exp(self.w * x)
        self.kept.append(h)
        return tg.sin(h)

    def run(self, tape: tg.GradientTape) -> Any:
        tape.watch(self.x)
        return self.wrapped(self.x)

    def gradients(self, tape: tg.GradientTape, target: Any) -> list[Any]:
        return tape.gradient(target, [self.w, self.x])


def reentered(p: Program) -> Any:
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape)
    p.gradients(tape, y)
    with tape:
        loss = tg.sum(p.kept[-1] ** 2)
    return p.gradients(tape, loss)


def as_target(p: Program) -> Any:
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape)
    p.gradients(tape, y)
    return p.gradients(tape, p.kept[-1])


def behind_a_pause(p: Program) -> Any:
    with tg.GradientTape() as outer:
        with tg.GradientTape() as tape:
            y = p.run(tape)
        outer.watch(p.x)
        with outer.stop_recording():
            g = p.gradients(tape, y)[1]
        loss = tg.sum(p.kept[-1] * g)
    return p.gradients(outer, loss)


def in_another_thread(p: Program) -> Any:
    with tg.GradientTape() as outer:
        outer.watch(p.x)
        with tg.GradientTape() as tape:
            y = p.run(tape)
        thread = threading.Thread(target=p.gradients, args=(tape, y))
        thread.start()
        thread.join()
        loss = tg.sum(p.kept[-1])
    return p.gradients(outer, loss)


@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("use", [reentered, as_target, behind_a_pause, in_another_thread])
def test_a_tape_that_did_not_record_the_rerun_refuses(kind: str, use: Callable[[Program], Any]) -> None:
    p = Program(WRAPS[kind])
    with pytest.raises(RecomputeError, match=REFUSED):
        use(p)


@pytest.mark.parametrize("kind", WRAPS)
def test_each_value_left_behind_is_refused(kind: str) -> None:
    p = Program(WRAPS[kind])
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape)
    first = len(p.kept)
    for _ in range(2):
        p.gradients(tape, y)
    assert len(p.kept) > first
    for survivor in p.kept[first:]:
        with pytest.raises(RecomputeError, match=r", rerun at .*side door"):
            p.gradients(tape, survivor)


@pytest.mark.parametrize("kind", WRAPS)
def test_as_a_source(kind: str) -> None:
    p = Program(WRAPS[kind])
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape) * 1.0
    p.gradients(tape, y)
    with pytest.raises(RecomputeError, match="a source was made inside .*return the source, too"):
        tape.gradient(y, p.kept[-1])


def while_recording(p: Program) -> Any:
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape)
        p.gradients(tape, y)
        loss = tg.sum(p.kept[-1] ** 2)
    return p.gradients(tape, loss)


def in_second_order(p: Program) -> Any:
    with tg.GradientTape() as outer:
        outer.watch(p.x)
        with tg.GradientTape() as tape:
            y = p.run(tape)
        loss = tg.sum(p.gradients(tape, y)[1] * p.kept[-1])
    return p.gradients(outer, loss)


def forward_over_reverse(p: Program) -> Any:
    def f(x: Any) -> Any:
        return tg.grad(lambda x: tg.sum(p.wrapped(x)))(x) * p.kept[-1]

    return [tg.jvp(f, (p.x,), (tg.ones(2, dtype="float64"),))[1]]


@kinds
@pytest.mark.parametrize("use", [while_recording, in_second_order, forward_over_reverse])
def test_a_tape_that_recorded_the_rerun_has_the_gradient(kind: str, use: Callable[[Program], Any]) -> None:
    wrap, bare = KINDS[kind]
    for actual, expected in zip(use(Program(wrap)), use(Program(bare)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("value", ["intermediate", "state", "slice"])
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_each_value_of_each_step_of_a_loop(n: int, value: str, recording: bool) -> None:
    w, x, kept, steps = tg.Variable(WEIGHT), tg.asarray(INPUT), list[Any](), list[Any]()

    def step(into: list[Any]) -> Callable[[Any], Any]:
        def f(s: Any) -> Any:
            h = tg.exp(w * s)
            r = tg.concat([h, h])[:2]
            into.append({"intermediate": h, "state": s, "slice": r}[value])
            return r

        return f

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.checkpointed_loop(step(kept), x, n)
        if recording:
            tape.gradient(y, [x, w])
    with tg.GradientTape(persistent=True) as other:
        other.watch(x)
        repeated(n)(step(steps))(x)
    if not recording:
        tape.gradient(y, [x, w])
    expected = {np.asarray(s).tobytes(): other.gradient(s, [x, w], unconnected_gradients="zero") for s in steps}
    refused = 0
    for survivor in kept:
        try:
            actual = tape.gradient(survivor, [x, w], unconnected_gradients="zero")
        except RecomputeError as error:
            assert "side door" in str(error)
            refused += 1
        else:
            for ours, theirs in zip(actual, expected[np.asarray(survivor).tobytes()], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert len(kept) >= n and (recording or value == "state" or refused == len(kept))


@kinds
@pytest.mark.parametrize("cleared", [False, True])
def test_a_cached_constant_stays_usable(kind: str, cleared: bool) -> None:
    """One that the first run has made, or a rerun, within the function and outside."""

    def gradients(wrap: Callable[..., Any], cleared: bool) -> list[np.ndarray]:
        cache = dict[str, Any]()
        w, x = tg.Variable(WEIGHT), tg.asarray(INPUT)

        def f(x: Any) -> Any:
            if "mask" not in cache:
                cache["mask"] = tg.exp(tg.asarray(INPUT)) * 2
                cache["step"] = tg.stop_gradient(x) * 2
            return tg.sin(x * w * cache["mask"])

        f(x)  # with a policy a rerun must apply the same operations
        if kind != "policy":
            cache.clear()
        g = wrap(f)
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = g(x) * cache["mask"]
            if cleared and kind != "policy":
                cache.clear()
        first = tape.gradient(y, [x, w])
        with tape:
            loss = tg.sum(y * cache["mask"])
        return [np.asarray(g) for g in [*first, *tape.gradient(loss, [x, w])]]

    wrap, bare = KINDS[kind]
    for actual, expected in zip(gradients(wrap, cleared), gradients(bare, False), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_a_rerun_that_uses_what_another_rerun_has_left_is_refused() -> None:
    w, x, cache = tg.Variable(WEIGHT), tg.asarray(INPUT), dict[str, Any]()

    @tg.recompute_grad
    def f(x: Any) -> Any:
        if "h" not in cache:
            cache["h"] = tg.exp(x)
        return tg.sin(cache["h"]) * w

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
    cache.clear()
    tape.gradient(y, x)
    with pytest.raises(RecomputeError, match="other watched tensors"):
        tape.gradient(y, x)


@pytest.mark.parametrize("kind", ["recompute_grad", "nested", "long loop", "reversible"])
def test_a_value_that_leaves_a_rerun_by_an_exception_is_refused(kind: str) -> None:
    p, armed = Program(plain), threading.Event()

    def f(x: Any) -> Any:
        h = tg.exp(p.w * x)
        if armed.is_set():
            raise ArithmeticError(h)
        return tg.sin(h)

    p.wrapped = KINDS[kind][0](f)
    with tg.GradientTape(persistent=True) as tape:
        y = p.run(tape)
        armed.set()
        with tape.stop_recording(), pytest.raises(ArithmeticError) as error:
            p.gradients(tape, y)
        loss = tg.sum(error.value.args[0])
    with pytest.raises(RecomputeError, match=REFUSED):
        p.gradients(tape, loss)


@kinds
def test_nothing_is_retained(kind: str) -> None:
    w = tg.Variable(np.full(10_000, 0.1))
    kept: list[Any] = []

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        kept.append(h)
        return tg.sin(h)

    with tg.measure() as m:
        x = tg.asarray(np.ones(10_000))
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = KINDS[kind][0](f)(x)
        tape.gradient(y, x)
        kept.clear()
        gc.collect()
        base = m.live_bytes
        for _ in range(3):
            tape.gradient(y, x)
            survivor = weakref.ref(kept[-1])
            kept.clear()
            gc.collect()
            assert survivor() is None and m.live_bytes == base


# Other ways out -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    value: Any = None


class Mark:
    """A key of a dictionary of weak references."""


def by_nonlocal(w: Any) -> Any:
    value = None

    def f(x: Any) -> Any:
        nonlocal value
        value = tg.exp(w * x)
        return tg.sin(value)

    return f, lambda: value


def by_default(w: Any) -> Any:
    def f(x: Any, cache: Any = {}) -> Any:  # noqa: B006
        cache["h"] = tg.exp(w * x)
        return tg.sin(cache["h"])

    return f, lambda: f.__defaults__[0]["h"]  # type: ignore[index]


def by_dataclass(w: Any) -> Any:
    state = State()

    def f(x: Any) -> Any:
        state.value = tg.exp(w * x)
        return tg.sin(state.value)

    return f, lambda: state.value


def by_exception(w: Any) -> Any:
    caught: list[Any] = []

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        try:
            raise ValueError(h)
        except ValueError as error:
            caught.append(error)
        return tg.sin(h)

    return f, lambda: caught[-1].args[0]


def by_generator(w: Any) -> Any:
    generators: list[Any] = []

    def values(x: Any) -> Any:
        h = tg.exp(w * x)
        yield tg.sin(h)
        yield h

    def f(x: Any) -> Any:
        generators.append(values(x))
        return next(generators[-1])

    return f, lambda: next(generators[-1])


def by_closure(w: Any) -> Any:
    thunks: list[Any] = []

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        thunks.append(lambda: h * 2)
        return tg.sin(h)

    return f, lambda: thunks[-1]()


def by_context(w: Any) -> Any:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")

    def f(x: Any) -> Any:
        variable.set(tg.exp(w * x))
        return tg.sin(variable.get())

    return f, variable.get


def by_weak_key(w: Any) -> Any:
    values: weakref.WeakKeyDictionary[Mark, Any] = weakref.WeakKeyDictionary()
    marks: list[Mark] = []

    def f(x: Any) -> Any:
        marks.append(Mark())
        values[marks[-1]] = tg.exp(w * x)
        return tg.sin(values[marks[-1]])

    return f, lambda: values[marks[-1]]


def by_thread(w: Any) -> Any:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        thread = threading.Thread(target=kept.append, args=(h,))
        thread.start()
        thread.join()
        return tg.sin(h)

    return f, lambda: kept[-1]


def by_view(w: Any) -> Any:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        kept.append(h[::-1])
        return tg.sin(h)

    return f, lambda: kept[-1]


def by_custom_gradient(w: Any) -> Any:
    kept: list[Any] = []

    @tg.custom_gradient
    def square(h: Any) -> Any:
        kept.append(h * h)
        return kept[-1], lambda ct: 2 * ct * h

    return lambda x: tg.sin(square(tg.exp(w * x))), lambda: kept[-1]


def by_inner_tape(w: Any) -> Any:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(w * x)
        kept.append(tape.gradient(y, x))
        return tg.sin(kept[-1])

    return f, lambda: kept[-1]


def by_variable(w: Any) -> Any:
    state, kept = tg.Variable(np.zeros(2)), list[Any]()

    def f(x: Any) -> Any:
        state.assign(tg.exp(w * x))
        kept.append(state * 1)
        return tg.sin(kept[-1])

    return f, lambda: kept[-1]


def by_result(w: Any) -> Any:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        kept.append(tg.exp(w * x))
        return kept[-1]

    return f, lambda: kept[-1]


WAYS = [
    by_nonlocal, by_default, by_dataclass, by_exception, by_generator, by_closure, by_context, by_weak_key, by_thread,
    by_view, by_custom_gradient, by_inner_tape, by_variable, by_result,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["recompute_grad", "nested", "long loop", "reversible"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_out_of_a_rerun(way: Callable[[Any], Any], kind: str) -> None:
    def gradients(wrap: Callable[..., Any], recording: bool) -> Any:
        w, x = tg.Variable(WEIGHT), tg.asarray(INPUT)
        f, last = way(w)
        g = wrap(f)
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = g(x)
            if recording:
                tape.gradient(y, [w, x])
            else:
                with tape.stop_recording():
                    tape.gradient(y, [w, x])
            loss = tg.sum(last())
        return tape.gradient(loss, [w, x], unconnected_gradients="zero")

    wrap, bare = KINDS[kind]
    with pytest.raises(RecomputeError, match=REFUSED):
        gradients(wrap, recording=False)
    for actual, expected in zip(gradients(wrap, recording=True), gradients(bare, recording=True), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
