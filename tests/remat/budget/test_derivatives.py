"""Derivatives of derivatives within budgets: a recomputed value has the tangent, or the batch, that it had, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from budget_cases import evict, live
from checks import bits_equal, c64, no_garbage

import tapegrad as tg
from tapegrad.errors import BudgetError

SHAPE = (32, 32)
RNG = np.random.default_rng(0)
X, V = (c64(RNG.normal(size=SHAPE)) for _ in range(2))
XS, VS = (c64(RNG.normal(size=(3, *SHAPE))) for _ in range(2))
START = RNG.normal(size=SHAPE)
W = tg.Variable(START)
FRACTIONS = (0.9, 0.6, 0.45)


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


PAIRS = [
    (step, mode)
    for i, step in enumerate(STEPS)
    for j, mode in enumerate(MODES)
    if (i + j) % 2 == 0 and (step not in NOT_BATCHED or "vmap" not in mode)
]


@pytest.mark.parametrize(("step", "mode"), PAIRS)
def test_derivatives_of_derivatives_have_the_plain_bits(step: str, mode: str) -> None:
    def f(h: Any) -> Any:
        for _ in range(3):
            h = STEPS[step](h)
        return tg.sum(h * h)

    def run() -> np.ndarray:
        W.assign(START)
        return MODES[mode](f).numpy().copy()

    required = run()
    with tg.measure() as plain:
        base = plain.live_bytes
        run()
    evicted = 0
    for fraction in FRACTIONS:
        limit = base + int(fraction * (plain.peak_bytes - base))
        try:
            with no_garbage(), tg.memory_budget(limit) as m:
                result = run()
        except BudgetError:
            assert fraction < FRACTIONS[0]
            break
        assert np.array_equal(result, required), fraction
        assert m.peak_bytes <= limit and m.live_bytes == base
        evicted += m.evictions
    assert evicted > 0


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
@pytest.mark.parametrize("watched", ["before", "inside"])
def test_a_dropped_value_comes_back_with_its_tangent(tapes: int, watched: str) -> None:
    """Whoever records besides, and whether a tape was told of a value before forward mode has pushed a tangent."""

    def slope(drops: bool, outer: Any) -> Callable[[Any], Any]:
        def of(x: Any) -> Any:
            if outer is not None:
                outer.watch(x)
            inner = [tg.GradientTape() for _ in range(tapes)]
            with inner[0], inner[-1] if tapes > 1 else tg.measure(), inner[1] if tapes > 2 else tg.measure():
                for tape in inner:
                    tape.watch(x)
                a = tg.softmax(x)
                b = tg.softmax(x * 2.0)
                c = tg.exp(tg.softmax(a * b))
                y = tg.sum(tg.sin(c))
                del a, b, c
            if drops:
                evict(4 * X.nbytes)
            return tape.gradient(y, x)

        return of

    def run(drops: bool) -> Any:
        with tg.GradientTape() as outer:
            outer.watch(X)
            return tg.jvp(slope(drops, outer if watched == "before" else None), (X,), (V,))

    required = run(False)
    with tg.memory_budget("1GiB") as m:
        assert bits_equal(run(True), required) and m.restored > 0


def test_a_tangent_that_the_user_holds_is_not_recomputed() -> None:
    """It is read where it is: no tangent of six layers runs again."""
    held = []
    with tg.ForwardAccumulator(X, V) as forward, tg.memory_budget("10MiB") as m:
        with tg.GradientTape() as tape:
            tape.watch(X)
            h = X
            for _ in range(6):
                h = tg.softmax(h)
                held.append(forward.jvp(h))
            y = tg.sum(h * h)
            del h
        evict(6 * X.nbytes)
        assert m.evictions >= 6 and tape.gradient(y, X) is not None
        assert m.restored <= m.evictions + 1 and live() > len(held) * X.nbytes
