"""Recordings: what is kept, and dead branches."""

import contextlib

import numpy as np
import pytest
from budget_cases import objects

import tapegrad as tg

WHEN = ("never", "later", "always")


MANY = 1000
FEW = 200
"""Dead operations that a tape may not yet have dropped; beyond that, as many as there are live ones."""


@pytest.mark.parametrize("size", [8, 40_000])
def test_a_tape_drops_dead_branches_with_the_values_that_they_save(size):
    x = tg.asarray(np.full(size, 0.5))
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        before = m.live_bytes
        for _ in range(MANY):
            tg.softmax(x)  # its rule keeps the result
        assert m.live_bytes - before <= FEW * max(512, x.nbytes)
        y = tg.tanh(x) * x
    np.testing.assert_allclose(tape.gradient(y, x).numpy(), np.tanh(0.5) + 0.5 / np.cosh(0.5) ** 2)


def dead_beside_live_ones(x):
    return [tg.tanh(x) for _ in range(FEW)], lambda: tg.tanh(x)


def dead_after_a_dead_chain(x):
    h = x
    for _ in range(MANY):
        h = tg.tanh(h * x)
    return None, lambda: tg.tanh(x)


def dead_calls(x):
    """They are recorded as calls alone: no operation between them makes the tape look."""
    again = tg.recompute_grad(tg.sin)
    return again(x), lambda: again(x)


def dead_calls_with_rules(x):
    """No recipe says who holds the results of a call: references to their nodes do."""
    double = tg.custom_gradient(lambda q: (q * 2.0, lambda dy: dy * 2.0))
    return [double(x * float(k)) for k in range(3)], lambda: double(x)


@pytest.mark.parametrize("budget", [None, "16MiB"])
@pytest.mark.parametrize("kind", [dead_beside_live_ones, dead_after_a_dead_chain, dead_calls, dead_calls_with_rules])
def test_a_tape_holds_no_more_objects_for_more_dead_operations(kind, budget):
    x = tg.asarray(np.full(8, 0.5))
    with contextlib.nullcontext() if budget is None else tg.memory_budget(budget), tg.GradientTape() as tape:
        tape.watch(x)
        held, dead = kind(x)
        counts = []
        for _ in range(2):
            for _ in range(MANY):
                dead()
            counts.append(objects())
        del held
    assert counts[1] - counts[0] <= 8 * FEW < MANY * 2


@pytest.mark.parametrize("budget", WHEN)
def test_nothing_that_can_be_asked_for_is_dropped(budget, rng):
    """Values held as tensors, in variables, by other tapes, by later records, by pending buffers, by calls."""
    within = {when: tg.memory_budget("1GiB") if when == budget else contextlib.nullcontext() for when in WHEN}
    x = tg.asarray(rng.normal(size=40_000))
    double = tg.custom_gradient(lambda q: (q * 2.0, lambda dy: dy * 2.0))
    again = tg.recompute_grad(tg.sin)
    with within["always"], tg.GradientTape(persistent=True) as outer, tg.GradientTape(persistent=True) as tape:
        outer.watch(x)
        tape.watch(x)
        held = [tg.tanh(x * float(k)) for k in range(1, 6)]
        pending = tg.exp(tg.sin(x) * x)
        called, rerun = double(tg.cos(x)), again(x * 3.0)
        small = tg.sum(tg.softmax(x) * x)
        with within["later"]:
            for _ in range(MANY):
                tg.tanh(x[:4])
    a = x.numpy()
    for t in (tape, outer):
        for k, h in enumerate(held, 1):
            np.testing.assert_allclose(t.gradient(h, x).numpy(), k / np.cosh(k * a) ** 2, atol=1e-12)
        want = np.exp(np.sin(a) * a) * (np.cos(a) * a + np.sin(a))
        np.testing.assert_allclose(t.gradient(pending, x).numpy(), want)
        np.testing.assert_allclose(t.gradient(called, x).numpy(), -2 * np.sin(a))
        np.testing.assert_allclose(t.gradient(rerun, x).numpy(), 3 * np.cos(3 * a))
        p = np.exp(a - a.max()) / np.exp(a - a.max()).sum()
        np.testing.assert_allclose(t.gradient(small, x).numpy(), p * (1 + a - (p * a).sum()), atol=1e-12)


def test_an_operation_without_a_rule_is_an_error_when_asked():
    from tapegrad.core.primitive import REGISTRY, elementwise
    from tapegrad.errors import NoGradientError
    from tapegrad.ops.dispatch import infer_same, unary

    opaque = unary(elementwise("opaque", infer=infer_same, operands=("x",), ufunc="sinh", doc="sinh without a rule."))
    del REGISTRY["opaque"]
    x = tg.constant([1.0, 2.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = opaque(x) + x
        z = x * 2.0
    with pytest.raises(NoGradientError, match="opaque"):
        tape.gradient(y, x)
    assert tape.gradient(z, x).numpy().tolist() == [2.0, 2.0]
