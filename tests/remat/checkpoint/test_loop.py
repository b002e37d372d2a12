"""checkpointed_loop: step counts, bits of gradients, what gets them, state, random numbers, memory, errors."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from checks import Counted, bits_equal, c64, no_garbage, same, values, var64
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import Peers, of_all

import tapegrad as tg
from tapegrad import errors, nest
from tapegrad.remat.budget.budget import memory_budget
from tapegrad.remat.checkpoint.loop import checkpointed_loop
from tapegrad.remat.schedules.actions import Advance, Drop, Restore, Reverse, Store, Tape
from tapegrad.remat.schedules.mixed import total_steps
from tapegrad.remat.schedules.revolve import extra_steps, revolve

SMALL, BIG = 6, 20_000  # elements: run at once, and lazily


def plain_loop(step: Callable, state: Any, n: int, **options: Any) -> Any:
    for _ in range(n):
        state = step(state)
    return state


def by_tape(loop: Callable, step: Callable, state: Any, n: Any, sources: list, **options: Any) -> tuple[Any, Any]:
    """The final state's tensors, and their gradients in ``sources`` (zeros if not connected)."""
    with tg.GradientTape() as tape:
        tape.watch([s for s in sources if not isinstance(s, tg.Variable)])
        y = loop(step, state, n, **options)
        targets = [leaf for leaf in nest.flatten(y) if isinstance(leaf, (tg.Tensor, tg.Variable))]
    return values(targets), values(tape.gradient(targets, sources, unconnected_gradients="zero"))


def agrees(step: Callable, state: Any, n: int, sources: list, **options: Any) -> None:
    """The checkpointed loop has the values and gradients of the plain one, to the bit."""
    wanted = by_tape(plain_loop, step, state, n, sources)
    assert bits_equal(by_tape(checkpointed_loop, step, state, n, sources, **options), wanted)


# Counts and bits


@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 1), (5, 1), (7, 2), (10, 3), (30, 4), (21, 5), (10, 50)])
def test_steps_run_as_often_as_the_formulas_say(n: int, c: int) -> None:
    x, w = c64(np.linspace(0.1, 0.4, SMALL)), var64(np.linspace(0.5, 1.0, SMALL))
    step = Counted(lambda s: tg.tanh(s * w) + s * x)
    wanted = by_tape(plain_loop, step.f, x, n, [x, w])
    for options, runs in (
        ({}, extra_steps(n, c) + n),
        ({"disk": 2}, extra_steps(n, c + 2) + n),
        ({"schedule": "mixed"}, total_steps(n, c)),
        ({"schedule": "sqrt"}, 2 * n - -(-n // min(c, n))),
        ({"schedule": lambda n: revolve(n, c)}, extra_steps(n, c) + n),
    ):
        assert bits_equal(by_tape(checkpointed_loop, step, x, n, [x, w], snapshots=c, **options), wanted), options
        assert step.take() == runs, options


def test_the_specified_counts() -> None:
    for n, c, revolved, mixed in ((100, 5, 416, 352), (200, 10, 722, 553)):
        step, x = Counted(lambda s: s * 1.01), c64(1.0)
        for schedule, runs in (("revolve", revolved), ("mixed", mixed)):
            _, (g,) = by_tape(checkpointed_loop, step, x, n, [x], snapshots=c, schedule=schedule)
            assert step.take() == runs
            same(g, 1.01**n)


@pytest.mark.parametrize("size", [SMALL, BIG])
@pytest.mark.parametrize("schedule", ["revolve", "mixed", "sqrt", "hierarchical"])
def test_arguments_captures_and_variables_in_a_nested_state(size: int, schedule: str) -> None:
    x = np.linspace(0.2, 0.9, size)
    a, b, c, unused = (c64(x + 0.1 * k) for k in range(4))
    v, frozen = var64(x * 2), var64(x * 3, trainable=False)

    def step(s: Any) -> Any:
        h = tg.tanh(s["h"] * v + c)
        return {"h": h, "more": [s["h"] * frozen, (tg.sum(s["more"][0] * c), s["more"][1][1])], "same": h}

    state = {"h": a, "more": [b, (tg.sum(a), 3)], "same": a}
    agrees(step, state, 7, [a, b, c, v, unused], snapshots=2, schedule=schedule, disk=2 * (schedule == "revolve"))


def test_states_that_pass_through_are_shared_or_captured() -> None:
    x, y, w = c64([1.0, 2.0]), c64([3.0, 4.0]), c64([0.5, 0.25])
    agrees(lambda s: (s[1], s[0] * w), (x, y), 6, [x, y, w], snapshots=2)
    agrees(lambda s: (s[0], s[0] * s[1]), (x, x), 6, [x], snapshots=2)
    agrees(lambda s: (w, s[1] * s[0], s[0]), (x, y, y), 6, [x, y, w], snapshots=2)
    agrees(lambda s: w * 2.0, x, 5, [x, w], snapshots=2)  # the state is not even used
    agrees(lambda s: s, x, 5, [x], snapshots=2)
    agrees(lambda s: tg.concat([s[1:] * 2.0, w])[:2], x, 6, [x, w], snapshots=2)  # slices


@pytest.mark.parametrize("schedule", ["revolve", "sqrt"])
def test_what_is_used_without_a_derivative_is_connected(schedule: str) -> None:
    """As under recompute_grad."""
    x, c, v = c64([1.0, -2.0]), c64([3.0, -4.0]), var64([0.5, 0.25])
    step = lambda s: s * tg.astype(c > 0.0, "float64") * tg.astype(v > 0.0, "float64")
    with tg.GradientTape() as tape:
        tape.watch([x, c])
        y = checkpointed_loop(step, x, 5, snapshots=2, schedule=schedule)
    same(tape.gradient(y, [x, c, v]), [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


def test_sums_are_made_in_the_order_of_the_plain_loop() -> None:
    """What comes from after the loop first."""
    rng = np.random.default_rng(4)
    x, c, v = c64(rng.normal(size=40)), c64(rng.normal(size=40)), var64(rng.normal(size=40))
    step = lambda s: tg.sin(s * v) + s * c
    found = []
    for loop in (plain_loop, checkpointed_loop):
        with tg.GradientTape() as tape:
            tape.watch([x, c])
            loss = tg.sum(loop(step, x, 5) * v * c * x)
        found.append(tape.gradient(loss, [x, c, v]))
    assert bits_equal(*found)


def test_a_step_may_want_its_number() -> None:
    x, data = c64(0.3), [c64(0.1 * i) for i in range(9)]
    told = []

    def step(s: tg.Tensor, i: int, is_recomputing: bool = False) -> tg.Tensor:
        told.append((i, is_recomputing))
        return tg.sin(s + data[i]) * (i + 1.0)

    with tg.GradientTape() as tape:
        tape.watch([x, data])
        s = x
        for i in range(9):
            s = step(s, i)
    wanted = values(tape.gradient(s, [x, *data]))
    told.clear()
    _, found = by_tape(checkpointed_loop, step, x, 9, [x, *data], snapshots=2)
    assert bits_equal(found, wanted)
    assert told[:9] == [(i, False) for i in range(9)] and all(again for _, again in told[9:])
    assert by_tape(checkpointed_loop, lambda s, k=2.0: s * k, x, 3, [x])[1] == [8.0]


def test_no_steps_no_tape_and_nothing_watched() -> None:
    x = c64([1.0, 2.0])
    step = Counted(lambda s: s * 2.0)
    same(by_tape(checkpointed_loop, step, x, 0, [x])[1], [[1.0, 1.0]])
    same(checkpointed_loop(step, x, 3), [8.0, 16.0])
    assert step.take() == 3
    with tg.GradientTape() as tape:
        y = checkpointed_loop(step, x, 3)
    assert tape.gradient(y, x) is None and step.take() == 3


# Unknown length


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 10, 11, 25])
def test_a_loop_of_unknown_length(n: int) -> None:
    x, w = c64(np.full(SMALL, 0.3)), var64(np.linspace(0.5, 1.0, SMALL))
    step, c = Counted(lambda s: (tg.tanh(s[0] * w) + s[0], s[1] + 1)), 3
    state = (x, tg.asarray(0))
    wanted = by_tape(plain_loop, step.f, state, n, [x, w])
    more = Counted(lambda s: int(s[1]) < n)
    assert bits_equal(by_tape(checkpointed_loop, step, state, None, [x, w], snapshots=c, while_=more), wanted)
    assert more.take() == n + 1
    runs = step.take()
    if 0 < n <= (c + 1) * (c + 2) // 2:
        assert runs == extra_steps(n, c) + n + 1
    assert checkpointed_loop(step, state, while_=more, snapshots=c)[1].item() == n


# What repeats, and what happens once


def test_random_numbers_repeat_in_every_schedule() -> None:
    x = c64(np.linspace(1, 2, SMALL))

    def step(s: tg.Tensor) -> tg.Tensor:
        mask = tg.random.bernoulli(s.shape, 0.5, dtype="float64") + tg.random.normal(s.shape, dtype="float64")
        return tg.sin(s * mask) * c64(np.random.standard_normal(s.shape)) * random.random()

    def run(loop: Callable, **options: Any) -> tuple:
        tg.random.seed(3), np.random.seed(3), random.seed(3)
        found = by_tape(loop, step, x, 9, [x], **options)
        return found, (values(tg.random.uniform((2,))).tolist(), np.random.rand(2).tolist(), random.random())

    wanted, streams = run(plain_loop)
    for options in ({}, {"disk": 1}, {"schedule": "mixed"}, {"schedule": "sqrt"}):
        found, after = run(checkpointed_loop, snapshots=2, **options)
        assert bits_equal(found, wanted) and after == streams


@pytest.mark.parametrize("late", [random.random, np.random.rand])
def test_a_generator_that_later_steps_alone_draw_from(late: Callable) -> None:
    """Python's is not looked at then: the gradient is right all the same, and so is what is drawn afterwards."""
    x = c64([1.0, 2.0])

    def run(loop: Callable, **options: Any) -> tuple:
        np.random.seed(3), random.seed(3)
        step = lambda s, i: tg.sin(s) * (late() if i > 2 else 0.5)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            y = [y := step(y, i) for i in range(6)][-1] if loop is plain_loop else loop(step, x, 6, **options)
        return values(tape.gradient(y, x)).tolist(), late()

    assert run(checkpointed_loop, snapshots=2) == run(plain_loop)


@pytest.mark.parametrize("schedule", ["revolve", "mixed", "sqrt"])
@pytest.mark.parametrize("reads_first", [True, False])
@pytest.mark.filterwarnings("ignore:gradient:tapegrad.errors.IntegerWatchWarning")  # integers are among the sources
def test_variables_changed_by_the_steps(schedule: str, reads_first: bool) -> None:
    x = c64([0.5, 0.25])

    def run(loop: Callable, **options: Any) -> tuple:
        v, w, count = var64([3.0, 2.0]), var64([1.0, 2.0]), tg.Variable(0, trainable=False)

        def step(s: tg.Tensor) -> tg.Tensor:
            y = s * v if reads_first else s * 1.5
            if int(count) % 3 == 0:
                v.assign(y + 0.5)
            count.assign_add(1)
            return tg.sin(y * v) * w

        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = loop(step, x, 8, **options)
            z = y * v
        found = [values(tape.gradient(z, [x, v, w, count])) for _ in range(2)]
        return values(z), found, v.numpy(), count.numpy()

    assert bits_equal(run(checkpointed_loop, snapshots=2, schedule=schedule), run(plain_loop))


def test_layers_that_make_their_variables_in_the_first_step_and_change_later() -> None:
    x = tg.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))

    def run(loop: Callable, **options: Any) -> Any:
        tg.random.seed(1)
        layers = tg.nn.Sequential([tg.nn.Dense(4, activation="tanh"), tg.nn.Dropout(0.5), tg.nn.LayerNormalization()])
        with tg.GradientTape() as tape:
            y = loop(lambda s: layers(s, training=True), x, 5, **options)
        for v in layers.trainable_variables:
            v.assign(v * 0.0)
        return values(y), values(tape.gradient(y, layers.trainable_variables))

    wanted = run(plain_loop)
    assert len(wanted[1]) == 4 and np.abs(wanted[1][0]).max() > 0
    assert bits_equal(run(checkpointed_loop, snapshots=2), wanted)


def test_arrays_in_the_state_that_a_step_changes_in_place() -> None:
    x = c64([1.0, 2.0])

    def step(s: tuple) -> tuple:
        s[1][0] += 1.0
        return s[0] * s[1], s[1]

    wanted = by_tape(lambda f, s, n: plain_loop(f, (s, np.ones(2)), n)[0], step, x, 6, [x])
    for options in ({}, {"schedule": "mixed"}):
        found = by_tape(
            lambda f, s, n, o=options: checkpointed_loop(f, (s, np.ones(2)), n, snapshots=2, **o)[0], step, x, 6, [x]
        )
        assert bits_equal(found, wanted)


# Higher order


def test_second_order_jacobians_and_forward_mode() -> None:
    x, w = c64([0.3, 0.6]), var64([0.5, 1.1])

    def loss(loop: Callable) -> Callable:
        return lambda q: tg.sum(loop(lambda s: tg.sin(s * w) + s * q, q, 5, snapshots=2) ** 2)

    plain, ours = loss(plain_loop), loss(checkpointed_loop)
    c = c64([1.0, -2.0])
    for f, g in zip(
        (tg.hessian(plain)(x), tg.hvp(plain, x, c), tg.jvp(plain, (x,), (c,)), tg.jvp(tg.grad(plain), (x,), (c,))),
        (tg.hessian(ours)(x), tg.hvp(ours, x, c), tg.jvp(ours, (x,), (c,)), tg.jvp(tg.grad(ours), (x,), (c,))),
        strict=True,
    ):
        same(g, values(f), rtol=1e-11)
    tg.testing.check_grads(ours, (x.numpy(),), order=2)

    def penalty(f: Callable) -> Any:
        with tg.GradientTape() as outer:
            outer.watch(x)
            with tg.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            p = tg.sum(inner.gradient(y, x) ** 2)
        return outer.gradient(p, [x, w])

    same(penalty(ours), values(penalty(plain)), rtol=1e-11)


def test_slices_keep_their_tangents() -> None:
    x, t = c64([1.0, 2.0, 3.0, 4.0]), c64([1.0, 2.0, 0.0, 3.0])

    def under_a_tape(f: Callable) -> Callable:
        def g(q: tg.Tensor) -> tg.Tensor:
            with tg.GradientTape() as tape:
                tape.watch(q)
                return f(q)

        return g

    def step(s: tuple) -> tuple:
        return s[1], tg.concat([tg.sin(s[0] * 2.0), s[2]])[:4], s[0]

    plain = under_a_tape(lambda q: plain_loop(step, (q, q * q, q), 3))
    ours = under_a_tape(lambda q: checkpointed_loop(step, (q, q * q, q), 3, snapshots=2))
    again = under_a_tape(lambda q: plain_loop(tg.recompute_grad(step), (q, q * q, q), 3))
    wanted = values(tg.jvp(plain, (x,), (t,)))
    same(tg.jvp(ours, (x,), (t,)), wanted)
    same(tg.jvp(again, (x,), (t,)), wanted)


def test_one_pass_serves_a_whole_jacobian() -> None:
    x, w = c64([0.3, 0.6, 0.9]), var64([0.5, 1.1, 0.7])
    step = Counted(lambda s: tg.sin(s * w) + x)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, plain = checkpointed_loop(step, x, 10, snapshots=3), plain_loop(step.f, x, 10)
    assert bits_equal(tape.jacobian(y, [x, w]), tape.jacobian(plain, [x, w])) and step.take() == 25
    assert bits_equal(tape.gradient(y, [x, w]), tape.gradient(plain, [x, w])) and step.take() == 25  # from the start
    assert bits_equal(tape.gradient(y, w), tape.gradient(plain, w)) and step.take() == 25


def test_a_tape_that_follows_nothing_of_the_loop_does_not_have_it_run_as_a_whole() -> None:
    x, other = c64([0.3, 0.6]), c64([1.0])
    step = Counted(lambda s: tg.sin(s) * 1.5)
    for watched, runs in ((other, extra_steps(9, 2) + 9), (x, 9 + 9)):
        with tg.GradientTape() as outer:
            outer.watch(watched)
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = checkpointed_loop(step, x, 9, snapshots=2)
            tape.gradient(y, x)
        assert step.take() == runs


def test_loops_in_loops_and_in_recompute_grad() -> None:
    x, w = c64([0.3, 0.6]), var64([0.5, 1.1])

    def model(loop: Callable, wrap: Callable) -> Callable:
        inner = lambda s: loop(lambda t: tg.sin(t * w) + s, s, 4, snapshots=2)
        return lambda q: loop(wrap(inner), q, 3, snapshots=1)

    wanted = by_tape(lambda f, s, n: f(s), model(plain_loop, lambda f: f), x, 0, [x, w])
    for f in (
        model(checkpointed_loop, lambda f: f),
        model(checkpointed_loop, tg.recompute_grad),
        tg.recompute_grad(model(checkpointed_loop, lambda f: f)),
    ):
        assert bits_equal(by_tape(lambda f, s, n: f(s), f, x, 0, [x, w]), wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 14), st.integers(1, 5), st.sampled_from(["revolve", "mixed", "sqrt", "hierarchical"]), st.data())
def test_any_length_any_schedule(n: int, c: int, schedule: str, data: st.DataObject) -> None:
    x, w, u = c64([0.3, 0.6]), var64([0.5, 1.1]), c64([0.2, 0.4])
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))

    def step(s: tuple) -> tuple:
        k = kinds[s[1]]
        a, b = s[0]
        new = (
            (tg.sin(a * w), b)
            if k == 0
            else (b, a)
            if k == 1
            else (a + b * u, u)
            if k == 2
            else (tg.stop_gradient(a), a * b)
        )
        return new, s[1] + 1

    agrees(step, ((x, x * 1.5), 0), n, [x, w, u], snapshots=c, schedule=schedule)


# Memory


@pytest.mark.parametrize(("n", "c"), [(20, 3), (40, 5)])
def test_the_ledger_sees_so_many_states_and_one_tape(n: int, c: int) -> None:
    size = 40_000
    state = size * 8
    x = c64(np.linspace(0, 1, size))

    def step(s: tg.Tensor) -> tg.Tensor:
        return tg.cumsum(tg.sin(s)) / size

    def peak(loop: Callable, **options: Any) -> int:
        with tg.measure() as m, tg.GradientTape() as tape:
            live = m.live_bytes
            tape.watch(x)
            y = loop(step, x, n, **options)
            tape.gradient(y, x)
        return m.peak_bytes - live

    one = peak(plain_loop) / n  # what a step keeps: its tape
    # c - 1 states besides the initial one (the caller's), a step's tape, the state at hand, its copy or gradients.
    room = (c - 1) * state + one + 4 * state
    assert peak(checkpointed_loop, snapshots=c) <= room < peak(plain_loop)
    assert peak(checkpointed_loop, snapshots=1, disk=c) <= 5 * state + one


def test_states_on_disk_take_no_memory_also_when_they_have_been_read() -> None:
    x = c64(np.linspace(0.1, 1.0, 4096))
    found = []
    for options in ({"snapshots": 3}, {"snapshots": 1, "disk": 2}, {"snapshots": 1, "disk": 5}) * 2:
        with tg.measure() as m, tg.GradientTape() as tape:
            live = m.live_bytes
            tape.watch(x)
            y = checkpointed_loop(lambda s: tg.sin(s) * 1.5, x, 12, **options)
            kept = m.live_bytes - live
            tape.gradient(y, x)
        found.append((kept, m.peak_bytes - live))
    in_memory, few, many = found[3:]  # constants are there by then
    assert few == many == tuple(nbytes - x.nbytes for nbytes in in_memory)


def test_an_output_that_is_stacked_later_keeps_no_state_alive() -> None:
    """Lazy outputs would keep the states that they are made from."""
    x, taken = c64(np.linspace(0.1, 1.0, 20_000)), list[int]()

    def step(s: Any) -> Any:
        taken.append(m.live_bytes)
        return tg.sin(s), tg.exp(s) * 2.0

    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        checkpointed_loop(step, x, 8, snapshots=2, outputs=True)
    assert taken[7] - taken[3] <= 5 * 160_256  # an output of each step, and of one a state


def test_a_memory_budget_around_it_costs_nothing() -> None:
    x, w = c64(np.linspace(0, 1, 20_000)), var64(np.ones(20_000))

    def peak(limit: Any) -> int:
        with limit, tg.measure() as m, tg.GradientTape() as tape:
            live = m.live_bytes
            tape.watch(x)
            y = checkpointed_loop(lambda s: tg.cumsum(tg.sin(s * w)) / 20_000, x, 30, snapshots=4)
            tape.gradient(y, [x, w])
        return m.peak_bytes - live

    assert peak(memory_budget("4MiB")) <= peak(nullcontext()) + 1024


def test_nothing_is_left_behind() -> None:
    x, w = c64(np.linspace(0, 1, SMALL)), var64(np.ones(SMALL))
    for options in ({}, {"disk": 1}, {"schedule": "mixed"}, {"schedule": "sqrt"}):
        with no_garbage():
            by_tape(checkpointed_loop, lambda s: tg.tanh(s * w), x, 12, [x, w], snapshots=2, **options)
    with no_garbage():
        hits = [0]

        def fails(s: tg.Tensor) -> tg.Tensor:
            hits[0] += 1
            if hits[0] == 15:
                raise KeyError
            return s * 2.0

        with pytest.raises(KeyError):
            by_tape(checkpointed_loop, fails, x, 12, [x], snapshots=2)


def test_after_a_failed_gradient_the_next_starts_from_the_beginning() -> None:
    x, fail = c64(0.5), [False]

    def step(s: tg.Tensor) -> tg.Tensor:
        if fail[0]:
            raise ZeroDivisionError
        return tg.sin(s)

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, plain = checkpointed_loop(step, x, 9, snapshots=2), plain_loop(step, x, 9)
    fail[0] = True
    with pytest.raises(ZeroDivisionError):
        tape.gradient(y, x)
    fail[0] = False
    assert bits_equal(tape.gradient(y, x), tape.gradient(plain, x))


def wave(c2: tg.Tensor) -> Callable:
    """Leapfrog steps of a wave, whose states share arrays with their neighbours; a sum runs along."""

    def step(s: tuple) -> tuple:
        u, v, misfit = s
        around = tg.roll(u, 1, 0) + tg.roll(u, -1, 0) + tg.roll(u, 1, 1) + tg.roll(u, -1, 1) - 4.0 * u
        w = 2.0 * u - v + c2 * around
        return w, u, misfit + tg.sum(w[5] * w[5])

    return step


def wave_gradient(n: int, size: int = 48, limit: int | None = None, **options: Any) -> tuple[Any, int]:
    """The gradient in the speed, and the bytes taken besides what was there."""
    c2 = c64(np.full((size, size), 0.1))
    x, zero = c64(np.random.default_rng(0).normal(size=(size, size))), c64(np.zeros((size, size)))
    left = iter(range(n))
    more = {"while_": lambda s: next(left, None) is not None} if options.pop("open", 0) else {}
    with nullcontext() if limit is None else memory_budget(limit), tg.measure() as m, tg.GradientTape() as tape:
        live = m.live_bytes
        tape.watch(c2)
        y = checkpointed_loop(wave(c2), (x, zero, c64(0.0)), None if more else n, **more, **options)
        found = tape.gradient(y[2], c2)
    return found, m.peak_bytes - live


@pytest.mark.parametrize("kind", ["revolve", "mixed", "sqrt", "open"])
@pytest.mark.parametrize("states", [10, 24])
def test_bytes_are_what_the_loop_takes_at_most(kind: str, states: int) -> None:
    options: dict = {"open": 1} if kind == "open" else {"schedule": kind}
    n, room = 20, states * 48 * 48 * 8 * 2
    if kind == "sqrt":
        room *= 2
    plain, _ = wave_gradient(n, snapshots=n, schedule="sqrt")
    found, taken = wave_gradient(n, bytes=room, **options)
    assert bits_equal([found], [plain])
    assert room // 4 < taken <= room


def test_few_bytes_are_an_error_at_once_that_says_how_many_are_needed() -> None:
    with pytest.raises(errors.RecomputeError, match="bytes=1000 .* is too little: no stored state fits") as e:
        wave_gradient(20, bytes=1000)
    assert "checkpointed_loop(step) at " in str(e.value) and f"{__file__}:" in str(e.value)
    assert f"One state takes {48 * 48 * 8 * 2 + 512} bytes" in str(e.value)
    least = int(re.search(r"the loop needs (\d+) bytes", str(e.value))[1])  # type: ignore[index]
    assert wave_gradient(20, bytes=least)[1] <= least
    with pytest.raises(errors.RecomputeError, match="one stored state"):
        wave_gradient(20, bytes=least // 2)
    with pytest.raises(ValueError, match="size"):
        checkpointed_loop(lambda s: s, c64(1.0), 20, bytes="many")


def test_a_state_that_passes_through_takes_no_bytes_beside_the_first() -> None:
    x = c64(np.linspace(0, 1, SMALL))
    step = lambda s: (s, tg.sum(tg.exp(tg.sin(s))))
    for schedule in ("revolve", "sqrt"):
        with tg.GradientTape() as tape, pytest.raises(errors.RecomputeError, match="One state takes 0 bytes"):
            tape.watch(x)
            checkpointed_loop(step, x, 9, bytes=1, schedule=schedule, outputs=True)


def test_bytes_for_a_loop_of_no_steps_and_of_one() -> None:
    step, x = Counted(lambda s: s * 2.0), c64(np.ones(100))
    for n, runs in ((0, 0), (1, 2)):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = checkpointed_loop(step, x, n, bytes="1MiB")
        assert values(tape.gradient(y, x))[0] == 2.0**n and step.take() == runs
    with tg.GradientTape() as tape, pytest.raises(errors.RecomputeError, match="too little"):
        tape.watch(x)
        checkpointed_loop(step, x, 1, bytes=100)


def test_bytes_for_a_loop_of_unknown_length_that_no_tape_keeps() -> None:
    left = iter(range(5))
    y = checkpointed_loop(lambda s: s * 2.0, c64(1.0), while_=lambda s: next(left, None) is not None, bytes="1MiB")
    same(y, 32.0)


@pytest.mark.parametrize("options", [{"snapshots": 20}, {}, {"bytes": 1_000_000}, {"snapshots": 20, "schedule": "sqrt"},
                                     {"open": 1, "snapshots": 20}])  # fmt: skip
@pytest.mark.parametrize("states", [12, 20])
def test_inside_a_budget_a_loop_lives_on_what_there_is(options: dict, states: int) -> None:
    plain = wave_gradient(20, snapshots=20)[0]
    limit = alive() + states * 48 * 48 * 8 * 2
    found, _ = wave_gradient(20, limit=limit, **options)  # the budget sees to the peak
    assert bits_equal([found], [plain])


def alive() -> int:
    with tg.measure() as m:
        return m.live_bytes


def test_a_budget_drops_the_state_that_costs_the_fewest_steps() -> None:
    step, x = Counted(tg.sin), c64(np.linspace(0.1, 0.4, 1024))
    with memory_budget("1GiB"), tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = checkpointed_loop(step, x, 10, snapshots=3)  # keeps the states 0, 4 and 7
        y.numpy()
        with memory_budget(m.live_bytes - 2 * x.nbytes):  # less by a state and the last step's record
            pass
        tape.gradient(y, x)
    assert step.take() == extra_steps(10, 3) + 10 + 3


def test_inside_a_budget_any_schedule_takes_as_little_as_one_state() -> None:
    plain, taken = wave_gradient(20, snapshots=1)
    limit = alive() + taken + 3 * 48 * 48 * 8 + 2 * 512  # the arguments, which are there before, and two numbers
    for options in ({"snapshots": 1}, {"snapshots": 2}, {"snapshots": 10}):
        assert bits_equal([wave_gradient(20, limit=limit, **options)[0]], [plain]), options


def test_inside_a_budget_a_loop_that_stores_no_initial_state_runs_from_its_beginning() -> None:
    plain, taken = wave_gradient(20, snapshots=20)
    limit = alive() + taken // 2
    assert bits_equal([wave_gradient(20, limit=limit, snapshots=20, schedule="mixed")[0]], [plain])


def test_a_budget_too_small_for_a_step_names_the_loop_and_says_what_fits() -> None:
    gc.collect()  # what earlier tests have left is no part of what is alive
    limit = alive() + 5 * 48 * 48 * 8
    says = (
        r"checkpointed_loop\(step\) at .*test_loop.py:\d+: no room .* beside stored states: 1; no number of snapshots"
    )
    for options in ({"snapshots": 3}, {"bytes": 10_000_000}):
        with pytest.raises(errors.BudgetError, match=says) as e:
            wave_gradient(20, limit=limit, **options)
        assert e.value.needed_bytes > limit and "or raise the budget" in str(e.value)


def test_stored_states_that_a_budget_may_not_drop_are_to_be_fewer_by_the_bytes_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So are those of steps in which other processes take part.  Step 5 takes more room than the others."""
    gc.collect()  # what errors of earlier tests hold is no part of what is alive
    everyone, x, w = of_all(Peers(1), monkeypatch), c64(np.linspace(0.1, 0.9, 4000)), c64(np.ones(4000))

    def step(u: tg.Tensor, i: int) -> tg.Tensor:
        return tg.tanh(u * x + everyone(tg.sum(tg.concat([u] * (5 if i == 5 else 1)))) * 1e-3)

    limit = alive() + 5 * x.nbytes
    with pytest.raises(errors.BudgetError) as e, memory_budget(limit), tg.GradientTape() as tape:
        tape.watch(w)
        checkpointed_loop(step, w, 12, snapshots=12)
    says = r"beside stored states: (\d+); (\d+) would fit here: write snapshots=\2 or fewer; or raise the budget"
    found, missing = re.search(says, str(e.value)), e.value.needed_bytes - limit
    assert found, str(e.value)
    assert x.nbytes < missing < 4 * x.nbytes
    assert int(found[1]) - int(found[2]) == -(-missing // x.nbytes)


@pytest.mark.parametrize("schedule", ["sqrt", "mixed"])
def test_a_budget_too_small_for_several_records_evicts_what_they_save(schedule: str) -> None:
    u, v = c64(np.linspace(-1.0, 1.0, 4000)), var64(np.linspace(0.5, 1.0, 4000))

    def gradient(limit: int, **options: Any) -> Any:
        with memory_budget(limit) as m, tg.GradientTape() as tape:
            y = checkpointed_loop(lambda s: (s[0] * 0.9 + s[1] * v, tg.sin(s[0])), (u, u * 0.5), 23, **options)
            result = tape.gradient(y, v)
        assert m.peak_bytes <= limit
        return result

    limit = alive() + 14 * u.size * 8
    required = gradient(2**40, snapshots=2)
    assert bits_equal([gradient(limit, schedule=schedule, snapshots=2 if schedule == "sqrt" else 9)], [required])
    assert bits_equal([gradient(limit, snapshots=2)], [required])


def test_a_budget_too_small_for_second_derivatives_says_that_the_loop_runs_as_a_whole() -> None:
    x = c64(np.ones(20_000))
    with memory_budget(alive() + 6 * x.size * 8), tg.GradientTape() as outer:
        outer.watch(x)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = checkpointed_loop(lambda u: tg.tanh(tg.sin(u) * x), x, 60, snapshots=2)
        with pytest.raises(
            errors.BudgetError, match=r"test_loop.py:\d+: no room to run and record the loop as a whole"
        ):
            tape.gradient(y, x)


def test_a_budget_inside_a_step_speaks_for_itself() -> None:
    def step(u: tg.Tensor) -> tg.Tensor:
        with memory_budget(alive() + u.size * 8):
            return tg.tanh(u @ u @ u @ u)

    x = c64(np.ones((200, 200)))
    with tg.GradientTape() as tape, pytest.raises(errors.BudgetError) as e:
        tape.watch(x)
        checkpointed_loop(step, x, 3, snapshots=1)
    assert "checkpointed_loop" not in str(e.value)


# Errors


@pytest.mark.parametrize(
    ("n", "options", "says"),
    [
        (None, {}, "either n"),
        (3, {"while_": bool}, "either n"),
        (-1, {}, "whole number"),
        (2.5, {}, "whole number"),
        (3, {"snapshots": 0}, "at least one"),
        (3, {"snapshots": 2, "bytes": 100}, "one of them"),
        (3, {"schedule": "best"}, "revolve, mixed, sqrt"),
        (3, {"schedule": "mixed", "disk": 1}, "no use for disk"),
        (3, {"disk": -1}, "disk is a number"),
        (3, {"disk": "/tmp"}, "directory= says where"),
        (None, {"while_": bool}, "needs snapshots"),
        (3, {"schedule": lambda n: [Tape(0)]}, "a schedule is wrong"),
        (3, {"schedule": lambda n: [], "bytes": "1GiB"}, "says itself what is stored"),
        (None, {"while_": bool, "snapshots": 2, "schedule": "mixed"}, "schedule goes with n"),
        (None, {"while_": bool, "bytes": "1GiB", "schedule": lambda n: []}, "schedule goes with n"),
    ],
)
def test_bad_arguments(n: Any, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checkpointed_loop(lambda s: s, c64(1.0), n, **options)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda s: (s[0], s[1], s[0]), r"step 0 changed the structure of the state from"),
        (
            lambda s: {"a": s[0], "b": s[1]},
            r"step 0 changed the structure of the state from",
        ),
        (lambda s: (s[0][:2], s[1]), r"step 0 returned the state \(float64\[2\], float64\[\]\), but was given"),
        (
            lambda s: (tg.astype(s[0], "float32"), s[1]),
            r"returned the state \(float32\[3\], float64\[\]\), but was given",
        ),
        (lambda s: (s[0], None), r"step 0 returned the state \(float64\[3\], NoneType\), but was given"),
    ],
)
@pytest.mark.parametrize("taped", [False, True])
def test_a_state_that_changes_its_form_is_refused(step: Callable, says: str, taped: bool) -> None:
    x = c64([1.0, 2.0, 3.0])
    with tg.GradientTape() if taped else nullcontext() as tape:
        if taped:
            tape.watch(x)
        with pytest.raises(errors.StructureError, match=says):
            checkpointed_loop(step, (x, c64(1.0)), 3, snapshots=2)


def test_numbers_and_arrays_in_a_state_may_become_tensors() -> None:
    x = c64([1.0, 2.0, 3.0])
    state = {"n": 0, "sum": 0.0, "x": np.ones(3)}
    for n in (1, 5):
        agrees(lambda s: {"n": s["n"] + 1, "sum": s["sum"] + tg.sum(x), "x": s["x"] * x}, state, n, [x], snapshots=2)


def test_a_value_that_reaches_a_later_step_unseen_is_an_error() -> None:
    x, memory = c64([1.0, 2.0]), []

    def step(s: tg.Tensor) -> tg.Tensor:
        memory.append(s * 3.0)
        return s * memory[-2] if len(memory) > 1 else s * 2.0

    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(errors.RecomputeError, match="not part of the state"):
            checkpointed_loop(step, x, 4, snapshots=2)


def test_a_rerun_that_differs_is_an_error() -> None:
    x, c, d = c64([1.0, 2.0]), c64(2.0), c64(3.0)
    for (first, then, says), n in itertools.product(
        (
            (lambda s: s * 2.0, lambda s: (s * 2.0, s), "the rerun of step 0 returned"),
            (lambda s: s * 2.0, lambda s: s[:1] * 2.0, "the rerun of step 0 returned"),
            (lambda s: s * c, lambda s: s * d, "other watched tensors"),
        ),
        (2, 3),  # the rerun of the first step is recorded, or not
    ):
        now = [first]
        with tg.GradientTape() as tape:
            tape.watch([x, c, d])
            y = checkpointed_loop(lambda s, now=now: now[0](s), x, n, snapshots=1)
        now[0] = then
        with pytest.raises(errors.RecomputeError, match=says):
            tape.gradient(y, x)


def test_a_schedule_of_ones_own_may_record_a_step_long_before_it_is_reversed() -> None:
    x = c64([0.5, 1.0])
    early = [Restore(0), Advance(0, 1), Tape(1), Advance(2, 3), Tape(3), Reverse(3)]
    late = [Restore(0), Advance(0, 2), Tape(2), Reverse(2), Reverse(1), Restore(0), Drop(0), Tape(0), Reverse(0)]
    mine = [Store(0), Advance(0, 4), Tape(4), Reverse(4), *early, *late]
    agrees(tg.sin, x, 5, [x], schedule=lambda n: mine)
    agrees(tg.function(tg.sin), x, 5, [x], schedule=lambda n: mine)


def test_a_schedule_of_ones_own_on_disk() -> None:
    x = c64(np.linspace(0, 1, 512).reshape(2, 16, 16))

    def mine(n: int) -> list:
        back = [[Restore(0), Advance(0, i)] * bool(i) or [Restore(0)] for i in range(n - 1)]
        parts = [[*b, Tape(i), Reverse(i)] for i, b in enumerate(back)]
        last = [Store(0, "disk"), Advance(0, n - 1), Tape(n - 1), Reverse(n - 1)]
        return [*last, *(a for part in reversed(parts) for a in part), Drop(0)]

    # Transposed, a state must come back from disk as it was laid out.
    agrees(lambda s: tg.tanh(s @ (s.mT @ s) * 0.01).mT.mT, x, 4, [x], schedule=mine)
    agrees(lambda s: tg.sin(tg.matmul(s, s.mT) * 0.1 @ s).mT, x, 4, [x], snapshots=1, disk=3)


def test_a_loop_that_no_gradient_needs_leaves_no_cycle() -> None:
    """What is kept for its reversal goes with the tape, though nobody has reversed it."""
    x = c64([0.3, -1.2])

    def once() -> None:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h = checkpointed_loop(lambda s: tg.tanh(s) + x, x, 4, snapshots=2)
            y = x * 2.0
        assert tape.gradient(y, x).numpy().tolist() == [2.0, 2.0]
        del h

    once()
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        once()
        assert m.live_bytes == base
