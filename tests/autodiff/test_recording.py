"""Recordings: what is kept, and dead branches."""

import contextlib
import weakref

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.autodiff import recording

WHEN = ("never", "later", "always")


def live(tape):
    return len(tape._records)


@pytest.mark.parametrize("size", [8, 40_000])
def test_dead_branches_are_dropped_with_what_they_keep(size):
    x = tg.asarray(np.full(size, 0.5))
    refs = []
    with tg.GradientTape() as tape:
        tape.watch(x)
        for _ in range(20 * recording._FIRST_SWEEP):
            h = tg.softmax(x)  # its rule keeps the result
            refs.append(weakref.ref(h._array))
            del h
        y = tg.tanh(x) * x
    assert live(tape) <= 2 * recording._FIRST_SWEEP
    assert sum(r() is not None for r in refs) <= 2 * recording._FIRST_SWEEP
    np.testing.assert_allclose(tape.gradient(y, x).numpy(), np.tanh(0.5) + 0.5 / np.cosh(0.5) ** 2)


def test_no_more_records_are_dead_than_alive():
    """However many are alive: the tape looks for dead ones when their number has doubled."""
    x = tg.asarray(np.full(8, 0.5))
    with tg.GradientTape() as tape:
        tape.watch(x)
        held = [tg.tanh(x) for _ in range(5 * recording._FIRST_SWEEP)]
        for _ in range(20 * recording._FIRST_SWEEP):
            tg.tanh(x)
            assert live(tape) <= 2 * len(held) + recording._FIRST_SWEEP


def test_a_dead_chain_goes_as_a_whole():
    x = tg.asarray(np.full(8, 0.5))
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(10 * recording._FIRST_SWEEP):
            h = tg.tanh(h * x)
        del h
        for _ in range(25 * recording._FIRST_SWEEP):
            tg.tanh(x)
    assert live(tape) <= 2 * recording._FIRST_SWEEP


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
            for _ in range(20 * recording._FIRST_SWEEP):
                tg.tanh(x[:4])
            tape._sweep()
            outer._sweep()
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


def test_dead_calls_of_a_function_that_runs_again_are_dropped():
    """They are recorded as calls alone: no operation between them makes the tape look."""
    again = tg.recompute_grad(tg.sin)
    x = tg.asarray(np.full(8, 0.5))
    with tg.GradientTape() as tape:
        tape.watch(x)
        held = again(x)
        for _ in range(20 * recording._FIRST_SWEEP):
            again(x)
        assert live(tape) <= 2 * recording._FIRST_SWEEP
    np.testing.assert_allclose(tape.gradient(held, x).numpy(), np.cos(0.5))


def test_dead_calls_are_dropped_within_a_budget_too():
    """No recipe says who holds the results of a call: references to their nodes do."""
    double = tg.custom_gradient(lambda q: (q * 2.0, lambda dy: dy * 2.0))
    x = tg.asarray(np.full(8, 0.5))
    with tg.memory_budget("16MiB"), tg.GradientTape() as tape:
        tape.watch(x)
        held = [double(x * float(k)) for k in range(3)]
        for _ in range(20 * recording._FIRST_SWEEP):
            double(x)
        assert live(tape) <= 2 * recording._FIRST_SWEEP
        y = held[1] + held[2]
    assert tape.gradient(y, x).numpy().tolist() == [6.0] * 8
