"""Derivatives of derivatives within budgets: a value made again has the tangent, or the batch, that it had, or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, no_garbage

import tapegrad as tg
from tapegrad.autodiff.companions import Pusher
from tapegrad.autodiff.forward import Tangents
from tapegrad.core import account
from tapegrad.errors import BudgetError
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.budget.companions import companions_of, wanted
from tapegrad.memory.budget.recipes import Graph, Residuals
from tapegrad.memory.policies import RECOMPUTE

SHAPE = (32, 32)
RNG = np.random.default_rng(0)
X, V = (c64(RNG.normal(size=SHAPE)) for _ in range(2))
XS, VS = (c64(RNG.normal(size=(3, *SHAPE))) for _ in range(2))
START = RNG.normal(size=SHAPE)
W = tg.Variable(START)
FRACTIONS = (0.9, 0.75, 0.6, 0.45)


@tg.custom_gradient
def other_rule(a: Any) -> Any:
    """Its rule is not its derivative."""
    y = tg.softmax(a) * 2.0
    return y, lambda ct: ct * (3.0 + y * y)


@tg.custom_gradient
def no_rule(a: Any) -> Any:
    """It has no derivative, says its rule."""
    return tg.softmax(a) + a, lambda ct: None


def assigned(h: Any) -> Any:
    W.assign(tg.softmax(h))
    return h * W.read_value() + tg.softmax(h) * W


STEPS: dict[str, Callable] = {
    "stop_gradient": lambda h: h * tg.stop_gradient(tg.softmax(h)) + tg.softmax(h),
    "rule that is not the derivative": lambda h: other_rule(h) * tg.softmax(h) + h,
    "rule without a derivative": lambda h: no_rule(h) * h * 0.1 + tg.softmax(h),
    "assigned variable": assigned,
    "no-ops": lambda h: tg.reshape(h, SHAPE) * tg.softmax(tg.asarray(h)) + tg.exp(tg.softmax(h)),
    "checkpoint": tg.recompute_grad(lambda h: 0.1 * h * tg.stop_gradient(tg.softmax(h)) + other_rule(h)),
    "forward mode inside": lambda h: tg.jvp(lambda q: other_rule(q) * tg.softmax(q), (h,), (h * 0.5,))[1] * 0.1 + h,
}


def under_tape(f: Callable) -> Any:
    with tg.GradientTape() as tape:
        tape.watch(X)
        found = f(X)
        total = tg.sum(found * found)
    return tape.gradient(total, X)


MODES: dict[str, Callable[[Callable], Any]] = {
    "hvp": lambda f: tg.hvp(f, X, V),
    "vmap of grad": lambda f: tg.vmap(tg.grad(f))(XS),
    "vmap of hvp": lambda f: tg.vmap(lambda x, v: tg.hvp(f, x, v))(XS, VS),
    "hvp of vmap": lambda f: tg.hvp(lambda xs: tg.sum(tg.vmap(f)(xs)), XS, VS),
    "jvp of hvp": lambda f: tg.jvp(lambda x: tg.hvp(f, x, V), (X,), (V,))[1],
    "jvp of grad of grad": lambda f: tg.jvp(tg.grad(lambda x: tg.sum(tg.grad(f)(x) * V)), (X,), (V,))[1],
    "tape over hvp": lambda f: under_tape(lambda x: tg.hvp(f, x, V)),
    "tape over vmap of grad": lambda f: under_tape(lambda x: tg.vmap(tg.grad(f))(tg.stack([x, 2.0 * x]))),
    "jvp of vmap of grad": lambda f: tg.jvp(lambda x: tg.vmap(tg.grad(f))(tg.stack([x, 0.5 * x])), (X,), (V,))[1],
}
NOT_BATCHED = {"assigned variable"}  # a variable holds one value, not one of each example


@pytest.mark.parametrize(
    ("step", "mode"), [(s, m) for s in STEPS for m in MODES if s not in NOT_BATCHED or "vmap" not in m]
)
def test_derivatives_of_derivatives_have_the_plain_bits(step: str, mode: str) -> None:
    def f(h: Any) -> Any:
        for _ in range(4):
            h = STEPS[step](h)
        return tg.sum(h * h)

    def run() -> np.ndarray:
        W.assign(START)
        return MODES[mode](f).numpy().copy()

    wanted = run()
    with tg.measure() as plain:
        base = plain.live_bytes
        run()
    evicted = 0
    for fraction in FRACTIONS:
        limit = base + int(fraction * (plain.peak_bytes - base))
        try:
            with no_garbage(), tg.memory_budget(limit) as m:
                found = run()
        except BudgetError:
            assert fraction < FRACTIONS[0]
            break
        assert np.array_equal(found, wanted), fraction
        assert m.peak_bytes <= limit and m.live_bytes == base
        evicted += m.evictions
    assert evicted > 0
    assert account.current is account.NOBODY and MANAGER._present() is None


def test_a_rule_without_a_derivative_has_no_tangent_either() -> None:
    y, t = tg.jvp(no_rule, (X,), (V,))
    assert np.array_equal(t.numpy(), np.zeros(SHAPE)) and y.shape == SHAPE


def test_a_captured_tensor_is_a_constant_for_a_rule_in_forward_mode_as_in_reverse() -> None:
    def f(x: Any) -> Any:
        @tg.custom_gradient
        def scaled(a: Any) -> Any:
            return a * x, lambda ct: ct * 2.0

        return tg.sum(scaled(tg.ones(SHAPE, dtype="float64")))

    with pytest.warns(tg.errors.CapturedTensorWarning):
        assert tg.jvp(f, (X,), (V,))[1].item() == 0.0
    with pytest.warns(tg.errors.CapturedTensorWarning):
        assert not tg.grad(f)(X).numpy().any()


@pytest.mark.parametrize("tapes", [1, 2, 3])
@pytest.mark.parametrize("forward", [False, True])
def test_companions_are_remembered_whoever_records_besides(tapes: int, forward: bool) -> None:
    found: list[Any] = []

    def slope(x: Any) -> Any:
        with ExitStack() as stack:
            for tape in [tg.GradientTape() for _ in range(tapes)]:
                stack.enter_context(tape).watch(x)
            h = tg.softmax(x)
            y = tg.sum(tg.sin(h))
            graph = MANAGER._present()
            assert graph is not None
            kept = graph.recipes[h._buffer.node.index].keeping()
            assert kept is not None
            found.append((len(kept.companions or ()), type(MANAGER.keep((h._buffer,))) is Residuals))
        return tape.gradient(y, x)

    with tg.memory_budget("1GiB"):
        assert (tg.jvp(slope, (X,), (V,)) if forward else slope(X)) is not None
    assert found == [(int(forward), forward)]


@pytest.mark.parametrize("two", [False, True])
def test_what_came_back_because_another_value_is_made_from_it_gets_its_companion_when_it_is_read(two: bool) -> None:
    def slope(drops: bool) -> Callable[[Any], Any]:
        def of(x: Any) -> Any:
            with tg.GradientTape() as tape:
                tape.watch(x)
                a = tg.softmax(x)
                b = tg.softmax(x * 2.0) if two else a
                c = tg.softmax(a * b if two else a)
                y, indices = tg.sum(tg.sin(c)), [t._buffer.node.index for t in (a, b, c)]
                del a, b, c
            if drops:
                MANAGER.release(indices, (), RECOMPUTE)
            return tape.gradient(y, x)

        return of

    wanted = tg.jvp(slope(False), (X,), (V,))
    with tg.memory_budget("1GiB") as m:
        found = tg.jvp(slope(True), (X,), (V,))
        assert bits_equal(found, wanted) and m.restored > 0


def test_a_value_kept_before_its_companion_was_known_comes_back_with_it() -> None:
    """The tape outside is told of a value before forward mode inside has pushed a tangent through it."""

    def run() -> np.ndarray:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(X)

            def slope(x: Any) -> Any:
                tape.watch(x)
                h = x
                for _ in range(6):
                    h = tg.exp(tg.softmax(h))
                loss = tg.sum(h * h)
                del h
                return tape.gradient(loss, x)

            return tg.jvp(slope, (X,), (V,))[1].numpy().copy()

    wanted = run()
    with tg.measure() as plain:
        base = plain.live_bytes
        run()
    evicted = 0
    for fraction in (0.9, 0.8, 0.7):
        with tg.memory_budget(base + int(fraction * (plain.peak_bytes - base))) as m:
            assert np.array_equal(run(), wanted)
        evicted += m.evictions
    assert evicted > 0


def test_only_companions_that_are_lacking_are_made_again() -> None:
    outer, inner = Pusher(), Pusher()
    x, tangent = tg.asarray([1.0]), tg.asarray([2.0])
    inner.seed(x, tangent)
    outer.seed(tangent, tg.asarray([3.0]))
    companions = companions_of(Graph(lambda kept: {}), x._buffer, [outer, inner])
    assert list(wanted(x._buffer, companions, [outer, inner])) == []
    lacking = list(wanted(None, companions, [outer, inner]))
    assert [c.source for c in lacking] == [tangent._buffer, outer.pushed(tangent)._buffer]
    bare = tg.asarray([1.0])
    assert [c.source for c in wanted(bare._buffer, companions, [outer, inner])] == [c.source for c in lacking]
    assert list(wanted(None, None, [outer, inner])) == []


def test_a_tangent_that_the_user_holds_is_not_made_again() -> None:
    forward = Tangents()
    forward.seed(X, V)

    def work() -> tuple[int, int]:
        held = []
        with tg.GradientTape() as tape:
            tape.watch(X)
            h = X
            for _ in range(6):
                h = tg.softmax(h)
                held.append(forward.pushed(h))
            y = tg.sum(h * h)
            del h
        while MANAGER.relieve(1):
            pass
        assert len(held) == 6 and forward.pushed(tape.gradient(y, X)) is not None
        return m.evictions, m.restored

    with tg.memory_budget("10MiB") as m:
        assert forward.during(work) == (6, 6)
