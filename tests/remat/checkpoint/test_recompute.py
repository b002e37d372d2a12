"""recompute_grad: gradients, values, runs, random numbers, state, errors, and what stays in memory."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from checks import Counted, bits_equal, c64, no_garbage, same, values, var64

import tapegrad as tg
from tapegrad import errors, nest

SMALL, BIG = 6, 20_000  # elements: run at once, and lazily


def by_tape(f: Callable, sources: list, *args: Any, weights: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """The value of ``f(*args, **kwargs)`` and the gradients of all its tensors in ``sources``."""
    with tg.GradientTape() as tape:
        tape.watch([s for s in sources if not isinstance(s, tg.Variable)])
        y = f(*args, **kwargs)
        targets = [leaf for leaf in nest.flatten(y) if isinstance(leaf, (tg.Tensor, tg.Variable))]
    return values(y), values(tape.gradient(targets, sources))


def agrees(f: Callable, sources: list, *args: Any, **kwargs: Any) -> None:
    """The checkpointed function has the values and gradients of the plain one, to the bit."""
    plain = by_tape(f, sources, *args, **kwargs)
    assert bits_equal(by_tape(tg.recompute_grad(f), sources, *args, **kwargs), plain)


# What gets gradients


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_arguments_keywords_captures_and_variables(size: int) -> None:
    x = np.linspace(0.2, 1.5, size)
    a, b, c, d, unused = (c64(x + k) for k in range(5))
    v, frozen = var64(x * 2), var64(x * 3, trainable=False)

    def f(p: Any, q: Any, *, k: Any = None, rest: Any = None) -> Any:
        return {"y": tg.tanh(p * q[0]) * k * d * v + v * frozen, "z": (tg.sum(p * d * rest["r"]) * v,)}

    agrees(f, [a, b, c, d, v, unused], a, [b], k=c, rest={"r": b})
    agrees(lambda: f(a, [b], k=c, rest={"r": a}), [a, b, c, d, v])
    agrees(functools.partial(f, a), [a, b, c, v], q=[b], k=c, rest={"r": c})


def test_a_slice_of_an_argument_takes_no_bytes_of_its_own() -> None:
    x = c64(np.ones(BIG))
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        live = m.live_bytes
        half = tg.recompute_grad(lambda q: q[: BIG // 2])(x)
        assert (m.live_bytes, m.peak_bytes) == (live, live)
        whole = tg.recompute_grad(lambda q: tg.reshape(tg.sin(q), (2, -1)))(x)
        assert m.live_bytes == m.peak_bytes == live + 8 * BIG // 512 * 512 + 512
    del half, whole


def test_what_no_tape_keeps_is_computed_and_is_the_functions_own() -> None:
    """But for an argument that is returned as it is."""
    x, made = c64(np.ones(BIG)), list[Any]()
    f = tg.recompute_grad(lambda q: (q, made.append(tg.sin(q) * 2.0) or made[-1]))
    for recorded in (False, True):
        with tg.GradientTape() if recorded else nullcontext():
            y = f(x)
        assert y[0] is not x and y[1] is made[-1] and np.array_equal(y[1], np.sin(x.numpy()) * 2.0)


@pytest.mark.parametrize("check", [None, "values"])
def test_what_is_computed_to_be_compared_is_foreseen(check: str | None) -> None:
    x = c64(np.linspace(0.1, 1.0, BIG))
    f = tg.recompute_grad(lambda q: (tg.sin(q) * 2.0, tg.exp(q) + 1.0, tg.cos(q)), check=check)

    def gradient() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(f(x)[0])
        return tape.gradient(y, x)

    gradient()  # constants are there by then
    gc.collect()
    foreseen = tg.memory.predict_peak(gradient, budgets=[], least=False)
    with tg.measure() as m:
        gradient()
    assert foreseen.peak_bytes == m.peak_bytes


@pytest.mark.parametrize("wrap", [
    tg.recompute_grad, functools.partial(tg.recompute_grad, policy=tg.policies.save_nothing),
    lambda f: lambda q: tg.checkpointed_loop(f, q, 4, snapshots=2), lambda f: lambda q: tg.reversible(f, f)(q, q)[1],
], ids=["recompute", "policy", "loop", "reversible"])  # fmt: skip
def test_what_a_function_captures_is_kept_by_nobody_else(wrap: Callable) -> None:
    x = c64(np.ones(512))
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        captured = [x * 2.0]
        y = wrap(lambda q: q + captured[0])(x)
        before = m.live_bytes
        captured.clear()
        assert m.live_bytes == before - x.nbytes
        del y


@pytest.mark.parametrize(("cut", "kept"), [(slice(BIG // 2), 0.5), (slice(None, None, 2), 1.0)])
def test_a_slice_of_a_result_is_copied_where_it_has_no_gaps(cut: slice, kept: float) -> None:
    """What reads one with gaps might round otherwise if it lay in memory otherwise."""
    x, f = c64(np.ones(BIG)), tg.recompute_grad(lambda q: tg.sin(q)[cut])
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        live = m.live_bytes
        y = f(x)
        assert m.live_bytes - live == -(-int(8 * BIG * kept) // 512) * 512
        assert y.shape == (BIG // 2,)


def test_variables_in_every_role() -> None:
    v, frozen, x = var64(3.0), var64(5.0, trainable=False), c64(2.0)
    agrees(lambda q, w: q * w * w * v, [x, v], x, v)  # argument and captured
    agrees(lambda q, *, w: q * w * w, [x, v], x, w=v)
    agrees(lambda q: (q * 2.0, v), [x, v], x)  # returned
    agrees(lambda q, w: q * 2.0, [x], x, v)  # an argument that is not read
    with tg.GradientTape() as tape:
        tape.watch(frozen)
        y = tg.recompute_grad(lambda q: q * frozen * frozen)(x)
    assert tape.watched_variables() == (frozen,)
    same(tape.gradient(y, [frozen, x]), [20.0, None])
    with tg.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = tg.recompute_grad(lambda q: q * v)(x)
    same(tape.gradient(y, [x, v]), [3.0, None])


def test_a_capture_computed_from_watched_values() -> None:
    v, x = var64(3.0), c64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        h = v * x  # of a variable and a tensor
        y = tg.recompute_grad(lambda q: q * h * h)(x)
        z = tg.recompute_grad(lambda q: (q * 1.0, h))(x)  # only returned
    same(tape.gradient(y, [x, v, h]), [36.0 + 2 * 2 * 6 * 3, 2 * 6 * 2 * 2, 24.0])
    same(tape.gradient(z, [x, v]), [1.0 + 3.0, 2.0])


def test_the_same_tensor_twice_and_results_that_are_arguments() -> None:
    x, y = c64([1.0, 2.0]), c64([3.0, 4.0])
    agrees(lambda a, b: a * a + b, [x], x, x)
    agrees(lambda a: (a, a * 2.0, a), [x], x)
    agrees(lambda a, b: (b, a), [x, y], x, y)
    assert tg.recompute_grad(lambda a: a)(x) is not x, "without a tape, too"


def test_results_of_any_kind() -> None:
    marker = object()

    def f(q: Any) -> Any:
        return [q * q, None, 7, 2.5, "s", marker, {"k": tg.asarray(3), "a": np.ones(2)}, (), (q * 3.0,)]

    x = c64(2.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.recompute_grad(f)(x)
    assert y[1:6] == [None, 7, 2.5, "s", marker] and type(y[3]) is float and y[7] == ()
    assert int(y[6]["k"]) == 3 and type(y[6]["a"]) is np.ndarray and type(y[8]) is tuple
    same(tape.gradient([y[0], y[8]], x), 7.0)


def test_python_values_stay_python_values_in_the_rerun() -> None:
    x, marker, seen = c64(2.0), object(), []

    def f(flag: Any, k: Any, r: Any, nothing: Any, thing: Any, q: tg.Tensor, text: str, *, mode: Any = None) -> Any:
        seen.append((flag, k, type(k), r, type(r), nothing, thing, text, mode))
        return q * q * r if flag is True else q

    _, (g,) = by_tape(tg.recompute_grad(f), [x], True, 3, 0.5, None, marker, x, "t", mode=[False])
    same(g, 2.0)
    assert seen == [(True, 3, int, 0.5, float, None, marker, "t", [False])] * 2


def test_mixed_dtypes_integers_and_nothing() -> None:
    a, b = tg.asarray(np.float32(2.0)), c64(3.0)
    agrees(lambda p, q, k: (p * p, q * q * k), [a, b], a, b, tg.asarray(2))
    empty = c64(np.zeros((0, 3)))
    agrees(lambda p: p * p, [empty], empty)
    x = c64([1.0, -2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y, k = tg.recompute_grad(lambda q: (q * q, tg.argmax(q)))(x)
    assert int(k) == 0
    same(tape.gradient([y, k], x), [2.0, -4.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.recompute_grad(lambda q: tg.stop_gradient(q) + tg.astype(tg.asarray(1), "float64"))(x)
    same(tape.gradient(y, x), [0.0, 0.0])


def test_independent_of_all_inputs_it_is_a_constant() -> None:
    f = Counted(lambda q: q * q)
    x, other = c64(2.0), c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch(other)
        y = tg.recompute_grad(f)(x)
    assert tape.gradient(y, [x, other]) == [None, None] and f.runs == 1


# Reruns


def test_no_rerun_that_no_source_needs() -> None:
    a, b, c = c64(2.0), c64(3.0), c64(5.0)
    first, second = Counted(lambda q: q * q), Counted(lambda q: q * 3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([a, b, c])
        ya = tg.recompute_grad(first)(a)
        y = tg.recompute_grad(second)(b) * ya
        aside = c * 2.0
    first.take(), second.take()
    for sources, wanted, runs in (
        ([c], [None], (0, 0)), ([b], [12.0], (0, 1)), ([a], [36.0], (1, 0)), ([a, b], [36.0, 12.0], (1, 1)),
        ([ya], [9.0], (0, 0)), ([y], [1.0], (0, 0)), ([], [], (0, 0)),
    ):  # fmt: skip
        same(tape.gradient(y, sources), wanted)
        assert (first.take(), second.take()) == runs, sources
    same(tape.gradient(aside, [a, c]), [None, 2.0])
    assert (first.take(), second.take()) == (0, 0)


def test_one_rerun_serves_a_whole_jacobian() -> None:
    x, v = c64([[1.0, 2.0], [3.0, 4.0]]), var64([3.0, 4.0])
    f = Counted(lambda q: tg.sin(q) * v)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, plain = tg.recompute_grad(f)(x), f.f(x)
    assert f.take() == 1
    assert bits_equal(tape.jacobian(y, [x, v]), tape.jacobian(plain, [x, v])) and f.take() == 1
    assert bits_equal(tape.batch_jacobian(y, x), tape.batch_jacobian(plain, x)) and f.take() == 1
    assert bits_equal(tape.gradient(y, [x, v]), tape.gradient(plain, [x, v])) and f.take() == 1


def test_nested_and_doubled_checkpoints() -> None:
    x, v = c64(0.5), var64(1.5)
    inner, outer = Counted(lambda q: tg.sin(q * v)), Counted(lambda q: g(g(q)) * v)
    g = tg.recompute_grad(inner)
    plain = by_tape(lambda q: inner.f(inner.f(q)) * v, [x, v], x)
    inner.take()
    assert bits_equal(by_tape(tg.recompute_grad(outer), [x, v], x), plain)
    assert (outer.take(), inner.take()) == (2, 6)
    twice = tg.recompute_grad(tg.recompute_grad(inner))
    assert bits_equal(by_tape(twice, [x, v], x), by_tape(inner.f, [x, v], x)) and twice.__wrapped__.__wrapped__ is inner


def test_two_tapes_and_captures_that_only_one_watches() -> None:
    x, c = c64(2.0), c64(3.0)
    f = Counted(lambda q: q * q * c)
    with tg.GradientTape() as a, tg.GradientTape() as b, tg.GradientTape() as dropped:
        a.watch(x), b.watch(c), dropped.watch([x, c])
        y = tg.recompute_grad(f)(x)
    del dropped
    f.take()
    same([b.gradient(y, [x, c]), a.gradient(y, [x, c])], [[None, 4.0], [12.0, None]])
    assert f.take() == 2


def test_a_capture_watched_later_or_no_more_is_no_error() -> None:
    x, c = c64(2.0), c64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.recompute_grad(lambda q: q * q * c)(x)
        tape.watch(c)
    same(tape.gradient(y, [x, c]), [12.0, None])
    with tg.GradientTape() as a:
        a.watch(x)
        with tg.GradientTape() as b:
            b.watch(c)
            y = tg.recompute_grad(lambda q: q * q * c)(x)
            b.reset()
    same(a.gradient(y, x), 12.0)
    assert b.watched_variables() == ()


def test_a_reset_tape_learns_nothing_from_another_tapes_rerun() -> None:
    v, x = var64(3.0), c64(2.0)
    with tg.GradientTape() as a, tg.GradientTape() as b:
        a.watch(x), b.watch(x)
        y = tg.recompute_grad(lambda q: q * v)(x)
        b.reset()
    same(a.gradient(y, [x, v]), [3.0, 2.0])
    assert b.watched_variables() == () and a.watched_variables() == (v,)


def test_recording_stopped_around_and_tapes_inside() -> None:
    x, v = c64(2.0), var64(3.0)
    f = Counted(lambda q: q * q)
    with tg.GradientTape() as tape:
        tape.watch(x)
        with tape.stop_recording():
            y = tg.recompute_grad(f)(x)
        z = y * x
    same(tape.gradient(z, x), 4.0)
    assert f.take() == 1

    def slope(q: tg.Tensor) -> tg.Tensor:
        with tg.GradientTape() as inside:
            inside.watch(q)
            z = q * q * q * v
        return inside.gradient(z, q) * q

    agrees(slope, [x, v], x)

    def hides(q: tg.Tensor) -> tg.Tensor:
        with tape.stop_recording():
            return q * 1.0

    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(errors.TapeStateError, match="not recording here"):
            tg.recompute_grad(hides)(x)
        y = x * x
    same(tape.gradient(y, x), 4.0)


def test_called_in_one_thread_differentiated_in_others() -> None:
    x, v, found = c64(np.linspace(0, 1, 5)), var64(2.0), []
    f = tg.recompute_grad(lambda q: tg.tanh(q * v) * tg.random.uniform((5,), dtype="float64"))
    tg.random.seed(5)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
    v.assign(-7.0)
    wanted = values(tape.gradient(y, [x, v]))
    threads = [threading.Thread(target=lambda: found.append(values(tape.gradient(y, [x, v])))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(bits_equal(g, wanted) for g in found)


# Random numbers


def draws(q: tg.Tensor) -> tg.Tensor:
    mask = tg.random.bernoulli(q.shape, 0.5, dtype="float64") * tg.random.normal(q.shape, dtype="float64")
    return q * q * mask * c64(np.random.standard_normal(q.shape)) * random.random() * random.gauss(0, 1)


def streams() -> tuple:
    return (values(tg.random.uniform((2,))).tolist(), np.random.rand(2).tolist(), random.random())


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_random_numbers_replay_and_streams_are_untouched(size: int) -> None:
    x = c64(np.linspace(1, 2, size))

    def run(f: Callable) -> tuple:
        tg.random.seed(3), np.random.seed(3), random.seed(3)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = f(x) * f(x)
        between = streams()
        g = tape.gradient(y, x)
        return values(y), values(g), between, streams()

    plain, again = run(draws), run(tg.recompute_grad(draws))
    assert bits_equal(plain[:2], again[:2]) and plain[2:] == again[2:]


def test_drawing_between_forward_and_gradient_changes_nothing() -> None:
    x = c64(np.ones(SMALL))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.recompute_grad(draws)(x)
    before = values(tape.gradient(y, x))
    same(before, 2 * y.numpy())
    tg.random.seed(99), np.random.seed(99), random.seed(99)
    assert bits_equal(tape.gradient(y, x), before)


def test_a_generator_of_ones_own_and_dropout_replay() -> None:
    own = tg.random.Generator(7)
    x = c64(np.ones(50))
    _, (g,) = by_tape(tg.recompute_grad(lambda q: q * tg.random.uniform((50,), generator=own)), [x], x)
    fresh = tg.random.Generator(7)
    same(g, tg.random.uniform((50,), generator=fresh).numpy())
    assert own.state == fresh.state

    layer = tg.nn.Dropout(0.5)
    x = tg.asarray(np.ones((8, 50), np.float32))
    y, (g,) = by_tape(tg.recompute_grad(layer), [x], x, training=True)
    assert np.array_equal(g, y) and 0 < (y == 0).mean() < 1


# Variables that change


def test_a_variable_assigned_between_forward_and_gradient() -> None:
    v, w, x = var64(3.0), var64(5.0), c64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.recompute_grad(lambda q, u: (q * q * v * u, v))(x, w)
    v.assign(100.0), w.assign(200.0)
    same(tape.gradient(y, [x, v, w]), [60.0, 21.0, 12.0])
    same([v, w], [100.0, 200.0])
    same(tape.gradient(y, v), 21.0)


@pytest.mark.filterwarnings("ignore:gradient:tapegrad.errors.IntegerWatchWarning")  # integers are among the sources
def test_state_changes_once_and_gradients_are_those_of_the_first_run() -> None:
    x = c64(2.0)

    def run(wrap: Callable) -> tuple:
        v, count = var64(3.0), tg.Variable(0, trainable=False)

        def f(q: tg.Tensor) -> tg.Tensor:
            before = q * v
            v.assign(before + 1.0)
            count.assign_add(1)
            middle = before * v
            v.assign_sub(2.0)
            return middle * v * v

        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = wrap(f)(x)
            z = y * v
        found = [values(tape.gradient(z, [x, v, count])) for _ in range(2)]
        return values(z), found, v.numpy(), count.numpy()

    assert bits_equal(run(tg.recompute_grad), run(lambda f: f))


def test_moving_averages_move_once() -> None:
    x = c64(np.random.default_rng(0).normal(size=(16, 3)))

    def run(wrap: Callable) -> tuple:
        mean, scale = var64(np.zeros(3), trainable=False), var64(np.ones(3))

        def norm(q: tg.Tensor) -> tg.Tensor:
            m = tg.mean(q, axis=0)
            mean.assign(mean * 0.9 + m * 0.1)
            return (q - m) / tg.sqrt(tg.var(q, axis=0) + 1e-3) * scale

        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.tanh(wrap(norm)(x)))
        return values(tape.gradient(y, [x, scale])), mean.numpy()

    assert bits_equal(run(tg.recompute_grad), run(lambda f: f))


def test_a_variable_made_in_the_first_run_and_kept() -> None:
    class Lazy:
        w = None

        def __call__(self, q: tg.Tensor) -> tg.Tensor:
            if self.w is None:
                self.w = var64(3.0)
            y = q * q * self.w
            self.w.assign_add(1.0)
            return y * self.w

    for wrap in (tg.recompute_grad, lambda f: f):
        x, f = c64(2.0), Lazy()
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = wrap(f)(x)
        same(tape.gradient(y, [x, f.w]), [48.0, 28.0])
        same(f.w, 4.0)


def test_a_variable_made_anew_in_each_run_is_of_that_run() -> None:
    """The argument's gradient is right; the first run's variable, of which the rerun knows nothing, gets zeros."""
    x, made = c64(2.0), []

    def f(q: tg.Tensor) -> tg.Tensor:
        made.append(var64(3.0))
        return q * q * made[-1]

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.recompute_grad(f)(x)
    gx, gv = tape.gradient(y, [x, made[0]])
    assert (gx.item(), gv.item(), len(made)) == (12.0, 0.0, 2)


def changing(first: Callable, then: Callable) -> Callable:
    runs = iter([first])
    return lambda *a: next(runs, then)(*a)


def test_another_rerun_is_an_error_and_the_tape_survives() -> None:
    x, v, w, c, d = c64([2.0, 1.0]), var64(3.0), var64(4.0), c64(5.0), c64(6.0)
    cases = [
        (lambda q: q * q, lambda q: [q * q], "structure"),
        (lambda q: [q * q], lambda q: (q * q,), "structure"),
        (lambda q: {"a": q}, lambda q: {"b": q}, "structure"),
        (lambda q: q * q, lambda q: tg.sum(q * q), "the first run"),
        (lambda q: q * q, lambda q: tg.astype(q * q, "float32"), "the first run"),
        (lambda q: q * q, lambda q: None, "the first run"),
        (lambda q: q * v, lambda q: q * w, "used the variables"),
        (lambda q: q * v, lambda q: q * 3.0, "used the variables"),
        (lambda q: q * 3.0, lambda q: q * v, "used the variables"),
        (lambda q: q * c, lambda q: q * d, "other watched tensors"),
        (lambda q: q * c, lambda q: q * 5.0, "other watched tensors"),
        (lambda q: q * 5.0, lambda q: q * c, "other watched tensors"),
    ]
    for first, then, says in cases:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch([x, c, d])
            y = tg.recompute_grad(changing(first, then))(x)
            z = x * x
        with pytest.raises(ValueError, match=says) as e:
            tape.gradient(y, x)
        assert isinstance(e.value, errors.RecomputeError)
        same(tape.gradient(z, x), [4.0, 2.0])


@pytest.mark.parametrize("reads_first", [True, False])
def test_an_argument_that_only_one_of_the_runs_reads_has_a_gradient_all_the_same(reads_first: bool) -> None:
    """A captured step, replayed, may tell of more arguments than when it ran eagerly."""
    runs = [lambda p, q: p * q, lambda p, q: p * 3.0]
    p, q = c64([2.0, 1.0]), c64([5.0, 7.0])
    with tg.GradientTape() as tape:
        tape.watch([p, q])
        y = tg.recompute_grad(changing(*(runs if reads_first else reversed(runs))))(p, q)
    wanted = [[3.0, 3.0], [0.0, 0.0]] if reads_first else [[5.0, 7.0], [2.0, 1.0]]
    same(tape.gradient(y, [p, q], unconnected_gradients="zero"), wanted)


def test_values_are_checked_when_asked() -> None:
    factor, x = [3.0], c64([2.0, 1.0])
    for size in (2, BIG):
        x = c64(np.ones(size))
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tg.recompute_grad(lambda q: q * q * factor[0], check="values")(x)
        same(tape.gradient(y, x), 6 * x.numpy())
        factor[0] = np.nextafter(3.0, 4.0)  # the last bit
        with pytest.raises(ValueError, match="other values than the first run"):
            tape.gradient(y, x)
        factor[0] = 3.0
        same(tape.gradient(y, x), 6 * x.numpy())


def test_arguments_changed_in_between_or_by_the_function_itself() -> None:
    a, held, x = np.array([2.0, 3.0]), [c64(4.0), c64(5.0)], c64([1.0, 1.0])

    def f(q: tg.Tensor, arrays: dict, stack: list) -> tg.Tensor:
        top = stack.pop()
        arrays["a"][0] += 1.0
        return q * q * arrays["a"] * top * stack[0]

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.recompute_grad(f)(x, {"a": a}, held)
    assert len(held) == 1 and a[0] == 3.0
    a[:] = 100.0
    held.clear()
    for _ in range(2):
        same(tape.gradient(y, x), [2 * 3.0 * 20, 2 * 3.0 * 20])
    assert a.tolist() == [100.0, 100.0]


def test_exceptions_forward_and_in_the_rerun() -> None:
    v, x = var64(3.0), c64(2.0)
    fail = {"now": True}

    def f(q: tg.Tensor) -> tg.Tensor:
        v.assign_add(1.0)
        y = q * v * tg.random.uniform((), dtype="float64")
        if fail["now"]:
            raise ZeroDivisionError
        return y

    g = tg.recompute_grad(f)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with pytest.raises(ZeroDivisionError):
            g(x)
        fail["now"] = False
        y = g(x)
    state = tg.random.default_generator.state
    fail["now"] = True
    with tg.measure() as m, pytest.raises(ZeroDivisionError):
        tape.gradient(y, x)
    assert m.reruns == 1 and tg.random.default_generator.state == state
    same(v, 5.0)
    fail["now"] = False
    same(tape.gradient(y, x), y.numpy() / 2)
    same(v, 5.0)
    with tg.measure() as m:
        temporary = tg.exp(x)
    assert m.live_by_category.get("rematerialized", 0) == 0, temporary


# The old form


@pytest.mark.parametrize("data_dep", [None, True, False])
@pytest.mark.parametrize("tuples", [True, False])
def test_options_change_no_bit(data_dep: Any, tuples: bool) -> None:
    x, w, k = c64([2.0, np.inf]), var64(3.0), tg.asarray([1, 2])

    @tg.recompute_grad(use_data_dep=data_dep, tupleize_grads=tuples)
    def f(q: tg.Tensor, k: tg.Tensor) -> tuple:
        return q * w * k, q + 1.0

    with np.errstate(all="ignore"):
        found = by_tape(f, [x, w], x, k)
        assert bits_equal(found, by_tape(f.__wrapped__, [x, w], x, k))


def test_a_nan_from_above_does_not_spread() -> None:
    x, z = c64([1.0, 3.0]), c64(2.0)
    with np.errstate(all="ignore"), tg.GradientTape() as tape:
        tape.watch([x, z])
        a, b = tg.recompute_grad(lambda p, q: (p * p, q * q), use_data_dep=True)(x, z)
    weights = [c64([np.nan, 1.0]), c64(1.0)]
    gx, gz = values(tape.gradient([a, b], [x, z], output_gradients=weights))
    assert np.isnan(gx[0]) and gx[1] == 6.0 and gz == 4.0


def test_is_recomputing_is_told_to_those_who_name_it() -> None:
    x, told = c64(2.0), []

    def named(q: Any, is_recomputing: Any = "unset") -> Any:
        told.append(is_recomputing)
        return q * q

    def only(q: Any, *, is_recomputing: bool) -> Any:
        told.append(is_recomputing)
        return q * q

    def any_keyword(q: Any, **kw: Any) -> Any:
        told.append(kw)
        return q * q

    for f, wanted in ((named, [False, True]), (only, [False, True]), (any_keyword, [{}, {}])):
        told.clear()
        same(by_tape(tg.recompute_grad(f), [x], x)[1], [4.0])
        assert told == wanted
    told.clear()
    tg.recompute_grad(named)(x)
    assert told == [False]


@pytest.mark.parametrize("options", [{"check": "bits"}, {"use_data_dep": 3}, {"tupleize_grads": "yes"}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        tg.recompute_grad(tg.tanh, **options)
    with pytest.raises(errors.RecomputeError, match="not callable"):
        tg.recompute_grad(3)


# Wrapping


class Block:
    """A block."""

    def __init__(self) -> None:
        self.w = var64(3.0)
        self.rate = 1.0

    def __call__(self, q: tg.Tensor) -> tg.Tensor:
        """Applies it."""
        return q * q * self.w * self.rate

    @tg.recompute_grad
    def method(self, q: tg.Tensor) -> tg.Tensor:
        """A checkpointed method."""
        return self(q)

    @tg.recompute_grad
    @staticmethod
    def static(q: tg.Tensor) -> tg.Tensor:
        return q * q * 3.0

    @staticmethod
    @tg.recompute_grad
    def inside_static(q: tg.Tensor) -> tg.Tensor:
        return q * q * 3.0

    @classmethod
    @tg.recompute_grad
    def of_class(cls, q: tg.Tensor) -> tg.Tensor:
        assert cls is Block
        return q * q * 3.0


def test_all_kinds_of_callables() -> None:
    b, x = Block(), c64(2.0)
    wrapped = tg.recompute_grad(b)
    calls = [
        wrapped, b.method, functools.partial(Block.method, b), tg.recompute_grad(b.__call__), Block.static, b.static,
        b.inside_static, Block.of_class, b.of_class, tg.recompute_grad(functools.partial(Block.__call__, b)),
        tg.recompute_grad(lambda q: b(q)),
    ]  # fmt: skip
    for f in calls:
        same(by_tape(f, [x], x)[1], [12.0])
    other = type("Other", (), {"borrowed": tg.recompute_grad(b.__call__), "held": wrapped})()
    same([by_tape(f, [x], x)[1] for f in (other.borrowed, other.held)], [[12.0], [12.0]])
    same(by_tape(tg.recompute_grad(tg.tanh), [x], x)[1], [1 - np.tanh(2.0) ** 2])
    one = tg.asarray([[1.0]])
    y, grads = by_tape(tg.recompute_grad(tg.nn.Dense(2)), [one], one)
    assert y.shape == (1, 2) and grads[0].shape == (1, 1)


def test_attributes_are_live_and_names_are_kept() -> None:
    b = Block()
    g = tg.recompute_grad(b)
    assert g.__wrapped__ is b and g.w is b.w and g.__doc__ == "A block."
    b.rate, b.late = 5.0, "new"
    assert g.rate == 5.0 and g.late == "new"
    with pytest.raises(AttributeError, match="nowhere"):
        g.nowhere  # noqa: B018
    assert "Block" in repr(g)
    m = b.method
    assert (m.__name__, m.__doc__, m.__self__) == ("method", "A checkpointed method.", b)
    assert m == b.method and m.__wrapped__ is Block.method.__wrapped__
    model = tg.nn.Sequential([tg.nn.Dense(2)])
    wrapped = tg.recompute_grad(model)
    wrapped(tg.ones((1, 3)))
    assert [v.shape for v in wrapped.variables] == [(3, 2), (2,)] and wrapped.variables[0] is model.variables[0]
    assert copy.copy(g).w is b.w and copy.deepcopy(g).w is not b.w


# Higher order and forward mode


def network(g: Callable, x: Any, w: Any) -> Any:
    """A function of both, with something before and after the checkpointed part."""
    return tg.sum(tg.exp(g(g(x * 0.5) * 2.0) * w))


@pytest.fixture
def parts() -> tuple:
    rng = np.random.default_rng(1)
    x, c, w = c64(rng.normal(size=4)), c64(rng.normal(size=4)), var64(rng.normal(size=4))
    return x, c, w, lambda q: tg.tanh(q * w) * c + q


def test_gradient_penalty(parts: tuple) -> None:
    x, c, w, f = parts

    def penalty(g: Callable) -> Any:
        with tg.GradientTape() as t2:
            t2.watch([x, c])
            with tg.GradientTape() as t1:
                t1.watch(x)
                y = network(g, x, w)
            d = t1.gradient(y, x)
            p = tg.sum(d * d) + y
        return t2.gradient(p, [x, c, w])

    same(penalty(tg.recompute_grad(f)), values(penalty(f)), rtol=1e-11)


def test_third_order_and_mixed_partials(parts: tuple) -> None:
    x, c, w, f = parts

    def third(g: Callable) -> Any:
        with tg.GradientTape() as t3:
            t3.watch(x)
            with tg.GradientTape() as t2:
                t2.watch(x)
                with tg.GradientTape() as t1:
                    t1.watch(x)
                    y = network(g, x, w)
                first = t1.gradient(y, [x, w])
                product = first[0] * first[1]
            last = [tg.sin(s) for s in t2.gradient(product, [x, w])]
        return t3.gradient(last, [x, w])

    same(third(tg.recompute_grad(f)), values(third(f)), rtol=1e-9)


def test_hessians_and_products_with_vectors(parts: tuple) -> None:
    x, c, w, f = parts
    g = tg.recompute_grad(f)
    found = [
        (
            tg.hessian(lambda q, h=h: network(h, q, w))(x),
            tg.jacobian(tg.grad(lambda q, h=h: network(h, q, w)))(x),
            tg.hvp(lambda q, h=h: network(h, q, w), x, c),
            tg.jvp(lambda q, h=h: network(h, q, w), (x,), (c,)),
            tg.jvp(tg.grad(lambda q, h=h: network(h, q, w)), (x,), (c,)),
            tg.grad(lambda q, h=h: tg.jvp(lambda r: network(h, r, w), (q,), (c,))[1])(x),
            tg.vjp(lambda q, h=h: network(h, q, w), x)[1](c64(2.0)),
        )
        for h in (f, g)
    ]
    for plain, checkpointed in zip(*found, strict=True):
        same(checkpointed, values(plain), rtol=1e-11)
    tg.testing.check_grads(lambda q: network(g, q, w), (x.numpy(),), order=2)


def test_forward_mode_reaches_captures_and_forgets_nothing(parts: tuple) -> None:
    x, c, w, f = parts
    a = c64([1.0, 2.0])
    y, t = tg.jvp(lambda q, r: tg.recompute_grad(lambda s: s * r * r)(q), (a, a), (a, c64([1.0, 0.0])))
    same([y, t], [[1.0, 8.0], [3.0, 8.0]])
    with tg.GradientTape() as tape:
        tape.watch(a)
        _, t = tg.jvp(lambda q: tg.recompute_grad(lambda s: s * s * a)(q), (a,), (c64([1.0, 1.0]),))
    same(tape.gradient(t, a), 4 * a.numpy())


def test_custom_gradients_inside_and_around() -> None:
    x = c64(2.0)
    body = Counted(lambda q: q * q * q)

    @tg.custom_gradient
    def hundred(q: tg.Tensor) -> Any:
        return q * q, lambda ct: ct * 100.0

    @tg.custom_gradient
    def around(q: tg.Tensor) -> Any:
        return tg.recompute_grad(body)(q), lambda ct: ct * 7.0

    agrees(lambda q: hundred(q) * 2.0, [x], x)
    same(by_tape(around, [x], x)[1], [7.0])
    assert body.take() == 1


# Memory


@pytest.mark.parametrize("size", [8, 160])
def test_no_intermediate_is_alive_after_the_forward_run(size: int) -> None:
    w = c64(np.eye(size))

    def f(q: tg.Tensor, alone: bool) -> Any:
        inside = [tg.exp(q * 0.1)]
        inside.append(tg.matmul(inside[-1], w))
        inside.append(tg.tanh(inside[-1]) + inside[0])
        inside.append(tg.matmul(inside[-1], w))
        if alone:
            return inside[-1][:2], {"total": tg.sum(inside[2]), "row": inside[1][3]}
        return tg.sin(inside[-1])

    x = c64(np.full((size, size), 0.5))
    for alone in (True, False):
        f(x, alone)  # constants are there
        with no_garbage(), tg.measure() as m, tg.GradientTape() as tape:
            tape.watch(x)
            base = m.live_bytes
            y = tg.recompute_grad(f)(x, alone)
            assert m.live_bytes - base <= sum(-(-t.nbytes // 512) * 512 for t in nest.flatten(y))
        g = values(tape.gradient(y, x))
        assert bits_equal(g, by_tape(f, [x], x, alone)[1][0])


def test_one_segment_at_a_time_in_the_gradient() -> None:
    def f(q: tg.Tensor) -> tg.Tensor:
        for _ in range(5):
            q = tg.tanh(q)
        return q

    x, g = c64(np.ones(8)), tg.recompute_grad(f)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x
        for _ in range(10):
            y = g(y)
    tape.gradient(y, x)  # constants are there
    with tg.measure() as m:
        base = m.live_bytes
        tape.gradient(y, x)
    assert m.peak_bytes - base <= (5 + 4) * 512


@pytest.mark.parametrize("size", [8, BIG])
def test_no_garbage_after_a_rerun_or_its_failure(size: int) -> None:
    x, v = c64(np.linspace(0, 1, size)), var64(2.0)
    runs = [0]

    def f(q: tg.Tensor) -> tg.Tensor:
        runs[0] += 1
        if runs[0] == 2:
            raise KeyError
        return tg.tanh(q * v)

    def run() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.recompute_grad(f)(x) * x
        tape.gradient(y, [x, v])

    for start in (5, 0, 1):  # right, failing in the rerun, failing forward
        with no_garbage():
            runs[0] = start
            try:
                run()
            except KeyError:
                pass
    with no_garbage():
        tg.hessian(lambda q: tg.sum(tg.recompute_grad(lambda r: tg.tanh(r * v))(q)))(x[:3])
        tg.hvp(lambda q: tg.sum(tg.recompute_grad(lambda r: tg.tanh(r * v))(q)), x, x)


def test_many_checkpoints_need_no_recursion() -> None:
    x = c64(np.ones(2))
    f = tg.recompute_grad(lambda q: tg.sin(q) * 1.01)
    with no_garbage():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(3000):
                y = f(y)
        g = tape.gradient(y, x)
        del tape, y
    assert np.isfinite(g.numpy()).all()


# The documents the project comes from


def test_the_seeds_examples() -> None:
    y = tg.Variable(1.0)
    f = Counted(lambda x: x * y)
    g = tg.recompute_grad(f)
    for h, wanted in ((g, (4, 4)), (f, (4, 0))):
        with tg.GradientTape() as tape:
            r = tg.constant(1.0)
            for _ in range(4):
                r = h(r)
        forward = f.take()
        (grad,) = tape.gradient(r, [y])
        assert (forward, f.take()) == wanted and float(grad) == 4.0
    runs = Counted(lambda x: x)
    model = tg.nn.Sequential([tg.nn.Lambda(runs), tg.nn.Dense(2)])
    wrapped = tg.recompute_grad(model)
    with tg.GradientTape(persistent=True) as tape:
        r = tg.constant([[1, 2]])
        for _ in range(4):
            r = wrapped(r)
    assert runs.take() == 4
    found = [tape.gradient(r, s) for s in (model.variables, wrapped.__wrapped__.variables)]
    assert runs.take() == 8 and [g.shape for g in found[0]] == [(2, 2), (2,)]
    with tg.GradientTape() as tape:
        r = tg.constant([[1, 2]])
        for _ in range(4):
            r = model(r)
    assert bits_equal(found[0], tape.gradient(r, model.variables)) and bits_equal(*found)


def test_checked_reruns_under_vmap() -> None:
    """The values of all examples are compared: here only the second one changes."""
    xs, extra = c64([[0.3, -1.2], [0.7, 0.1]]), [0.0]

    def f(x: Any) -> Any:
        return tg.sum(tg.sin(x) * tg.where(x > 0.5, x + extra[0], x))

    checked = tg.recompute_grad(f, check="values")
    same(tg.vmap(tg.grad(checked))(xs), tg.vmap(tg.grad(f))(xs))
    same(tg.vmap(lambda x: tg.hvp(checked, x, x))(xs), tg.vmap(lambda x: tg.hvp(f, x, x))(xs))

    def slope(x: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = checked(x)
        extra[0] = 1.0
        return tape.gradient(y, x)

    with pytest.raises(errors.RecomputeError, match="other values"):
        tg.vmap(slope)(xs)
