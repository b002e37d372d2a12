"""Captured functions on tapes: one record each, with the bits of eager calls."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
import pytest
from budget_cases import live
from captured import alike, bits

import tapegrad as tg
from tapegrad import nest
from tapegrad.capture import arena
from tapegrad.capture.derivative import capture_joint
from tapegrad.capture.planner.fit import bound_bytes
from tapegrad.errors import FunctionError


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def arguments_popped(function):
    @function
    def f(d):
        return tg.sin(d.pop("x")) * d["y"]

    out = []
    for i in range(5):
        x = tg.asarray(data(3, seed=i))
        with tg.GradientTape() as t:
            t.watch(x)
            y = f({"x": x, "y": x})
        out += [y, t.gradient(y, x)]
    return out


def variables_and_streams(function):
    v = tg.Variable(data(3))
    c = tg.Variable(0.0, trainable=False)
    g = tg.random.Generator(3)

    @function
    def f(x):
        c.assign_add(1.0)
        return tg.sin(x * v) * c + g.normal((3,)), v * 2.0

    out = []
    for i in range(6):
        x = tg.asarray(data(3, seed=i))
        with tg.GradientTape(persistent=True) as t:
            t.watch(x)
            a, b = f(x)
            z = tg.sum(a * b)
            q = tg.sum(f(x)[0])
        out += [t.gradient(z, [x, v]), t.gradient(q, [x, v]), c.numpy(), a]
        v.assign_sub(t.gradient(z, v) * 0.1)
    return out


def one_tensor_given_twice(function):
    f = function(lambda a, b: tg.sin(a) * b)
    out = []
    for i in range(5):
        x = tg.asarray(data(3, seed=i))
        with tg.GradientTape() as t:
            t.watch(x)
            y = f(x, x)
        out += [y, t.gradient(y, x)]
    return out


def results_that_are_arguments(function):
    f = function(lambda a, b: (a, a * b, b, None, 3))
    out = []
    for i in range(5):
        x = tg.asarray(data(3, seed=i))
        w = tg.asarray(data(3, seed=i + 9))
        with tg.GradientTape() as t:
            t.watch([x, w])
            r = f(x, w)
            z = tg.sum(r[0] * r[1] * r[2])
        out += [r, t.gradient(z, [x, w])]
    return out


def second_order(function):
    f = function(lambda a: tg.sin(a) * a)
    out = []
    for i in range(5):
        x = tg.asarray(data(3, seed=i))
        with tg.GradientTape() as o:
            o.watch(x)
            with tg.GradientTape() as t:
                t.watch(x)
                y = tg.sum(f(x))
            g = t.gradient(y, x)
        out += [g, o.gradient(g, x)]
    return out


def what_is_not_connected(function):
    v = tg.Variable(data(3))
    f = function(lambda a, b: (tg.sin(a), tg.argmax(b), tg.stop_gradient(b * v)))
    out = []
    for i in range(5):
        x = tg.asarray(data(3, seed=i))
        w = tg.asarray(data(3, seed=i + 9))
        with tg.GradientTape(persistent=True) as t:
            t.watch([x, w])
            r = f(x, w)
            z = tg.sum(r[0]) + tg.sum(r[2])
        out += [t.gradient(z, [x, w, v]), t.gradient(z, [x, w, v], unconnected_gradients="zero")]
    return out


def integers_and_empty_arrays(function):
    f = function(lambda a, i: (tg.take(a, i, axis=0), tg.sum(a[:0])))
    out = []
    for k in range(5):
        x = tg.asarray(data(4, 3, seed=k))
        i = tg.asarray(np.array([k % 4, 1]))
        with tg.GradientTape() as t:
            t.watch(x)
            r = f(x, i)
            z = tg.sum(r[0] * r[0]) + r[1]
        out += [r, t.gradient(z, x)]
    return out


def one_of_several_results(function):
    f = function(lambda a: (tg.sin(a), tg.cos(a)))
    out = []
    for k in range(5):
        x = tg.asarray(data(4, 3, seed=k))
        with tg.GradientTape() as t:
            t.watch(x)
            r = f(x)
        out += [t.gradient(r[1], x)]
    return out


def with_and_without_a_tape(function):
    v = tg.Variable(data(3))
    f = function(lambda a: tg.sum(tg.sin(a) * v))
    out = []
    for k in range(8):
        x = tg.asarray(data(3, seed=k))
        if k % 2:
            out.append(f(x))
        else:
            with tg.GradientTape() as t:
                y = f(x)
            out.append((y, t.gradient(y, v)))
        v.assign_sub(x * 0.1)
    return out


def a_variable_assigned_before_the_gradient(function):
    v = tg.Variable(data(150, 150))
    f = function(lambda a: tg.sum(tg.sin(v) * a))
    g = function(lambda a: v.assign_sub(a * 0.1, read_value=False))
    out = []
    for k in range(6):
        x = tg.asarray(data(150, 150, seed=k))
        with tg.GradientTape() as t:
            y = f(x)
        g(x)
        out.append((y, t.gradient(y, v)))
    return out


PROGRAMS = {
    arguments_popped: ((1, 4),),
    variables_and_streams: ((1, 11),),
    one_tensor_given_twice: ((1, 4),),
    results_that_are_arguments: ((1, 4),),
    second_order: ((1, 4),),
    what_is_not_connected: ((1, 4),),
    integers_and_empty_arrays: ((1, 4),),
    one_of_several_results: ((1, 4),),
    with_and_without_a_tape: ((2, 5),),
    a_variable_assigned_before_the_gradient: ((1, 5), (1, 4)),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_on_a_tape(program):
    alike(program, *PROGRAMS[program])


def taped(f, x):
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(f(x))
    return y, tape.gradient(y, x)


def test_nine_shapes_on_a_tape_warn_once_and_run_eagerly():
    f = tg.function(lambda x: tg.sin(x) * x)
    for n in range(1, 9):
        taped(f, tg.asarray(data(n)))
    with pytest.warns(UserWarning, match="more than 8 signatures") as told:
        for n in (9, 10, 9):
            x = tg.asarray(data(n))
            assert bits(taped(f, x)) == bits(taped(lambda x: tg.sin(x) * x, x))
    assert len(told) == 1
    assert f.stats.fallbacks == {"more than 8 signatures (max_signatures)": 3}


def test_an_exception_in_the_first_call_on_a_tape():
    fail = [True]

    @tg.function
    def f(x):
        if fail[0]:
            raise KeyError("once")
        return tg.sin(x)

    x = tg.asarray(data(3))
    with pytest.raises(KeyError, match="once"):
        taped(f, x)
    fail[0] = False
    for _ in range(3):
        assert bits(taped(f, x)) == bits(taped(tg.sin, x))
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (1, 2, {})


def test_a_float_error_in_a_replay_on_a_tape_leaves_variables():
    v = tg.Variable(np.ones(3, "float32"))

    @tg.function
    def f(x):
        v.assign_add(tg.ones((3,)))
        return v / x

    good, bad = tg.asarray(np.ones(3, "float32")), tg.asarray(np.zeros(3, "float32"))
    with np.errstate(all="raise"):
        for _ in range(4):
            taped(f, good)
            before = bits(v)
            with pytest.raises(FloatingPointError):
                taped(f, bad)
            assert bits(v) == before


def test_a_look_at_a_value_on_a_tape():
    v = tg.Variable(np.ones(3, "float32"))

    @tg.function
    def f(x):
        v.assign_add(x)
        return x * float(tg.sum(x))

    for _ in range(3):
        with pytest.raises(FunctionError, match="test_on_tapes.py:"):
            taped(f, tg.asarray(data(3)))
        assert (v.numpy() == 1.0).all()


def test_a_watched_tensor_from_outside_keeps_its_gradient():
    c, x = tg.asarray(data(5)), tg.asarray(data(5))
    f = tg.function(lambda x: tg.sum(x * c))
    for watched in ([x], [x], [x, c], [x, c]):
        with tg.GradientTape() as tape:
            tape.watch(watched)
            y = f(x)
        for g, want in zip(tape.gradient(y, watched), (c, x), strict=False):
            assert bits(g) == bits(want)
    assert f.stats.replays == 1
    (reason,) = f.stats.fallbacks
    assert "pass that as an argument" in reason and f.stats.fallbacks[reason] == 2


def test_a_result_from_outside_keeps_its_gradient():
    c, x = tg.asarray(data(5)), tg.asarray(data(5))
    f = tg.function(lambda x: (x * 2, c))
    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch([x, c])
            y = tg.sum(f(x)[1] * 3)
        assert bits(tape.gradient(y, c)) == bits(tg.ones(5, "float32") * 3)


def test_a_watched_variable_that_is_not_trainable_keeps_its_gradient():
    v, x = tg.Variable(data(5), trainable=False), tg.asarray(data(5))
    f = tg.function(lambda x: tg.sum(x * v))
    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch([x, v])
            y = f(x)
        assert bits(tape.gradient(y, v)) == bits(x)
    assert [r for r in f.stats.fallbacks if "not trainable" in r]


def test_a_jacobian_through_a_captured_call():
    x = tg.asarray(data(4))
    f = tg.function(lambda x: tg.tanh(x) * 3)
    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        got = tape.jacobian(y, x)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.tanh(x) * 3
        assert np.allclose(got.numpy(), tape.jacobian(y, x).numpy(), rtol=1e-6)
    assert f.stats.replays == 2


def test_a_result_that_is_not_connected_has_no_gradient():
    x, w = tg.asarray(data(3)), tg.asarray(data(3))
    f = tg.function(lambda a, b: (tg.sin(a), tg.stop_gradient(b)))
    for _ in range(3):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            y, z = f(x, w)
        assert tape.gradient(z, x) is None and tape.gradient(z, w) is None and tape.gradient(y, w) is None
        assert bits(tape.gradient(y, x)) == bits(tg.cos(x))
    assert f.stats.replays == 2


def test_a_captured_function_in_a_checkpoint_in_a_captured_function():
    inner = tg.function(lambda x: tg.tanh(x) * x)
    block = tg.recompute_grad(lambda x: inner(tg.sin(x)))

    def step(x):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(block(x) ** 2)
        return y, tape.gradient(y, x)

    def plain(x):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum((tg.tanh(tg.sin(x)) * tg.sin(x)) ** 2)
        return y, tape.gradient(y, x)

    for k in range(3):  # the inner one gets programs of its own before the outer one is captured
        step(tg.asarray(data(4, seed=k)))
    outer = tg.function(step)
    for k in range(4):
        x = tg.asarray(data(4, seed=k))
        assert bits(outer(x)) == bits(step(x))
        assert all(np.allclose(a.numpy(), b.numpy(), rtol=1e-6) for a, b in zip(outer(x), plain(x), strict=True))
    assert (outer.stats.traces, outer.stats.replays, outer.stats.fallbacks) == (1, 6, {})


def test_a_prediction_of_a_captured_function_in_a_checkpoint_computes_nothing():
    inner = tg.function(lambda x: tg.exp(x) * x)

    def step(x, f):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.recompute_grad(lambda x: tg.sin(f(x)))(x))
        return tape.gradient(y, x)

    x = tg.asarray(data(100, 100))
    for _ in range(3):
        step(x, inner)
    got = tg.memory.predict_peak(step, x, inner, budgets=[], least=False)
    assert (
        got.peak_bytes == tg.memory.predict_peak(step, x, lambda x: tg.exp(x) * x, budgets=[], least=False).peak_bytes
    )


def test_a_budget_is_kept_on_a_tape():
    """By the arenas of forward and backward together; what no plan keeps is recorded operation by operation."""

    @tg.custom_gradient
    def heavy(x):
        def backward(ct):
            made = [tg.tanh(ct * k + x) for k in range(12)]  # all are wanted again after the last one is there
            total = made[0]
            for m in made[1:] + made[::-1]:
                total = total @ m
            return total

        return tg.sin(x), backward

    f = lambda x: tg.sum(heavy(x @ x))
    x = tg.asarray(np.random.default_rng(0).normal(size=(32, 32)) * 0.1)
    wanted = taped(f, x)

    def arenas(function):
        """The bytes that stay alive for a function, all of whose results are right."""
        before = live()
        for _ in range(4):
            assert bits(taped(function, x)) == bits(wanted)
        return live() - before

    plain = tg.function(f)
    budget = arenas(plain) * 4 // 5
    g = tg.function(f, budget=budget)
    assert arenas(g) <= budget and g.stats.replays == 3
    with tg.memory_budget(2**30):
        assert bits(taped(plain, x)) == bits(wanted)
    least = tg.function(f, budget=4096)
    for _ in range(3):
        assert bits(taped(least, x)) == bits(wanted)
    assert not least.stats.replays and "need" in next(iter(least.stats.fallbacks))


def deep(width: int = 32, layers: int = 12):
    """A function that draws, counts, reads variables, and takes two arguments; its gradient reads all its layers."""
    rng = np.random.default_rng(1)
    ws = [tg.Variable(rng.normal(size=(width, width)).astype("float32") * 0.2) for _ in range(layers)]
    seen = tg.Variable(np.zeros((), "float32"), trainable=False)

    def f(x, y):
        h = x
        for i, w in enumerate(ws):
            h = tg.tanh(h @ w)
            h = tg.where(tg.random.uniform(h.shape) < 0.9, h, 0.0) if i % 4 == 3 else h
        seen.assign(seen + 1.0)
        return tg.sum(h * y), h

    return f, ws, seen


@pytest.mark.parametrize("part", [0.9, 0.6, 0.45])
def test_the_forward_hands_on_what_fits_and_the_backward_makes_the_rest(part):
    x, y = (tg.asarray(np.random.default_rng(i).normal(size=(256, 32)).astype("float32")) for i in (2, 3))

    def trained(function):
        """The function, the bits of all steps, the bytes that stay alive, and the layers that a step computes."""
        f, ws, seen = deep()
        f, before, found = function(f), live(), []
        tg.random.seed(5)

        def step(y):
            with tg.GradientTape() as tape:
                tape.watch(x)
                loss, h = f(x, y)
                total = loss + tg.sum(tg.sin(h))
            results = [loss, h, *tape.gradient(total, [x, *ws]), seen.read()]
            for w, g in zip(ws, results[-len(ws) - 1 : -1], strict=True):
                w.assign_sub(g * 1e-3)
            found.append(bits(results))

        for _ in range(3):
            step(y)
        with tg.measure() as m:
            step(y)
        held = live() - before
        step(x)
        return f, found, held, m.nodes_run["tanh"]

    plain, wanted, held, layers = trained(tg.function)
    assert trained(lambda f: f)[1] == wanted and layers == 12
    joint = capture_joint(deep()[0], (x, y), {})
    arenas = sum(arena.plan(program, 64).nbytes for program in (joint.forward, joint.backward))
    budget = bound_bytes(joint.forward) + int(part * arenas)
    limited, got, less, more = trained(lambda f: tg.function(f, budget=budget))
    assert got == wanted
    assert limited.stats.replays == plain.stats.replays == 3 and not limited.stats.fallbacks
    assert held - less >= arenas - int(part * arenas) and more > layers


def looped(step, start, n=12, **options):
    """The end of a loop, its gradient, and what was measured."""
    x = tg.asarray(start)
    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            end = tg.checkpointed_loop(step, (x, x * 0, tg.asarray(np.float32(0.5))), n, snapshots=3, **options)
            y = sum(tg.sum(leaf) for leaf in end)
        return end, tape.gradient(y, x), (m.reruns, m.kernel_runs, m.bytes_moved)


def made_one_by_one(captured):
    """Loops record and pull each step of it, as they do steps that are not captured."""
    captured.in_a_row, captured.gradients = lambda state, *_: (0, state), lambda *_: None


def given_with_an_index(state, i):
    u, v, c = state
    return tg.sin(u) * c + tg.astype(i, "float32") * 0.1 - v, u, c


def given_alone(state):
    return given_with_an_index(state, 3)


def takes_turns(state):
    """Each step gives the tensors in another order."""
    u, v, c = state
    return v, tg.sin(u) * c, c


def turns_over(state):
    """After each step another leaf lies by columns: another signature."""
    u, v, c = state
    return tg.transpose(v), u + tg.sum(tg.exp(u)) * 1e-3, c + tg.sum(v) * 1e-3


@pytest.mark.parametrize("step", [given_alone, given_with_an_index, takes_turns, turns_over])
def test_steps_that_no_tape_keeps_are_replayed_in_a_row(step):
    captured, single, made = tg.function(step), tg.function(step), []
    start = data(9, 9)
    looped(captured, start)  # programs are made and compared
    in_a_row = captured.in_a_row

    def counted(*args):
        done, state = in_a_row(*args)
        made.append(done)
        return done, state

    captured.in_a_row = counted
    made_one_by_one(single)
    for _ in range(3):
        made.clear()
        *wanted, figures = looped(step, start)
        *ours, counts = looped(captured, start)
        *theirs, as_many = looped(single, start)
        assert bits(ours) == bits(theirs) == bits(wanted)
        assert counts[0] == as_many[0] == figures[0]
        assert counts[1] <= as_many[1] and counts[2] < as_many[2]  # a gradient needs not all that a call computes
    assert sum(made) > 20 and (max(made) > 3) == (step is not turns_over)
    assert captured.stats.fallbacks == single.stats.fallbacks == {}


def reads_a_variable(state):
    return (state[0] * SCALE, *state[1:])


def draws(state):
    return (state[0] + tg.random.normal(state[0].shape), *state[1:])


def counts(state):
    COUNT.assign_add(1.0)
    return (tg.sin(state[0]), *state[1:])


SCALE, COUNT = tg.Variable(0.5), tg.Variable(0.0, trainable=False)


@pytest.mark.parametrize("step", [reads_a_variable, draws, counts])
def test_steps_that_read_or_write_more_than_their_state_are_made_one_by_one(step):
    captured = tg.function(step)
    for _ in range(2):
        found = []
        for f in (step, captured):
            tg.random.seed(3)
            COUNT.assign(0.0)
            found.append(bits((looped(f, data(5))[:2], COUNT.numpy())))
        assert found[0] == found[1]
    state = tuple(tg.asarray(data(5, seed=i)) for i in range(3))
    assert captured.in_a_row(state, 4, lambda f, *args: f(*args), lambda _: ()) == (0, state)


def test_a_state_that_changes_its_dtype_is_refused_at_that_step():
    captured = tg.function(lambda state: tg.astype(state, "float64"))
    x = tg.asarray(data(5))
    with tg.GradientTape() as tape:
        tape.watch(x)
        for _ in range(3):
            captured(x)  # known, so that a loop replays it at once
        with pytest.raises(tg.errors.StructureError, match="step 0 returned the state float64"):
            tg.checkpointed_loop(captured, x, 3, snapshots=1)


def test_no_steps_go_in_a_row_where_each_is_recorded_or_limited():
    captured = tg.function(given_alone)
    state = (tg.asarray(data(5)), tg.asarray(data(5, seed=1)), tg.asarray(np.float32(0.5)))

    def made(f=captured):
        return f.in_a_row(state, 4, lambda f, *args: f(*args), lambda _: ())[0]

    with tg.GradientTape() as tape:
        tape.watch(state[0])
        captured(state)
        assert made() == 0  # the tape keeps a record of each
    with tg.GradientTape() as tape:
        tape.watch(state)
        end = tg.checkpointed_loop(captured, state, 6, snapshots=2)
        with tg.memory_budget("1MiB"):
            again = tg.checkpointed_loop(captured, state, 6, snapshots=2)
    assert bits(end) == bits(again)


def with_others(state):
    """Beside the float tensors a count, a number, and one tensor that is given on as it is."""
    u, n, factor, kept, (a, b) = state
    return tg.sin(u) * factor + kept, n + 1, factor, kept, (b * a, a)


def ignores(state):
    """The gradient of two leaves depends on none, or on some, of the cotangents."""
    u, n, factor, kept, (a, b) = state
    return u * 0.5, n, factor, tg.zeros_like(kept), (tg.stop_gradient(a) * b, tg.exp(-b))


def given_twice(state):
    """From the second step on two leaves are one tensor."""
    u, n, factor, kept, (a, _) = state
    return u * a, n, factor, kept, (a, a)


@pytest.mark.parametrize("step", [with_others, ignores, given_twice])
@pytest.mark.parametrize("wanted", [(0,), (0, 3), (3, 4)])
@pytest.mark.parametrize("schedule", ["revolve", "mixed", "sqrt"])
def test_gradients_go_through_steps_without_a_record(step, wanted, schedule):
    def looped(step, persistent=False):
        xs = [tg.asarray(data(5, seed=i)) for i in range(4)]
        state = xs[0], tg.asarray(np.int64(0)), 0.9, xs[1], (xs[2], xs[3])
        with tg.GradientTape(persistent=True) as tape:
            for x in xs:
                tape.watch(x)
            end = tg.checkpointed_loop(step, state, 9, snapshots=3, schedule=schedule)
            leaves = [leaf for leaf in nest.flatten(end) if isinstance(leaf, tg.Tensor) and leaf.dtype == "float32"]
            y = sum(tg.sum(tg.cos(leaves[i])) for i in wanted if i < len(leaves))
        return end, tape.gradient(y, xs), tape.gradient(y, xs[0])

    captured, made = tg.function(step), []
    gradients = captured.gradients

    def noted(*args):
        found = gradients(*args)
        made.append(found is not None)
        return found

    captured.gradients = noted
    for _ in range(2):
        made.clear()
        assert bits(looped(captured)) == bits(looped(step))
    assert any(made)


def test_one_argument_given_twice_has_one_gradient():
    captured, x = tg.function(lambda a, b: a * b), tg.asarray(data(5))
    plainly = lambda f, *args: f(*args)
    for pair in ((x, x), (x, tg.sin(x))):
        with tg.GradientTape() as tape:
            tape.watch(x)
            captured(*pair)
    assert captured.gradients((x, x), [x], plainly, set()) is None
    a, b = x, tg.sin(x)
    assert bits(captured.gradients((a, b), [x], plainly, set())) == bits([x * b, x * a])
    assert captured.gradients((a, b), [None], plainly, set()) == [None, None]
    with tg.GradientTape() as tape:
        tape.watch(x)
        assert captured.gradients((a, b), [x], plainly, set()) is None  # that tape would have to record it


def test_a_step_that_uses_what_a_gradient_is_asked_for_is_recorded():
    kept = tg.asarray(data(5, seed=9))
    step = tg.function(lambda u: tg.sin(u) * kept)
    for _ in range(2):
        with tg.GradientTape() as tape:
            x = tg.asarray(data(5))
            tape.watch(x)
            y = tg.sum(tg.checkpointed_loop(step, x, 6, snapshots=2))  # its program is known now
        tape.gradient(y, x)
    found = []
    for f in (step, lambda u: tg.sin(u) * kept):
        with tg.GradientTape() as tape:
            tape.watch([x, kept])
            y = tg.sum(tg.checkpointed_loop(f, x, 6, snapshots=2))
        found.append(bits(tape.gradient(y, [x, kept])))
    assert found[0] == found[1]


def test_gradients_without_a_record_are_differentiated_like_others():
    plain, x = lambda u: tg.sin(u) * 1.5, tg.asarray(data(5))
    captured = tg.function(plain)

    def twice(step):
        with tg.GradientTape() as outer:
            outer.watch(x)
            with tg.GradientTape() as inner:
                inner.watch(x)
                y = tg.sum(tg.checkpointed_loop(step, x, 5, snapshots=2))
            g = inner.gradient(y, x)
            z = tg.sum(g * g)
        return g, outer.gradient(z, x)

    wanted = bits(twice(plain))
    for _ in range(3):
        assert bits(twice(captured)) == wanted

    def jacobian(step):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.checkpointed_loop(step, x, 5, snapshots=2)
        return tape.jacobian(y, x)

    wanted = bits(jacobian(plain))
    for _ in range(2):
        assert bits(jacobian(captured)) == wanted


def test_values_that_the_function_keeps_have_their_gradients():
    kept = []

    def keeps(x):
        kept.append(tg.sin(x) * 2.0)
        return tg.sum(kept[-1])

    def both(f):
        x = tg.asarray(data(5))
        with tg.GradientTape() as tape:
            tape.watch(x)
            z = f(x) + tg.sum(kept[-1])
        return tape.gradient(z, x)

    captured = tg.function(keeps)
    with pytest.raises(
        tg.errors.FunctionError, match=r"the result of multiply, which the function has kept .*return it"
    ):
        both(captured)
    for _ in range(3):
        assert bits(both(captured)) == bits(both(keeps))
    assert list(captured.stats.fallbacks) == [
        "on a tape: it keeps the result of multiply, which a replay would not renew"
    ]


def test_values_in_a_cycle_that_nothing_holds_are_not_kept():
    def cycle(x):
        holder = []
        holder += [holder, tg.sin(x)]
        return tg.sum(holder[1] * x)

    captured, x = tg.function(cycle), tg.asarray(data(5))
    for _ in range(3):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = captured(x)
        tape.gradient(y, x)
    assert captured.stats.replays == 2 and not captured.stats.fallbacks


def test_a_captured_function_inside_one_may_draw_and_write():
    drop, count = tg.nn.Dropout(0.3), tg.Variable(0.0, trainable=False)

    def draws(z):
        count.assign_add(1.0)
        return drop(z, training=True)

    inner = tg.function(draws)
    outer, x = tg.function(lambda x: tg.sum(inner(x) ** 2)), tg.asarray(data(5))
    for f in (inner, outer, outer, outer):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(f(x))
        assert tape.gradient(y, x).shape == x.shape
    assert count.numpy() == 4.0


def test_steps_are_rerun_under_the_autocast_of_the_first_run():
    w = tg.asarray(data(8, 8))
    plain = lambda state: (tg.astype(tg.tanh(state[0] @ state[1]), "float32"), state[1])
    step = tg.function(plain)

    def gradients(step, autocast):
        with tg.GradientTape() as tape:
            tape.watch(w)
            with tg.autocast("float16") if autocast else nullcontext():
                y = tg.checkpointed_loop(step, (tg.asarray(data(8, 8, seed=1)), w), 9, snapshots=2)[0]
        return bits(tape.gradient(y, w))

    for autocast in (False, True, False, True, True):
        assert gradients(step, autocast) == gradients(plain, autocast)


def test_replays_in_a_loop_are_compared_without_floating_point_errors():
    """Cotangents of 1 would overflow, those of the loop do not."""
    step = tg.function(lambda state: (state[0] * 1.0, state[1] + state[0] * 300.0 * 300.0))
    x = tg.asarray(data(4).astype("float16") * np.float16(1e-3))
    for errors in ("ignore", "raise", "raise"):
        with tg.GradientTape() as tape, np.errstate(all=errors):
            tape.watch(x)
            if errors == "ignore":
                y = sum(step((x, x))) + sum(step((x, x * 1.0)))
            else:
                y = tg.checkpointed_loop(step, (x, x * 1.0), 6, snapshots=1)[1]
            assert np.isfinite(tape.gradient(y * np.float16(1e-3), x).numpy()).all()


def test_a_captured_step_takes_no_more_memory_in_a_loop_than_recorded_steps_do():
    """Many values are carried from its forward to its backward: one program of both would hold them in its arena."""

    def carries_much(x):
        for _ in range(6):
            x = (tg.sin(x * 1.01) @ tg.cos(x)) * 0.01
        return x

    def peak(step):
        x = tg.asarray(data(100, 100))
        with tg.measure() as m, tg.GradientTape() as tape:
            tape.watch(x)
            tape.gradient(tg.sum(tg.checkpointed_loop(step, x, 12, snapshots=3)), x)
        return m.peak_bytes

    def third(step):
        return [peak(step) for _ in range(3)][-1]

    single = tg.function(carries_much)
    made_one_by_one(single)
    recorded = third(single)
    single.release()
    assert third(tg.function(carries_much)) <= recorded


def test_the_arenas_of_a_loop_go_at_once_when_they_are_released():
    captured, before = tg.function(given_alone), live()
    looped(captured, data(90, 90))
    looped(captured, data(90, 90))
    held = live()
    gc.collect()
    gc.disable()
    try:
        captured.release()
        assert live() <= before + 4096 < held  # small constants stay
    finally:
        gc.enable()
