"""GradientTape: its life cycle, what it records and lets go, targets, sources, output gradients, Jacobians."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, gradients, no_garbage, same, values, var64
from inside import weak

import tapegrad as tg
from tapegrad import errors
from tapegrad.engine import region

BIG = 20_000  # elements: above the threshold, so operations are lazy


def square_on(tape: tg.GradientTape, value: float = 3.0) -> tuple[tg.Tensor, tg.Tensor]:
    x = c64(value)
    tape.watch(x)
    return x, x * x


# Life cycle


def test_a_plain_tape_answers_once_and_a_persistent_one_at_will() -> None:
    with tg.GradientTape() as plain, tg.GradientTape(persistent=True) as persistent:
        x = c64(3.0)
        plain.watch(x), persistent.watch(x)
        y = x * x
    same([plain.gradient(y, x), persistent.gradient(y, x), persistent.gradient(y, x)], [6.0, 6.0, 6.0])
    for ask in (plain.gradient, plain.jacobian, plain.batch_jacobian):
        with pytest.raises(RuntimeError, match="persistent=True"):
            ask(c64([[1.0]]), c64([[1.0]]))


def test_a_tape_that_was_never_entered() -> None:
    tape, x = tg.GradientTape(), c64(1.0)
    with pytest.raises(RuntimeError, match="never entered"):
        tape.gradient(x, x)
    with pytest.raises(RuntimeError, match="never entered"):  # nor are its targets late
        tape.gradient([x * 2.0, x + 1.0], x)
    with pytest.raises(RuntimeError, match="never entered"):
        tape.watch(x)
    with pytest.raises(RuntimeError, match="not recording"), tape.stop_recording():
        pass
    with pytest.raises(errors.TapeStateError):
        tape.reset()


def test_entering_again() -> None:
    tape = tg.GradientTape()
    with tape:
        x, y = square_on(tape)
        with pytest.raises(ValueError, match="second tape"):
            tape.__enter__()
    with tape:  # not asked yet: it goes on with its watches
        z = y * x
    same(tape.gradient(z, x), 27.0)
    with tape:  # used up: a new recording
        w = x * x
        assert tape.watched_variables() == ()
        tape.watch(x)
        z = w * x
    same(tape.gradient(z, x), 9.0)


def test_gradient_inside_the_block_ends_a_plain_recording_and_not_a_persistent_one() -> None:
    with tg.GradientTape() as tape:
        x, y = square_on(tape)
        same(tape.gradient(y, x), 6.0)
        later = y * x
    with pytest.raises(RuntimeError):
        tape.gradient(later, x)
    with tg.GradientTape(persistent=True) as tape:
        x, y = square_on(tape)
        first = tape.gradient(y, x)
        second = tape.gradient(first, x)
    same([first, second, tape.gradient(first, x)], [6.0, 2.0, 2.0])


def test_stop_recording_pauses_one_tape_only_even_when_the_block_fails() -> None:
    x = c64(3.0)
    with tg.GradientTape() as outer, tg.GradientTape() as inner:
        outer.watch(x), inner.watch(x)
        with pytest.raises(KeyError), inner.stop_recording():
            y = x * x
            with pytest.raises(ValueError, match="not recording"), inner.stop_recording():
                pass
            raise KeyError
        z = y * x
    same([outer.gradient(z, x), inner.gradient(z, x)], [27.0, 9.0])
    with pytest.raises(ValueError, match="not recording"), outer.stop_recording():
        pass


def test_a_gradient_while_stopped_starts_a_new_recording() -> None:
    with tg.GradientTape() as tape:
        x, y = square_on(tape)
        with tape.stop_recording():
            same(tape.gradient(y, x), 6.0)
        tape.watch(x)
        z = y * x
    same(tape.gradient(z, x), 9.0)


def test_reset_forgets_operations_watches_and_variables() -> None:
    v = var64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        x, y = square_on(tape)
        v * x
        tape.reset()
        assert tape.watched_variables() == ()
        unwatched = y * x
        z = x * v
    same(tape.gradient([unwatched, z], [x, v]), [None, 3.0])
    with pytest.raises(ValueError, match="not recording"):
        tape.reset()


def test_after_an_exception_tapes_are_closed_and_still_answer() -> None:
    with pytest.raises(ZeroDivisionError), tg.GradientTape() as outer, tg.GradientTape() as inner:
        x = c64(3.0)
        outer.watch(x), inner.watch(x)
        y = x * x
        raise ZeroDivisionError
    later = y * x
    same([outer.gradient(y, x), inner.gradient(y, x)], [6.0, 6.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        z = later * x
    same(tape.gradient(z, x), 27.0)


@pytest.mark.parametrize("size", [3, BIG])
def test_a_failing_operation_leaves_tape_and_walk_whole(size: int) -> None:
    x = c64(np.linspace(0.5, 1.0, size))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.exp(x) * 2.0
        with pytest.raises(errors.ShapeError, match=rf"add: shapes \({size},\) and \(7,\)"):
            y + c64(np.ones(7))
        with pytest.raises(errors.TapegradError):
            tg.matmul(y, c64(np.ones((5, 5))))
        y = y + 1.0
    same(tape.gradient(y, x), 2 * np.exp(x.numpy()))


def test_recording_belongs_to_the_thread_and_gradients_to_anyone() -> None:
    x, found = c64(3.0), {}

    def elsewhere() -> None:
        found["product"] = x * x
        with pytest.raises(RuntimeError, match="not recording"), tape.stop_recording():
            pass
        with tg.GradientTape() as own:
            own.watch(x)
            z = x * x * x
        found["own"] = own.gradient(z, x)

    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        thread = threading.Thread(target=elsewhere)
        thread.start(), thread.join()
        y = x * x
    asking = threading.Thread(target=lambda: found.update(asked=tape.gradient(y, x)))
    asking.start(), asking.join()
    assert tape.gradient(found["product"], x) is None
    same([found["own"], found["asked"]], [27.0, 6.0])


# Watching


def test_what_is_watched_when() -> None:
    a, b = c64(2.0), c64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        early = a * a
        tape.watch([a, {"b": (b,)}])
        late = a * b
        early_too = early * a
    same(tape.gradient([early], [a]), [None])
    same(tape.gradient(late, [a, b]), [3.0, 2.0])
    same(tape.gradient(early_too, a), 4.0)


@pytest.mark.parametrize("wrong", [3.0, 1, np.ones(2), "x", None, [1.0], object()])
def test_only_tensors_and_variables_are_watched(wrong: Any) -> None:
    with tg.GradientTape() as tape, pytest.raises((ValueError, TypeError), match="neither a tensor nor a variable"):
        tape.watch(wrong)


def test_watching_an_integer_warns_and_gives_none() -> None:
    k = tg.asarray([1, 2])
    with tg.GradientTape() as tape:
        with pytest.warns(errors.IntegerWatchWarning, match="int64"):
            tape.watch(k)
        y = tg.astype(k, "float64") * 2.0
    with pytest.warns(errors.IntegerWatchWarning, match="a source is int64"):
        assert tape.gradient(y, k) is None


def test_variables_are_watched_when_read_and_listed_in_order_of_construction() -> None:
    a, b, frozen, unread = var64(2.0), var64(3.0), var64(4.0, trainable=False), var64(5.0)
    with tg.GradientTape(persistent=True) as tape:
        y = b * a * b * frozen
    assert [v.name for v in tape.watched_variables()] == [a.name, b.name]
    same(tape.gradient(y, [a, b, frozen, unread]), [36.0, 48.0, None, None])
    with tg.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([b, frozen])
        y = b * a * frozen
    same(tape.gradient(y, [a, b, frozen]), [None, 8.0, 6.0])
    assert [v.name for v in tape.watched_variables()] == [b.name, frozen.name]


def test_an_integer_variable_is_listed_and_has_no_gradient() -> None:
    k = tg.Variable([1, 2])
    with tg.GradientTape() as tape:
        y = tg.sum(k * c64([2.0, 3.0]))
    assert tape.watched_variables()[0] is k
    with pytest.warns(errors.IntegerWatchWarning, match="is int64"):
        same(tape.gradient(y, [k], unconnected_gradients="zero"), [np.zeros(2, np.int64)])


# Targets, sources, output gradients


def test_targets_are_summed_and_results_mirror_sources() -> None:
    x, v = c64([1.0, 2.0]), var64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x * v
        z = tg.sum(y * y)
    same(tape.gradient({"a": y, "b": [(y,)]}, x), [12.0, 24.0])
    same(tape.gradient([y, z], [y]), [1.0 + 2 * y.numpy()])
    got = tape.gradient(y, {"x": (x, [x]), "v": v, "none": []})
    same(got, {"x": (np.array([6.0, 12.0]), [np.array([6.0, 12.0])]), "v": 5.0, "none": []})
    same(tape.gradient(x, x), [1.0, 1.0])
    same(tape.gradient(v, v), 1.0)
    assert tape.gradient(y, []) == []
    assert tape.gradient([], x) is None


@pytest.mark.parametrize("role", ["target", "source"])
@pytest.mark.parametrize("wrong", [None, [None], 2.0, np.ones(2), "x"], ids=repr)
def test_targets_and_sources_that_are_no_tensors(role: str, wrong: Any) -> None:
    with tg.GradientTape(persistent=True) as tape:
        x, y = square_on(tape)
    with pytest.raises(TypeError, match=f"{role}: .* is neither a tensor nor a variable") as e:
        tape.gradient(*((wrong, x) if role == "target" else (y, wrong)))
    assert isinstance(e.value, errors.TapegradError)


def test_a_target_computed_after_the_block_among_several_warns() -> None:
    with tg.GradientTape(persistent=True) as tape:
        x, y = square_on(tape)
    late = y * 1.0
    with pytest.warns(errors.LateTargetWarning, match="target 1 was computed after"):
        same(tape.gradient([y, late], x), 6.0)
    assert tape.gradient(late, x) is None


def test_integers_and_functions_of_them_have_no_gradient() -> None:
    x = c64([3.0, 1.0, 2.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        order, rounded = tg.argsort(x), tg.astype(x, "int64")
        y = tg.astype(rounded, "float64") * x
    assert tape.gradient(order, x) is None
    same(tape.gradient(rounded, x, unconnected_gradients="zero"), [0.0, 0.0, 0.0])
    same(tape.gradient(y, x), [3.0, 1.0, 2.0])


def test_unconnected_gradients() -> None:
    other = tg.asarray(np.ones((2, 1), np.float32))
    with tg.GradientTape(persistent=True) as tape:
        x, y = square_on(tape)
    assert tape.gradient(y, [other]) == [None]
    (zero,) = tape.gradient(y, [other], unconnected_gradients="zero")
    assert zero.shape == (2, 1) and zero.dtype == np.float32 and not zero.numpy().any()

    class Enum:
        value = "zero"

    same(tape.gradient(y, c64(1.0), unconnected_gradients=Enum), 0.0)
    for ask in (tape.gradient, tape.jacobian, tape.batch_jacobian):
        with pytest.raises(ValueError, match="'none' or 'zero', not 'sometimes'"):
            ask(y, x, unconnected_gradients="sometimes")


def test_output_gradients_of_every_form() -> None:
    x = c64([1.0, 2.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = x * x, x + 1.0
    weights = [c64([10.0, 1.0]), var64([10.0, 1.0]), np.array([10.0, 1.0]), np.array([10, 1])]
    for weight in weights:
        same(tape.gradient(y, x, output_gradients=weight), [20.0, 4.0])
        same(tape.gradient([y, z], x, output_gradients=[None, weight]), [12.0, 5.0])
        same(tape.gradient({"a": y, "b": z}, x, output_gradients={"b": weight, "a": 2.0}), [14.0, 9.0])


@pytest.mark.parametrize(
    ("weights", "error", "says"),
    [
        ([c64([1.0, 1.0])], ValueError, "1 given for 2 targets"),
        ([c64([1.0, 1.0])] * 3, ValueError, "3 given for 2 targets"),
        ([None, c64([1.0, 1.0, 1.0])], ValueError, r"number 1 has shape \(3,\), its target \(2,\)"),
        ([None, c64([[1.0, 1.0]])], ValueError, r"number 1 has shape \(1, 2\)"),
        ([tg.asarray([1.0, 1.0]), None], TypeError, "number 0 is float32, its target float64"),
        ([None, tg.asarray([1, 1])], TypeError, "number 1 is int64"),
        ([None, np.array([1j, 1j])], TypeError, "number 1 is complex128"),
        ([None, "one"], TypeError, "str"),
    ],
)
def test_output_gradients_that_do_not_fit(weights: Any, error: type, says: str) -> None:
    x = c64([1.0, 2.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = x * x, x + 1.0  # the second would pass on anything
    with pytest.raises(error, match=says) as e:
        tape.gradient([y, z], x, output_gradients=weights)
    assert isinstance(e.value, errors.TapegradError)
    same(tape.gradient([y, z], x), [3.0, 5.0])


def test_gradients_have_shape_and_dtype_of_their_sources() -> None:
    a = tg.asarray(np.float32([1.0, 2.0]))
    b = c64([[3.0], [4.0]])
    with tg.GradientTape() as tape:
        tape.watch([a, b])
        y = tg.astype(a, "float64") * b + a
    ga, gb = tape.gradient(y, [a, b])
    assert (ga.dtype, ga.shape, gb.dtype, gb.shape) == (np.float32, (2,), np.float64, (2, 1))
    same([ga, gb], [np.float32([9.0, 9.0]), np.array([[3.0], [3.0]])])


def test_a_gradient_that_is_the_cotangent_of_its_target_is_a_value_of_its_own() -> None:
    def of_product(x: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x * 1
        return tape.gradient(y, x)

    @tg.custom_gradient
    def passes(x: Any) -> Any:
        return x * 1.0, lambda ct: [ct, slopes.append(of_product(ct))][0]

    slopes = [of_product(tg.grad(lambda x: x)(tg.asarray(2.0)))]
    x = tg.asarray(3.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = passes(x + 0)
    slopes.append(of_product(tape.gradient(y, x)))
    same(slopes, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_each_call_of_a_captured_gradient_gives_a_value_of_its_own(shape: tuple[int, ...]) -> None:
    def of_itself(x: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
        return tape.gradient(x, x)

    captured, x = tg.function(of_itself), tg.ones(shape)
    captured(x), captured(x)
    first, second = captured(x), captured(x)
    with tg.GradientTape() as tape:
        tape.watch(first)
        y = second * 3
    assert tape.gradient(y, first) is None


def test_what_a_function_returns_for_numbers_is_no_number_that_others_read() -> None:
    calls = [(1.0,), (1.0, 1.0), (2.0, 2.0), (1.0, ()), (True, 1.0, 2.0), (1.0, tg.asarray(1.0))]
    count = 0
    for module in (tg, tg.nn.functional, tg.special, tg.linalg):
        for name in sorted(n for n in dir(module) if not n.startswith(("_", "set_", "explain", "while_loop"))):
            f = getattr(module, name)
            for args in calls if callable(f) and not isinstance(f, type) else ():
                try:
                    y = f(*args)
                except Exception:  # it is not for numbers
                    continue
                if not isinstance(y, tg.Tensor) or y.dtype.kind not in "fc":
                    continue
                with tg.GradientTape() as tape:
                    tape.watch(y)
                    others = [tg.ones((), y.dtype) * number for number in (1, 1.0, 2.0, 0, 0.5)]
                assert tape.gradient(others, y) is None, (name, args)
                count += 1
    assert count > 300


def test_work_that_no_source_needs_is_not_done() -> None:
    asked = []

    @tg.custom_gradient
    def noted(x: tg.Tensor) -> Any:
        return x * 1.0, lambda ct: asked.append(ct) or ct

    a, b = c64(2.0), c64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([a, b])
        y = noted(a) * b
    same(tape.gradient(y, b), 2.0)
    assert asked == []
    with tg.measure() as m:
        same(tape.gradient(y, y), 1.0)
    assert m.kernel_runs == 0
    same(tape.gradient(y, a), 3.0)
    assert len(asked) == 1


# Higher order


def test_third_order_by_three_tapes_and_by_one() -> None:
    x = c64(2.0)
    with tg.GradientTape() as t3:
        t3.watch(x)
        with tg.GradientTape() as t2:
            t2.watch(x)
            with tg.GradientTape() as t1:
                t1.watch(x)
                y = x * x * x * x
            first = t1.gradient(y, x)
        second = t2.gradient(first, x)
    same([first, second, t3.gradient(second, x)], [32.0, 48.0, 48.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        derivatives = [x * x * x * x]
        for _ in range(4):
            derivatives.append(tape.gradient(derivatives[-1], x))
    same(derivatives[1:], [32.0, 48.0, 48.0, 24.0])


# Jacobians


@pytest.mark.parametrize(
    "f",
    [
        lambda x: tg.tanh(x) * x,
        lambda x: tg.matmul(x, tg.permute_dims(x, (1, 0))),
        lambda x: tg.sum(x * x, axis=0),
        lambda x: tg.logsumexp(x, axis=1),
        lambda x: tg.concat([x[:, ::-1], x * 2.0], axis=1),
        lambda x: tg.cumulative_sum(x, axis=1) * x[0],
        lambda x: tg.take(x, tg.asarray([1, 1, 0]), axis=0) ** 2,
        lambda x: tg.sort(x, axis=1) * 3.0,
        lambda x: tg.max(x, axis=1, keepdims=True) * x,
        lambda x: tg.where(x > 0.3, tg.sqrt(tg.abs(x)), x),
        lambda x: tg.broadcast_to(tg.reshape(x, (6, 1)), (6, 2)) * 2.0,
        lambda x: tg.prod(x, axis=1),
        lambda x: tg.nn.functional.softmax(x, dim=1),
        lambda x: tg.sum(x),
        lambda x: x,
    ],
)
def test_jacobian_in_rows_equals_jacobian_row_by_row(f: Callable, rng: np.random.Generator) -> None:
    x = c64(rng.normal(size=(2, 3)))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
    found = tape.jacobian(y, x).numpy()
    assert found.shape == (*y.shape, 2, 3)
    for index in np.ndindex(*y.shape):
        unit = np.zeros(y.shape)
        unit[index] = 1.0
        same(found[index], tape.gradient(y, x, output_gradients=unit))


def test_jacobian_of_structures_and_of_the_unconnected() -> None:
    x, w, v = c64([1.0, 2.0]), c64([[5.0]]), var64([3.0, 4.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y = x * x * v
    found = tape.jacobian(y, {"x": x, "rest": (w, [v])})
    same(found, {"x": np.diag([6.0, 16.0]), "rest": (None, [np.diag([1.0, 4.0])])})
    same(tape.jacobian(y, [w], unconnected_gradients="zero"), [np.zeros((2, 1, 1))])
    same(tape.jacobian(v, v), np.eye(2))
    with pytest.raises(TypeError, match="one tensor is needed, got list"):
        tape.jacobian([y], x)


def test_jacobian_in_chunks(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    x = c64(rng.normal(size=5))

    def found() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.tanh(x) * tg.sum(x)
        return tape.jacobian(y, x).numpy()

    whole = found()
    monkeypatch.setattr("tapegrad.autodiff.jacobian_rows.MOST", 10)  # two rows at a time
    same(found(), whole)


@pytest.mark.parametrize("most", [1, 4, 6, 2**22])
def test_rows_that_a_gradient_function_leaves_out_are_zeros(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    @tg.custom_gradient
    def f(x: tg.Tensor) -> Any:
        return x * 1.0, lambda ct: None if ct.numpy()[:2].any() else ct * 3.0

    x = c64([1.0, 2.0, 3.0, 4.0, 5.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    monkeypatch.setattr("tapegrad.autodiff.jacobian_rows.MOST", most)
    same(tape.jacobian(y, x), np.diag([0.0, 0.0, 3.0, 3.0, 3.0]))
    same(tg.jacobian(lambda q: tg.tanh(q) * tg.sum(q))(x[:3]), tg.jacobian(lambda q: tg.sum(q) * tg.tanh(q))(x[:3]))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_nothing_has_gradients_and_jacobians_of_its_shape(shape: tuple[int, ...]) -> None:
    x = c64(np.zeros(shape))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, total = tg.exp(x) * x, tg.sum(x * x)
    assert tape.gradient(y, x).shape == shape
    assert tape.jacobian(y, x).shape == (*shape, *shape)
    assert tape.jacobian(total, x).shape == shape


def test_batch_jacobian() -> None:
    x, w = c64([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), c64(np.ones((3, 2, 2)))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y = tg.sin(x) * tg.reshape(x[:, 0], (3, 1))
        short = y[:2]
    full = tape.jacobian(y, x).numpy()
    same(tape.batch_jacobian(y, x), np.stack([full[b, :, b, :] for b in range(3)]))
    same(tape.batch_jacobian(y, w), np.zeros((3, 2, 2, 2)))
    for target, source in ((short, x), (tg.sum(y), x), (tg.reshape(y, (6,)), x)):
        with pytest.raises(ValueError, match="rank 2 or more and the same first dimension"):
            tape.batch_jacobian(target, source)


def test_a_gradient_function_that_looks_at_values_works_in_a_jacobian() -> None:
    @tg.custom_gradient
    def leaky(x: tg.Tensor) -> Any:
        def grad(ct: tg.Tensor) -> Any:
            return ct * (2.0 if ct.numpy().sum() > 0 and float(x[0]) < 2.0 else 3.0)

        return x * 1.0, grad

    x = c64([[1.0, 2.0], [3.0, 4.0]])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.stack([leaky(x[0]), leaky(x[1])])
    same(tape.batch_jacobian(y, x), np.stack([2 * np.eye(2), 3 * np.eye(2)]))
    same(tape.jacobian(y, x)[1, :, 1], 3 * np.eye(2))


# What is kept, and when it goes


def test_a_hundred_thousand_nodes_without_recursion_and_without_garbage() -> None:
    x = c64(np.linspace(-1, 1, 4))
    with no_garbage():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(50_000):
                y = tg.tanh(y) * 1.001
        g = tape.gradient(y, x)
        assert g.shape == (4,) and np.isfinite(g.numpy()).all()
        del tape, y, g


def test_a_long_chain_that_nobody_differentiates_is_freed() -> None:
    with no_garbage():
        with tg.GradientTape() as tape:
            x = c64(np.ones(3))
            tape.watch(x)
            y = x
            for _ in range(50_000):
                y = tg.sin(y) + 1.0
        del tape, y


def test_a_long_lazy_chain_is_cut_into_regions_and_freed() -> None:
    x = c64(np.linspace(-1, 1, BIG))

    def run(steps: int) -> tuple[tg.Tensor, tg.Tensor]:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(steps):
                y = tg.tanh(y) * 1.5
        return y, tape.gradient(y, x)

    run(1)  # makes the constants
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        y, g = run(400)
        value = y.numpy(copy=True)
        del y
        assert m.live_bytes - base == -(-g.nbytes // 512) * 512
    assert m.peak_bytes - base <= (2 * 400 // region.MAX_NODES + 6) * x.nbytes  # an array a cut, not an array a node
    expected, slope = x.numpy(), 1.0
    for _ in range(400):
        t = np.tanh(expected)
        expected, slope = t * 1.5, slope * 1.5 * (1 - t * t)
    same(value, expected, rtol=1e-10)
    same(g, slope, rtol=1e-7, atol=1e-200)


@pytest.mark.parametrize("size", [4, BIG])
def test_no_garbage_after_a_gradient_or_an_exception(size: int) -> None:
    x, w = c64(np.linspace(0.1, 1, size)), var64(np.ones(size))

    def run(fail: str = "") -> None:
        with tg.GradientTape(persistent=fail == "persistent") as tape:
            tape.watch(x)
            y = tg.tanh(x * w) + tg.sum(x)
            if fail == "inside":
                raise KeyError
            if fail == "operation":
                tg.matmul(y, tg.ones((2, 3, 3)))
        tape.gradient(y, "x" if fail == "source" else [x, w])
        if fail == "persistent":
            tape.jacobian(y[:2], [x])

    run()
    for fail in ("", "inside", "operation", "source", "persistent"):
        with no_garbage():
            try:
                run(fail)
            except (KeyError, ValueError):
                pass


def test_residuals_die_as_backward_proceeds() -> None:
    alive: list[weakref.ref] = []
    seen: list[int] = []

    @tg.custom_gradient
    def look(x: tg.Tensor) -> Any:
        def grad(ct: tg.Tensor) -> Any:
            seen.append(sum(r() is not None for r in alive))
            return ct

        return x * 1.0, grad

    x = c64(np.ones(8))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(6):
            y = tg.exp(look(y) * 0.1)
            alive.append(weak(y))
    alive.pop()  # the target itself is held
    tape.gradient(y, x)
    assert seen == [5, 4, 3, 2, 1, 0]


def test_dead_branches_and_unread_values_are_freed_at_once() -> None:
    x = c64(np.ones(8))
    with tg.GradientTape() as tape:
        tape.watch(x)
        first = x + 1.0  # an addition keeps nothing
        second = first - 2.0
        dead = weak(first)
        del first
        assert dead() is None
        unwatched = tg.exp(tg.asarray(np.ones(8)))
        gone = weak(unwatched)
        del unwatched
        assert gone() is None
        kept = tg.exp(second)
        product = kept * kept
        wanted = weak(kept)
        del kept
        assert wanted() is not None
    tape.gradient(product, x)
    assert wanted() is None


def test_the_contents_of_a_persistent_tape_go_with_it() -> None:
    x = c64(np.ones(8))
    tape = tg.GradientTape(persistent=True)
    with no_garbage():
        with tape:
            tape.watch(x)
            e = tg.exp(x)
            y = e * e
        kept = weak(e)
        del e
        tape.gradient(y, x)
        assert kept() is not None
        del tape
        assert kept() is None


def test_a_tensor_does_not_carry_its_history() -> None:
    with no_garbage():
        x = c64(np.ones(8))
        first = weak(x)
        for _ in range(10):
            x = tg.sin(x) + 1.0
        assert first() is None


def test_an_operand_that_is_not_watched_has_no_gradient() -> None:
    a, b = c64(2.0), c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch(a)
        y = a * b
    same(values(tape.gradient(y, [a, b])), [3.0, None])


@pytest.mark.parametrize(
    ("f", "at", "wanted"),
    [
        (lambda x: tg.maximum(x, 0.0), 0.0, 1.0),
        (lambda x: tg.maximum(0.0, x), 0.0, 0.0),
        (lambda x: tg.nn.functional.relu(x), 0.0, 0.0),
        (tg.abs, 0.0, 0.0),
        (lambda x: tg.clip(x, -1.0, 1.0), 1.0, 1.0),
        (lambda x: tg.where(x > 0, tg.sqrt(x), 0.0), 0.0, 0.0),
        (lambda x: tg.where(x > 0, 1 / tg.where(x > 0, x, 1.0), 0.0), 0.0, 0.0),
        (lambda x: tg.max(tg.stack([x, x])), 2.0, 1.0),
    ],
)
def test_ties_and_edges_as_in_tensorflow(f: Callable, at: float, wanted: float) -> None:
    with np.errstate(all="ignore"):
        same(gradients(f, [c64(at)]), [wanted])


def test_infinite_slopes() -> None:
    with np.errstate(divide="ignore"):
        assert np.isinf(gradients(tg.sqrt, [c64(0.0)])[0]) and np.isinf(gradients(tg.log, [c64(0.0)])[0])


def test_a_python_float_is_float32_so_the_naive_log1pexp_fails_at_100() -> None:
    def naive(x: tg.Tensor) -> tg.Tensor:
        return tg.log(1 + tg.exp(x))

    with np.errstate(all="ignore"):
        assert np.isnan(gradients(naive, [tg.constant(100.0)])[0])
    same(gradients(naive, [tg.constant(np.array(100.0))]), [np.array(1.0)])


def test_a_tape_that_has_given_its_gradient_keeps_nothing_of_what_comes_after_in_its_block() -> None:
    x = tg.asarray(np.ones(1000))
    with tg.GradientTape() as tape:
        tape.watch(x)
        tape.gradient(tg.exp(x), x)
        with tg.measure() as m:
            before = m.live_bytes
            tg.exp(tg.exp(x))
            assert m.live_bytes == before


def test_bytes_of_gradients_are_counted_as_such() -> None:
    """Of a tensor, of a variable, of rows; of what nothing depends on there are none."""
    x, w, unused = tg.asarray(np.ones(64)), tg.Variable(np.ones(64), name="w"), tg.asarray(np.ones(64))
    table = tg.Variable(np.ones((8, 64)), name="table")
    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch([x, unused])
            y = tg.sum(x * w) + tg.sum(tg.take(table, tg.asarray(np.array([1, 3])), axis=0, sparse_grad=True))
        found = tape.gradient(y, [x, w, table, unused])
    assert m.live_by_category["gradient"] == 3 * 512 and found[2].values.shape == (2, 64)  # equal rows are one number
