"""reversible: gradients, what a tape keeps, hand-over between blocks, drift and its bound."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import Counted, bits_equal, c64, gradients, no_garbage, same, values, var64
from hypothesis import given, settings
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad import errors, nest
from tapegrad.remat.checkpoint.reversible import reversible


def plain(f: Callable, g: Callable) -> Callable:
    """The block as plain code."""

    def block(x1: Any, x2: Any) -> Any:
        y1 = x1 + f(x2)
        return y1, x2 + g(y1)

    return block


class Net:
    """A chain of blocks ``tanh(x @ w)``, and the same one in plain code."""

    def __init__(self, depth: int, dtype: Any = np.float64, gain: float = 0.5, rows: int = 3, **options: Any) -> None:
        rng = np.random.default_rng(7)
        wide = 16

        def weights() -> tg.Variable:
            return tg.Variable((rng.normal(size=(wide, wide)) * gain / wide**0.5).astype(dtype))

        self.weights = [(weights(), weights()) for _ in range(depth)]
        self.functions = [
            (Counted(lambda q, w=w: tg.tanh(q @ w)), Counted(lambda q, v=v: tg.tanh(q @ v))) for w, v in self.weights
        ]
        self.blocks = [reversible(f, g, **options) for f, g in self.functions]
        self.x = [tg.asarray(rng.normal(size=(rows, wide)).astype(dtype)) for _ in range(2)]

    def loss(self, invert: bool, together: bool = False) -> Any:
        """Forward, through a plain loop."""
        x1, x2 = self.x
        if together:
            x = tg.concat(self.x, axis=-1)
            for block in self.blocks:
                x = block(x)
            return tg.sum(tg.sin(x) * x)
        for block, (f, g) in zip(self.blocks, self.functions, strict=True):
            x1, x2 = block(x1, x2) if invert else plain(f, g)(x1, x2)
        return tg.sum(tg.sin(x1) * x1) + tg.sum(tg.sin(x2) * x2)

    def gradients(self, invert: bool, **options: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(self.x)
            y = self.loss(invert, **options)
        return tape.gradient(y, [self.x, self.weights])

    def error(self) -> float:
        """The largest difference from the plain gradient, relative to the largest element of each."""
        pairs = zip(nest.leaves(self.gradients(True)), nest.leaves(self.gradients(False)), strict=True)
        return max(float(np.abs((a - b).numpy()).max() / np.abs(b.numpy()).max()) for a, b in pairs)


def by_tape(f: Callable, sources: list, **options: Any) -> Any:
    with tg.GradientTape() as tape:
        tape.watch([s for s in sources if isinstance(s, tg.Tensor) and s.dtype.kind in "fc"])
        y = f()
    return values(y), values(tape.gradient(y, sources, **options))


def agrees(f: Callable, sources: list, rtol: float = 1e-11) -> None:
    """``f(reversible)`` has the values and gradients of ``f(plain)``."""
    (y, grads), (z, wanted) = by_tape(lambda: f(reversible), sources), by_tape(lambda: f(plain), sources)
    same(y, z, rtol=0)
    same(grads, wanted, rtol=rtol, atol=1e-12)


# Gradients


@pytest.mark.parametrize("rows", [3, 2000])  # run at once, and lazily
def test_a_chain_in_both_forms(rows: int) -> None:
    net = Net(6, rows=rows)
    wanted = values(net.gradients(False))
    for f, g in net.functions:
        f.take(), g.take()
    for together in (False, True):
        same(net.gradients(True, together=together), wanted, rtol=1e-10, atol=1e-10)
        assert [(f.take(), g.take()) for f, g in net.functions] == [(2, 2)] * 6
    assert 0 < max(b.drift for b in net.blocks) < 1e-13


@pytest.mark.filterwarnings("ignore:gradient:tapegrad.errors.IntegerWatchWarning")  # integers are among the sources
def test_captures_variables_and_everything_twice() -> None:
    x1, x2, c, k = c64([0.5, 1.0]), c64([0.2, -0.7]), c64([2.0, 3.0]), tg.asarray([1, 2])
    v, frozen = var64([0.3, 0.4]), var64([0.1, 0.2], trainable=False)

    def f(q: Any) -> Any:
        return tg.tanh(q * v) * c + frozen * k

    sources = [x1, x2, c, v, k]
    agrees(lambda make: make(f, tg.sin)(x1 * v, x2), sources)
    agrees(lambda make: make(f, f)(x1, x1), sources)  # the same tensor twice
    agrees(lambda make: make(lambda q: q, lambda q: x1 * q)(x1, x2), sources)  # the identity; an input captured
    agrees(lambda make: make(lambda q: c, lambda q: v.read())(x1, x2), sources)  # independent of their argument
    agrees(lambda make: make(lambda q: tg.stop_gradient(q), f)(x1, x2), sources)
    agrees(lambda make: make(f, f)(v, x2), sources)
    stopped = by_tape(lambda: reversible(lambda q: q * tg.astype(c > 0.0, "float64"), tg.sin)(x1, x2), [c])
    same(stopped[1], [[0.0, 0.0]])  # used, so connected, as with recompute_grad
    agrees(lambda make: make(f, tg.sin)(x1, x2)[0], sources)  # one output unused: no cotangent comes for it
    agrees(lambda make: make(f, tg.sin)(x1, x2)[1], sources)
    agrees(lambda make: make(f, f)(c64([1.0, 1.0]), c64([1.0, 1.0])), sources)  # only variables are watched
    agrees(lambda make: make(tg.sin, tg.cos)(c64([1.0, 1.0]), c64([1.0, 1.0])), sources)  # nothing is


def test_other_dtypes() -> None:
    for dtype, rtol in (("float16", 2e-2), ("float32", 1e-5), ("complex128", 1e-11)):
        x1, x2 = (tg.asarray(np.asarray(v, dtype)) for v in ([0.5, 1.0], [0.25, -0.5]))
        agrees(lambda make: make(lambda q: q * q, lambda q: q * q * 0.5)(x1, x2), [x1, x2], rtol)  # noqa: B023


def test_the_axis_of_one_tensor() -> None:
    x = c64(np.random.default_rng(0).normal(size=(4, 2, 3)))
    for axis in (0, 1, -2):
        y, (g,) = by_tape(lambda: reversible(tg.sin, tg.cos, axis=axis)(x), [x])  # noqa: B023
        a, b = np.split(x.numpy(), 2, axis)
        c = a + np.sin(b)
        same(y, np.concatenate([c, b + np.cos(c)], axis))
        same(g, np.concatenate([1 - np.sin(c), 1 + (1 - np.sin(c)) * np.cos(b)], axis))


def test_random_numbers_repeat_and_state_changes_once() -> None:
    x1, x2, count, told = c64(np.ones(5)), c64(np.ones(5)), tg.Variable(0), []

    def f(q: Any, is_recomputing: bool = False) -> Any:
        told.append(is_recomputing)
        count.assign_add(1)
        return q * tg.random.uniform(q.shape, dtype="float64") * np.random.rand(5) * random.random()

    def run(make: Callable) -> Any:
        tg.random.seed(1)
        np.random.seed(1)
        random.seed(1)
        found = make(f, f)(*make(f, f)(x1, x2))
        return [*found, tg.random.uniform((), dtype="float64"), np.random.rand()]

    wanted = by_tape(lambda: run(plain)[:2], [x1, x2])
    told.clear()
    with tg.GradientTape() as tape:
        tape.watch([x1, x2])
        found = run(reversible)
    state = random.getstate()
    same(tape.gradient(found[:2], [x1, x2]), wanted[1])
    assert told == [False] * 4 + [True] * 4 and int(count) == 8 and random.getstate() == state


def test_layers_nested_blocks_and_checkpoints() -> None:
    dense = tg.nn.Dense(2, activation="tanh", dtype="float64")
    x1, x2 = c64([[0.5, 1.0]]), c64([[0.2, -0.7]])
    dense(x1)
    sources = [x1, x2, *dense.variables]
    agrees(lambda make: make(dense, lambda q: make(tg.sin, tg.cos)(q, q)[1])(*make(dense, tg.sin)(x1, x2)), sources)
    agrees(lambda make: make(tg.recompute_grad(dense), dense)(*make(dense, tg.sin)(x1, x2)), sources)

    def segment(make: Callable) -> Any:
        def run(a: Any, b: Any) -> Any:
            for _ in range(3):
                a, b = make(dense, tg.sin)(a, b)
            return a, b

        return make(dense, dense)(*tg.recompute_grad(run)(*make(dense, tg.sin)(x1, x2)))

    agrees(segment, sources)


# Hand-over


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=60, deadline=None, database=None)
def test_any_program_of_blocks(seed: int, persistent: bool) -> None:
    """Blocks read any earlier values, in any order, again and again; some values stay in the user's hands."""
    w = var64(0.7)
    x = [c64([0.3, 0.5]), c64([-0.2, 0.9])]

    def run(make: Callable) -> Any:
        rng = random.Random(seed)
        with tg.GradientTape(persistent=persistent) as tape:
            tape.watch(x)
            pool = list(x)
            for _ in range(rng.randrange(1, 8)):
                recent = pool[-3:] if rng.random() < 0.7 else pool
                pool += make(lambda q: tg.sin(q * w), lambda q: tg.cos(q) * w)(rng.choice(recent), rng.choice(recent))
            losses = [tg.sum(tg.exp(v * 0.1)) for v in rng.sample(pool, rng.randrange(1, 4))]
            held = rng.sample(pool, 1) if rng.random() < 0.3 else []
            del pool
        found = []
        for loss in losses if persistent else [losses]:
            found.append(values(tape.gradient(loss, [*x, w, *held])))
        if persistent:
            found.append(values(tape.gradient(losses, [*x, w])))
        return found

    same(run(reversible), run(plain), rtol=1e-10, atol=1e-12)


def test_values_read_by_blocks_in_a_circle_are_not_lost() -> None:
    p, q = c64([0.3]), c64([0.5])

    def run(make: Callable) -> Any:
        a, b = make(tg.sin, tg.cos)(p * 2.0, q * 2.0)
        return make(tg.sin, tg.cos)(a, b)[0], make(tg.cos, tg.sin)(b, a)[0], make(tg.sin, tg.sin)(b, b)[1]

    agrees(run, [p, q])


def test_what_nobody_rounded_has_the_bits_of_the_plain_gradient() -> None:
    x1, x2, w = c64(np.linspace(0.1, 0.9, 7)), c64(np.linspace(-0.3, 0.7, 7)), var64(np.linspace(0.4, 1.7, 7))

    def run(make: Callable) -> Any:
        early = tg.exp(x1 * w) * x2
        y1, y2 = make(lambda q: tg.tanh(q * w) * x1, lambda q: tg.sin(q) * w)(x1, x2)
        return early + y1 * x1 + y2 * x2 * w

    assert bits_equal(*(by_tape(lambda make=make: run(make), [x1, x2, w]) for make in (plain, reversible)))


def test_axes_in_turn() -> None:
    x = c64(np.random.default_rng(0).normal(size=(2, 2, 2)))

    def run(inverted: bool) -> Any:
        y = x
        for axis in (0, 1, 1, 2, 0):
            if inverted:
                y = reversible(tg.sin, tg.cos, axis=axis)(y)
            else:
                y = tg.concat(plain(tg.sin, tg.cos)(*tg.split(y, 2, axis=axis)), axis=axis)
        return tg.sin(y)

    same(by_tape(lambda: run(True), [x])[1], by_tape(lambda: run(False), [x])[1], rtol=1e-11)


def test_an_intermediate_value_is_brought_back_on_demand() -> None:
    net = Net(5)
    wanted = []
    for invert in (False, True):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(net.x)
            x1, x2 = net.x
            losses = []
            for block, (f, g) in zip(net.blocks, net.functions, strict=True):
                x1, x2 = block(x1, x2) if invert else plain(f, g)(x1, x2)
                losses.append(tg.sum(x1 * 2.0))
        del x1, x2
        for f, g in net.functions:
            f.take(), g.take()
        wanted.append([values(tape.gradient(losses[k], [net.x, net.weights])) for k in (1, 4, 0, 1)])
    same(wanted[1], wanted[0], rtol=1e-10, atol=1e-12)
    # Blocks after the loss are inverted for values alone, those before it for the gradient: each function runs once;
    # the first g not at all where only the first f matters, whose argument is in the user's hands.
    assert [(f.runs, g.runs) for f, g in net.functions] == [(4, 3), *[(4, 4)] * 4]


def test_sources_between_blocks() -> None:
    x = c64([[0.3, 0.5, 0.1, 0.7]])
    for watch in (True, False):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = reversible(tg.sin, tg.cos)(x)
            if watch:
                tape.watch(y)
            z = reversible(tg.cos, tg.sin)(y)
        gx, gy = values(tape.gradient(z, [x, y]))
        _, (wanted,) = by_tape(lambda: reversible(tg.cos, tg.sin)(y), [y])  # noqa: B023
        same(gy, wanted)
        assert np.abs(gx).min() > 0
    found = []
    for make in (plain, reversible):
        with tg.GradientTape() as tape:
            tape.watch(x)
            ys = make(tg.sin, tg.cos)(x, x)
            z = make(tg.cos, tg.sin)(*ys)
        found.append(values(tape.gradient(z, list(ys))))
    same(found[1], found[0])


# Memory


def peak(depth: int, invert: bool, together: bool = False, rows: int = 400, check: bool = True) -> int:
    """Peak bytes of forward and backward beyond what was there; gradients of the parameters are not asked for."""
    net = Net(depth, rows=rows, check=check)
    with tg.measure() as m:
        start = m.live_bytes
        with tg.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(net.x)
            y = net.loss(invert, together)
        tape.gradient(y, net.x)
        del y
    return m.peak_bytes - start


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [16, 1500])
def test_the_peak_does_not_grow_with_depth(together: bool, rows: int) -> None:
    peak(4, True, together, rows)  # constants are made once
    found = [peak(depth, True, together, rows) for depth in (4, 16, 64)]
    assert found[0] == found[1] == found[2]
    assert found[2] == peak(64, True, together, rows, check=False)
    if not together:
        without = [peak(depth, False, rows=rows) for depth in (4, 64)]
        assert without[1] > without[0] + 100 * rows * 16 * 8 and found[2] < without[1] / 5


def test_only_the_last_outputs_are_kept_and_kept_again() -> None:
    net = Net(8, rows=32)
    one = 32 * 16 * 8
    gradients(lambda *x: tg.sum(net.blocks[0](*x)[0]), net.x)  # constants are there
    with tg.measure() as m:
        start = m.live_bytes
        with tg.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(net.x)
            x = net.x
            for block in net.blocks:
                x = block(*x)
            y = tg.sum(x[0])
            del x
        assert m.live_bytes - start == 2 * one + 512
        first = values(tape.gradient(y, net.x))
        assert m.live_bytes - start == 2 * one + 512
        same(tape.gradient(y, net.x), first, rtol=0, atol=0)
        del tape, y
        assert m.live_bytes == start


def test_a_joined_output_and_a_checkpoint_keep_nothing_twice() -> None:
    one = 32 * 16 * 8
    net = Net(4, rows=32)
    with tg.measure() as m:
        start = m.live_bytes
        with tg.GradientTape() as tape:
            x = tg.concat(net.x, axis=-1)
            for block in net.blocks:
                x = block(x)
        del tape
        assert m.live_bytes - start == 2 * one  # x
        del x
        with tg.GradientTape():
            x = net.x
            for block in net.blocks:
                x = tg.recompute_grad(block)(*block(*x))
            del x
            assert m.live_bytes - start == 8 * one  # the inputs of the checkpoints


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [32, 2000])  # run at once, and lazily
def test_each_further_block_of_a_chain_keeps_nothing_more(rows: int, together: bool) -> None:
    net, kept = Net(5, rows=rows), list[int]()
    with tg.measure() as m, tg.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(net.x)
        x = [tg.concat(net.x, axis=-1)] if together else net.x
        for block in net.blocks:
            x = [block(*x)] if together else block(*x)
            gc.collect()
            kept.append(m.live_bytes)
    assert kept[1:] == [kept[1]] * 4


def test_what_is_brought_back_unchecked_is_computed_too() -> None:
    """It would keep what it is made of."""
    assert peak(3, True, True, 2000, check=False) <= peak(3, True, True, 2000) + 512  # a constant


def test_an_unchecked_block_is_inverted_only_where_something_is_gone() -> None:
    x, runs = [c64([0.5, 1.0]), c64([0.2, -0.7])], {}
    for check in (True, False):
        for gone in (True, False):
            first, second = (reversible(tg.sin, tg.exp, check=check) for _ in range(2))
            with tg.GradientTape() as tape:
                tape.watch(x)
                between = first(*x)
                y = second(*between)
                if gone:
                    del between
            with tg.measure() as m:
                tape.gradient(y, x)
            runs[check, gone] = m.nodes_run["subtract"]
    assert runs == {(True, True): 4, (True, False): 4, (False, True): 2, (False, False): 0}


def test_values_that_come_back_exactly_are_within_any_bound() -> None:
    x = [c64([1.0, 2.0]), c64([4.0, 8.0])]
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = reversible(lambda q: q * 2.0, lambda q: q * 0.5, tolerance=0.0)(*x)
    same(tape.gradient(y, x), [[1.5, 1.5], [4.0, 4.0]])


def test_drift_from_zeros_is_what_came_back_itself() -> None:
    x, scale = [c64([0.0, 0.0]), c64([4.0, 8.0])], [1.0]
    block = reversible(lambda q: q * scale[0], tg.sin, tolerance=np.inf)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = block(*x)
    scale[0] = 1.25
    tape.gradient(y, x)
    assert block.drift == 2.0


def test_a_block_that_nothing_watched_reaches_is_kept_by_no_tape() -> None:
    x = [c64(np.ones(20_000)), c64(np.ones(20_000))]
    with tg.measure() as m:
        with tg.GradientTape():
            y = reversible(tg.sin, tg.cos)(*x)
        assert m.live_bytes >= 2 * 160_000 and len(y) == 2  # computed all the same
    assert "activation" not in m.peak_by_category


def test_dead_branches_are_dropped() -> None:
    net = Net(3, rows=32)
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(net.x)
        marks = []
        for _ in range(300):
            net.loss(True)
            marks.append(m.live_bytes)
    assert max(marks) < marks[0] + 100 * 32 * 16 * 8  # of 600 values
    net.gradients(True)


def test_no_garbage_and_no_recursion() -> None:
    x = [c64([0.1]), c64([0.2])]
    block = reversible(lambda q: tg.sin(q) * 1e-3, lambda q: q * 1e-3)
    for ask in (True, False):
        with no_garbage():
            with tg.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = x
                for _ in range(700):
                    y = block(*y)
            if ask:
                assert np.isfinite(tape.gradient(y[0], x)[0].numpy()).all()
            del tape, y


def test_an_early_value_of_a_long_chain_needs_no_recursion() -> None:
    x = [c64([0.1]), c64([0.2])]
    block = reversible(lambda q: tg.sin(q) * 1e-3, lambda q: q * 1e-3)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = block(*x)
        early = tg.sum(y[0] * 2.0)
        for _ in range(700):
            y = block(*y)
        del y
    same(tape.gradient(early, x), [[2.0], [2e-3 * np.cos(0.2)]])


# Higher order and forward mode


def test_second_order_and_forward_mode() -> None:
    rng = np.random.default_rng(3)
    x, t, w = c64(rng.normal(size=4)), c64(rng.normal(size=4)), var64(rng.normal(size=4))

    def network(make: Callable) -> Callable:
        def run(q: Any) -> Any:
            a, b = q * 0.5, tg.sin(q)
            for _ in range(3):
                a, b = make(lambda r: tg.tanh(r * w), lambda r: tg.sin(r) * r)(a, b)
            return tg.sum(tg.exp(a * 0.3) * w + b * a)

        return run

    def penalty(f: Callable) -> Any:
        with tg.GradientTape() as outer:
            outer.watch(x)
            with tg.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            (d, dw) = inner.gradient(y, [x, w])
            p = tg.sum(d * d) + tg.sum(dw * d) + y
        return outer.gradient(p, [x, w])

    found = [
        (
            penalty(f),
            tg.hessian(f)(x),
            tg.hvp(f, x, t),
            tg.jvp(f, (x,), (t,)),
            tg.grad(lambda q, f=f: tg.jvp(f, (q,), (t,))[1])(x),
            tg.grad(lambda q, f=f: tg.sum(tg.grad(lambda r: tg.sum(tg.grad(f)(r) * t))(q) * t))(x),
        )
        for f in (network(plain), network(reversible))
    ]
    for wanted, got in zip(*found, strict=True):
        same(got, values(wanted), rtol=1e-9, atol=1e-9)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = reversible(tg.sin, lambda q: q * q * w)(x, x * 2.0)[1]
    same(tape.jacobian(y, x), np.diag(values(tape.gradient(y, x))), rtol=1e-10)


# Drift


@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, 6e-8), (np.float64, 1.2e-16)])
@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_drift_against_depth(dtype: Any, eps: float, gain: float) -> None:
    drifts = []
    for depth in (1, 10, 50, 200):
        net = Net(depth, dtype, gain, tolerance=np.inf)
        error = net.error()
        drifts.append(max(b.drift for b in net.blocks))
        assert error <= 100 * drifts[-1] + 10 * eps
    assert 0 < drifts[0] < 10 * eps and drifts[0] < drifts[1] < drifts[2] < drifts[3]
    assert drifts[3] < 4e3 * drifts[2]
    if gain < 1:
        assert drifts[3] < 1e4 * eps
    else:
        assert drifts[3] > 1e6 * eps


def test_drift_is_relative_however_small_the_values_are() -> None:
    x, drifts = [c64(np.linspace(0.1, 0.9, 50)), c64(np.linspace(0.3, 0.7, 50))], []
    for scale in (1.0, 2.0**-20):  # all that is rounded is so alike
        block = reversible(lambda q: q * 0.3, lambda q: q * 0.7)
        with tg.GradientTape() as tape:
            tape.watch(x)
            a, b = block(*(v * scale for v in x))
            y = tg.sum(a * b)
        tape.gradient(y, x)
        drifts.append(block.drift)
    assert 0 < drifts[0] == drifts[1] < 1e-15


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_the_bound_is_the_root_of_the_machine_epsilon(dtype: str) -> None:
    x, scale = [tg.ones(3, dtype=dtype), tg.ones(3, dtype=dtype)], [1.0]
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = reversible(lambda q: q * scale[0], tg.sin)(*x)
    scale[0] = 2.0
    with pytest.raises(errors.ReversibleError, match=f"past the tolerance {np.finfo(dtype).eps ** 0.5:.2g}: "):
        tape.gradient(y, x)


def test_past_its_bound_drift_is_an_error() -> None:
    Net(50, np.float32, 0.5).gradients(True)
    Net(50, np.float64, 2.0).gradients(True)
    net = Net(200, np.float32, 2.0)
    with pytest.raises(errors.ReversibleError, match=r"reversible\(.*float32.*drift of .* past the tolerance 0.00035"):
        net.gradients(True)
    assert isinstance(errors.ReversibleError("x"), ArithmeticError)
    net = Net(10, np.float64, 0.5, tolerance=0.0)
    with pytest.raises(errors.ReversibleError, match="recompute_grad"):
        net.gradients(True)
    net = Net(200, np.float32, 2.0, check=False)
    net.gradients(True)
    assert {b.drift for b in net.blocks} == {0.0}


def test_what_is_not_finite_is_an_error() -> None:
    x = [c64(np.ones(1000)), c64(np.ones(1000))]
    at = c64(np.zeros(1000)).at[501].set(np.nan)
    for f, g in ((lambda q: q + at, tg.sin), (tg.sin, lambda q: q + at)):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = reversible(f, g)(*x)
        with pytest.raises(errors.ReversibleError, match="not finite"):
            tape.gradient(y, x)


def test_functions_that_do_not_repeat_are_found() -> None:
    x, scale, other = [c64([1.0, 2.0]), c64([0.5, 0.7])], [1.0], [c64([1.0, 1.0]), c64([1.0, 1.0])]
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = reversible(lambda q: q * scale[0], tg.sin)(*x)
    scale[0] = 2.0
    with pytest.raises(errors.ReversibleError, match="did not repeat"):
        tape.gradient(y, x)
    for again in (lambda: other.reverse(), lambda: other.__setitem__(0, c64([1.0, 1.0]))):
        with tg.GradientTape() as tape:
            tape.watch([*x, *other])
            y = reversible(lambda q: q * other[0], tg.sin)(*x)
        again()
        with pytest.raises(errors.RecomputeError, match="other watched tensors"):
            tape.gradient(y, x)
    flag: list[Any] = []
    with tg.GradientTape() as tape:
        tape.watch([*x, *other])
        y = reversible(lambda q: q + other[0] * 0.0 if flag else q * 1.0, tg.sin)(*x)
    flag.append(True)
    with pytest.raises(errors.RecomputeError, match="other watched tensors"):
        tape.gradient(y, x)
    shapes = [x[0], x[0][:1]]
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = reversible(lambda q: q * 1.0 if len(shapes) == 2 else (q, q), tg.sin)(*x)
    shapes.pop()
    with pytest.raises(errors.RecomputeError, match="returned"):
        tape.gradient(y, x)


def test_bad_arguments() -> None:
    a, b = c64(np.ones(3)), c64(np.ones(4))
    with pytest.raises(errors.ShapeError, match=r"x1 has shape \(3,\), x2 \(4,\)"):
        reversible(tg.sin, tg.cos)(a, b)
    with pytest.raises(errors.ShapeError, match=r"\(3,\) has no two halves"):
        reversible(tg.sin, tg.cos)(a)
    with pytest.raises(errors.AxisError):
        reversible(tg.sin, tg.cos, axis=1)(b)
    with pytest.raises(errors.NotATensorError, match="not callable"):
        reversible(tg.sin, 3)
    with pytest.raises(errors.ReversibleError, match="tolerance"):
        reversible(tg.sin, tg.sin, tolerance=float("nan"))
    with pytest.raises(errors.ReversibleError, match="tolerance"):
        reversible(tg.sin, tg.sin, tolerance=-1e-9)
    for tolerance in (0, 0.5):
        assert reversible(tg.sin, tg.sin, tolerance=tolerance).drift == 0.0
    for recording in (False, True):
        with tg.GradientTape() as tape:
            if recording:
                tape.watch(a)
            with pytest.raises(errors.ShapeError, match=r"shape \(2,\) to be added to \(3,\)"):
                reversible(lambda q: q[:2], tg.cos)(a, a)
            with pytest.raises(errors.DTypeError, match="float32 to be added to float64"):
                reversible(lambda q: tg.astype(q, "float32"), tg.cos)(a, a)
            with pytest.raises(errors.NotATensorError, match="one tensor"):
                reversible(lambda q: (q, q), tg.cos)(a, a)
    assert repr(reversible(tg.sin, tg.cos)) == "reversible(sin, cos)"


def test_empty_and_scalar_values() -> None:
    for shape in ((), (0, 3), (1,)):
        x = [c64(np.ones(shape)), c64(np.ones(shape))]
        agrees(lambda make: make(tg.sin, tg.cos)(*make(tg.sin, tg.cos)(*x)), x)  # noqa: B023
    for shape in ((7, 3, 1000), (100000,), (2, 100000), (9, 9), (2,) * 8):
        found = reversible(tg.sin, tg.cos).sample(tg.ones(shape)).size
        assert 64 // 3 <= found <= 64
