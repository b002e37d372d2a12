"""ForwardAccumulator: TensorFlow's behaviour, nesting, products with Hessians, adjointness with a tape."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from budget_cases import recorded
from checks import bits_equal, c64, no_garbage, same, values, var64
from inside import weak
from programs.interrupts import interrupted

import tapegrad as tg
from tapegrad import errors


def test_what_its_documentation_shows() -> None:
    x, w = c64([[2.0, 3.0], [1.0, 4.0]]), var64([[-1.5], [2.5]])
    with tg.ForwardAccumulator(primals=w, tangents=c64([[1.0], [0.0]])) as acc:
        loss = tg.sum((tg.matmul(x, w) - 1.0) ** 2)
    with tg.GradientTape() as tape:
        again = tg.sum((tg.matmul(x, w) - 1.0) ** 2)
    same(acc.jvp(loss), tape.gradient(again, w)[0, 0])


def test_products_with_the_hessian(rng: np.random.Generator) -> None:
    f = lambda q: tg.sum(tg.exp(q) * tg.sin(q)) + tg.prod(q)
    v, t = var64(rng.normal(size=3)), rng.normal(size=3)
    with tg.ForwardAccumulator(v, t) as acc, tg.GradientTape() as tape:
        y = f(v)
        g = tape.gradient(y, v)
    wanted = values(tg.hessian(f)(v)) @ t
    same([acc.jvp(g), acc.jvp(y)], [wanted, values(g) @ t], rtol=1e-10)
    with tg.GradientTape() as outer:  # reverse over forward
        with tg.ForwardAccumulator(v, t) as acc:
            y = f(v)
        same(outer.gradient(acc.jvp(y), v), wanted, rtol=1e-10)


def test_nested_accumulators_and_the_order_of_entering() -> None:
    x = c64(1.1)
    with tg.ForwardAccumulator(x, 2.0) as outer:
        with tg.ForwardAccumulator(x, 3.0) as inner:
            y = x**3.5
        second = inner.jvp(y)
    same(outer.jvp(second), 2.0 * 3.0 * 3.5 * 2.5 * 1.1**1.5)
    same([outer.jvp(y), inner.jvp(y)], [7.0 * 1.1**2.5, 10.5 * 1.1**2.5])
    assert inner.jvp(second) is None
    late = tg.ForwardAccumulator(x, 1.0)
    with tg.GradientTape() as tape:  # entered, not made, before the accumulator
        tape.watch(x)
        with late:
            y = tg.cos(x)
    same(tape.gradient(late.jvp(y), x), -np.cos(1.1))
    with late, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.cos(x)
    assert tape.gradient(late.jvp(y), x) is None


def test_it_is_entered_again_and_asked_outside() -> None:
    x = c64(-2.0)
    acc = tg.ForwardAccumulator(x, 1.5)
    same(acc.jvp(x), 1.5)
    with acc as entered:
        assert entered is acc
        y = 4.0 * x
        same(acc.jvp(y), 6.0)
        with pytest.raises(ValueError, match="recording already"), acc:
            pass
        same(acc.jvp(x * 2.0), 3.0)
    z = 4.0 * x
    assert acc.jvp(z) is None
    same(acc.jvp([z, {"a": y}], unconnected_gradients="zero"), [0.0, {"a": 6.0}])
    with acc:
        same(acc.jvp(y * y), 6.0 * -8.0 * 2.0)
    with pytest.raises(KeyError), acc:
        raise KeyError
    assert acc.jvp(4.0 * x) is None


def test_variables_keep_their_tangent_at_each_reading() -> None:
    v, w = var64([1.0, 2.0], trainable=False), var64(3.0)
    with tg.ForwardAccumulator([v, w], (np.ones(2), 0.5)) as acc:
        a = v * w
        v.assign([10.0, 20.0])
        b = v * w
    same(acc.jvp([a, b, v, w]), [[3.5, 4.0], [8.0, 13.0], [1.0, 1.0], 0.5])
    assert acc.jvp(var64(1.0)) is None
    with tg.GradientTape() as tape:  # the adjoint: a tape adds up what all readings give
        tape.watch([v, w])
        v.assign([1.0, 2.0])
        a = v * w
        v.assign([10.0, 20.0])
        b = v * w
    same(sum(values(tg.sum(g * t)) for g, t in zip(tape.gradient([a, b], [v, w]), (1.0, 0.5))), 3.5 + 4.0 + 8.0 + 13.0)


def test_a_tangent_is_a_value_of_its_own() -> None:
    x, t = c64([1.0, 2.0]), c64([3.0, 4.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(t)
        with tg.ForwardAccumulator(x, t) as acc:
            y, z = x + 1.0, x[...]
        u = acc.jvp(y) * acc.jvp(y)
        w = t * 5.0
    assert acc.jvp(y) is acc.jvp(y) and acc.jvp(x) is t
    assert tape.gradient(w, acc.jvp(y)) is None and tape.gradient(u, acc.jvp(z)) is None
    same(tape.gradient(u, [acc.jvp(y), t]), [[6.0, 8.0], [6.0, 8.0]])


def test_tangents_are_converted_and_their_absence_is_zero() -> None:
    x, y = tg.ones((2, 2)), c64([1.0, 2.0])
    with tg.ForwardAccumulator({"x": x, "y": y}, {"x": 2, "y": None}) as acc:
        a, b = x * 3.0, y * 3.0
    same(acc.jvp(a), np.full((2, 2), 6.0))
    assert acc.jvp(a).dtype == np.float32 and acc.jvp(b) is None
    empty = tg.zeros((0, 3))
    with tg.ForwardAccumulator(empty, empty) as acc:
        a = tg.sum(empty, axis=0)
    same(acc.jvp(a), np.zeros(3))
    z = tg.asarray(np.array(1.0 + 2.0j))
    with tg.ForwardAccumulator(z, 1j) as acc:
        a = z * z
    same(acc.jvp(a), 2j * (1.0 + 2.0j))


@pytest.mark.parametrize(
    ("primals", "tangents", "error", "says"),
    [
        ([c64(1.0)], [], ValueError, r"the structure of the tangents is \[\], that of the primals \[\*\]"),
        (c64([1.0, 2.0]), c64([1.0]), ValueError, r"tangent 0 has shape \(1,\), its primal \(2,\)"),
        (
            (c64(1.0), c64(1.0)),
            (1.0, tg.asarray(1.0)),
            TypeError,
            "tangent 1 is float32, its primal float64; use",
        ),
        (c64(1.0), 1j, TypeError, "tangent 0 is complex64"),
        (3.0, 1.0, TypeError, "ForwardAccumulator: float 3.0 is neither a tensor nor a variable"),
        (None, 1.0, TypeError, "NoneType"),
    ],
)
def test_arguments_that_do_not_fit(primals: Any, tangents: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as e:
        tg.ForwardAccumulator(primals, tangents)
    assert isinstance(e.value, errors.TapegradError)


def test_misuse() -> None:
    x, v = c64(1.0), var64(2.0)
    for twice in ([x, x], [v, {"a": v}]):
        with pytest.raises(ValueError, match="primal 1 is given twice; give the sum of its tangents"):
            tg.ForwardAccumulator(twice, [1.0, 1.0] if twice[1] is x else [1.0, {"a": 1.0}])
    with pytest.warns(errors.IntegerWatchWarning, match="primal 0 is int64 and has no derivative") as warned:
        acc = tg.ForwardAccumulator(tg.asarray(1), 1)
    assert warned[0].filename == __file__  # the line that made it
    assert acc.jvp(tg.asarray(1)) is None
    for wrong in (3.0, [None]):
        with pytest.raises(TypeError, match="jvp: .* is neither a tensor nor a variable"):
            acc.jvp(wrong)
    with pytest.raises(ValueError, match="unconnected_gradients is 'none' or 'zero', not 'one'"):
        acc.jvp(x, unconnected_gradients="one")
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="neither copied nor pickled"):
            way(acc)


def test_recording_belongs_to_a_thread() -> None:
    x, found = c64(2.0), []
    with tg.ForwardAccumulator(x, 1.0) as acc:
        other = threading.Thread(target=lambda: found.append(x * x))
        other.start()
        other.join()
        same(acc.jvp(x * x), 4.0)
    assert acc.jvp(found[0]) is None


def test_through_functions_with_derivatives_of_their_own() -> None:
    x, v = c64([0.5, 1.5]), var64(2.0)

    @tg.custom_gradient
    def nine(q: Any) -> Any:
        return q * 1.0, lambda dy: dy * 9.0

    checkpointed = tg.recompute_grad(lambda q: tg.tanh(q) * v)
    captured = tg.function(lambda q: tg.tanh(q) * v)
    with tg.ForwardAccumulator([x, v], [1.0, 0.5]) as acc:
        found = [nine(x), checkpointed(x), tg.stop_gradient(x), *(captured(x) for _ in range(3))]
    wanted = values(2.0 * (1.0 - tg.tanh(x) ** 2) + 0.5 * tg.tanh(x))
    same(acc.jvp(found), [[9.0, 9.0], wanted, None, wanted, wanted, wanted])

    def step(q: Any) -> Any:
        with tg.ForwardAccumulator(q, 1.0) as inside, tg.GradientTape() as tape:
            tape.watch(q)
            g = tape.gradient(tg.sum(tg.exp(q) * q), q)
        return inside.jvp(g)

    captured = tg.function(step)
    assert bits_equal([captured(x) for _ in range(3)], [step(x)] * 3) and captured.stats.replays


def test_within_a_budget(rng: np.random.Generator) -> None:
    x, v, t = c64(rng.normal(size=(60, 60))), var64(rng.normal(size=(60, 60)) / 8), rng.normal(size=(60, 60))

    def product() -> Any:
        with tg.ForwardAccumulator(v, t) as acc, tg.GradientTape() as tape:
            y = x
            for _ in range(8):
                y = tg.tanh(y @ v)
            g = tape.gradient(tg.sum(y * y), v)
        return values(acc.jvp(g))

    with tg.measure() as plain:
        wanted = product()
    with tg.memory_budget(int(0.9 * plain.peak_bytes)), tg.measure() as kept:
        found = product()
    assert bits_equal(found, wanted) and kept.peak_bytes < plain.peak_bytes


def test_values_may_become_arrays_and_nothing_is_retained() -> None:
    x = c64(np.ones((64, 64)))
    refs: list[weakref.ref] = []
    with no_garbage():
        with tg.ForwardAccumulator(x, x) as acc:
            y = x
            for _ in range(5):
                y = tg.matmul(tg.tanh(y), x)
                refs.append(weak(y))
            assert np.asarray(y).shape == (64, 64)
        assert sum(r() is not None for r in refs) == 1
        del acc, y
    assert not any(r() for r in refs)


def of_square(block: Any, x: tg.Tensor) -> Any:
    """The derivative of a value that is made in the block."""
    with block:
        if isinstance(block, tg.GradientTape):
            block.watch(x)
        y = x * x
    return values(block.jvp(y) if isinstance(block, tg.ForwardAccumulator) else block.gradient(y, x))


@pytest.mark.parametrize("make", [lambda x: tg.ForwardAccumulator(x, x), lambda x: tg.GradientTape()])
def test_a_block_that_an_interrupt_ends_at_any_moment_records_no_longer(make: Callable[[Any], Any]) -> None:
    """Nor need it be another block: entered again it records as if there had been no interrupt."""
    x, blocks, entered = c64([1.0, 2.0]), list[Any](), list[int]()
    wanted = of_square(make(x), x)

    def run() -> None:
        blocks.append(make(x))
        with blocks[-1]:
            entered.append(1)

    count = 0
    for where in interrupted(run, 100):
        count += 1
        assert not recorded(), where
        same(of_square(blocks[-1], x), wanted)
    assert 0 < len(entered) - 1 < count, "not all interrupts came before the block, nor all after it"
