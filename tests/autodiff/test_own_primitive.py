"""One's own primitives: rules in either direction, several results, and what they refuse."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from checks import Counted, no_garbage, same
from cuda_cases import installed

import tapegrad as tg
from tapegrad.errors import (
    DeviceError,
    DryRunError,
    DTypeError,
    GradientError,
    GradientTypeError,
    NoGradientError,
    NotATensorError,
    ShapeError,
)
from tapegrad.testing import check_grads

X, Y = np.linspace(0.2, 1.5, 12).reshape(3, 4), np.linspace(-1, 1, 12).reshape(3, 4)


@tg.primitive
def scaled(x, y, n=2, *, flag=None):
    assert type(x) is np.ndarray and (flag is None or flag == "on")
    return x * y * n


scaled.defvjp(lambda ct, y, n: ct * y * n, lambda ct, n, x: ct * x * n)


@tg.primitive
def pair(x):
    return np.sin(x), np.cos(x).sum(axis=0)


pair.defvjp(lambda ct, out, x: ct[0] * tg.cos(x) - ct[1] * tg.sin(x) + 0 * out[0])


@tg.primitive
def cubed(x):
    return x**3


cubed.defjvp(lambda t, x: 3 * t * x * x)


def test_derivatives_follow_from_one_direction():
    check_grads(lambda x, y: scaled(x, y, n=3, flag="on"), (X, Y), order=2)
    check_grads(pair, (X,), order=2)
    check_grads(cubed, (X,), order=3)


def test_complex_numbers_keep_tensorflows_convention():
    z = X + 1j * Y

    @tg.primitive
    def times(z):
        return z * (2 + 1j)

    times.defvjp(lambda ct: ct * (2 - 1j))
    loss = lambda f: tg.grad(lambda z: tg.sum(tg.abs(f(z)) ** 2))(z).numpy()
    np.testing.assert_allclose(loss(times), loss(lambda z: z * (2 + 1j)), rtol=1e-6)


def test_it_runs_once_and_its_arguments_are_safe():
    runs = []

    @tg.primitive
    def f(x, how):
        runs.append(how)
        with pytest.raises(ValueError, match="read-only"):
            x += 1
        return x  # an alias would let a later change reach the argument

    x = tg.asarray(X)
    y = f(x, "a")
    assert runs == ["a"] and not np.shares_memory(np.asarray(y), np.asarray(x))
    np.testing.assert_array_equal(y.numpy(), X)


def test_jacobians_and_vmap_row_by_row_or_at_once():
    calls = []

    @tg.primitive(batched=True)
    def f(x):
        calls.append(x.shape)
        return np.tanh(x)

    f.defvjp(lambda ct, out: ct * (1 - out * out))
    np.testing.assert_allclose(tg.vmap(f)(X).numpy(), np.tanh(X))
    assert calls == [(4,), (3, 4)]
    g = lambda x: tg.sum(scaled(x, Y[0]) ** 2)
    np.testing.assert_allclose(tg.vmap(tg.grad(g))(X).numpy(), 8 * X * Y[0] ** 2, rtol=1e-12)
    np.testing.assert_allclose(tg.jacobian(cubed)(X[0]).numpy(), np.diag(3 * X[0] ** 2), rtol=1e-12)


def test_inference_serves_dry_runs():
    @tg.primitive(infer=lambda x, n: ((n, *x.shape), x.dtype))
    def repeated(x, n):
        return np.stack([x] * n)

    repeated.defvjp(lambda ct: tg.sum(ct, axis=0))
    check_grads(lambda x: repeated(x, 3), (X,))
    grad = tg.grad(lambda x: tg.sum(repeated(x, 3) ** 2))
    assert tg.memory.predict_peak(grad, X).peak_bytes > 3 * X.nbytes

    @tg.primitive
    def unknown(x):
        return x + 1

    with pytest.raises(DryRunError, match="infer"):
        tg.memory.predict_peak(unknown, X)


def test_a_result_that_was_not_told_is_refused():
    @tg.primitive(infer=lambda x: (x.shape, x.dtype))
    def f(x):
        return x[:1]

    with pytest.raises(ShapeError, match="expected"):
        f(X)


def test_under_a_budget_it_is_made_again():
    runs = []

    @tg.primitive(infer=lambda x: (x.shape, x.dtype))
    def f(x):
        runs.append(1)
        return np.exp(x)

    f.defvjp(lambda ct, out: ct * out)

    def chain(x):
        for _ in range(6):
            x = f(x) * 0.1
        return tg.sum(x)

    big = np.full((256, 256), 0.1)
    plain = tg.grad(chain)(big).numpy(copy=True)
    before = len(runs)
    with tg.memory_budget(7 * big.nbytes):
        np.testing.assert_array_equal(tg.grad(chain)(big).numpy(), plain)
    assert before == 6 and len(runs) > 12


def test_without_rules_asking_is_an_error():
    @tg.primitive
    def f(x):
        return x * 2

    with pytest.raises(NoGradientError, match="f: has no gradient"):
        tg.grad(lambda x: tg.sum(f(x)))(X)
    with pytest.raises(NoGradientError, match="f: has no forward"):
        tg.jvp(f, (X,), (X,))
    scaled2 = tg.primitive(lambda x, y: x * y).defvjp(None, lambda ct, x: ct * x)
    assert tg.grad(lambda y: tg.sum(scaled2(X, y)))(Y).shape == X.shape
    with pytest.raises(NoGradientError):
        tg.grad(lambda x: tg.sum(scaled2(x, Y)))(X)


def test_bad_rules_and_results():
    @tg.primitive
    def f(x, y):
        return x + y

    for rule in (lambda x: x, lambda ct, z: ct):
        with pytest.raises(GradientTypeError, match="the rule of x"):
            f.defvjp(rule)
    with pytest.raises(GradientTypeError, match="only"):
        f.defvjp(z=lambda ct: ct)
    f.defvjp(lambda ct: tg.sum(ct))
    with pytest.raises(GradientError, match="the rule of x returned shape"):
        tg.grad(lambda x: tg.sum(f(x, Y)))(X)
    with pytest.raises(NotATensorError, match="raw arrays"):
        tg.primitive(lambda x: tg.asarray(x))(X)
    with pytest.raises(NotATensorError, match="an argument of its own"):
        tg.primitive(lambda xs: xs[0])([tg.asarray(X)])
    for bad in (lambda *xs: xs[0], lambda t: t, lambda x, **more: x):
        with pytest.raises(TypeError, match="primitive"):
            tg.primitive(bad)


def test_rules_return_what_they_are_asked_for():
    x = tg.ones(1)
    one, two = tg.primitive(lambda x: x * 2), tg.primitive(lambda x: (x, x * 2))
    for f, rule, shown in (
        (one, lambda ct: (ct,), r"\(\*,\)"),
        (one, lambda ct: None, "None"),
        (two, lambda ct: list(ct), r"\[\*, \*\]"),
    ):
        f.defvjp(rule)
        loss = lambda x, f=f: tg.sum(f(x) if f is one else f(x)[1])
        with pytest.raises(GradientTypeError, match=f"the rule of x returned {shown}; it returns one cotangent"):
            tg.grad(loss)(x)
        with pytest.raises(GradientTypeError, match=f"the rule of an argument returned {shown}"):
            tg.jvp(loss, (x,), (x,))
    one, two = tg.primitive(lambda x: x * 2), tg.primitive(lambda x: (x, x * 2))
    for f, rule, says in (
        (one, lambda t: (t,), r"\(\*,\); it returns one tangent"),
        (two, lambda t: t, r"\*; it returns a tuple of 2"),
    ):
        f.defjvp(rule)
        with pytest.raises(GradientError, match=f"a JVP rule returned {says}"):
            tg.jvp(f, (x,), (x,))


def test_it_is_a_method_and_keeps_its_name():
    class Model:
        @tg.primitive
        def step(self, x):
            """Doc."""
            return x * 2

    assert Model().step(X).shape == X.shape
    assert scaled.__name__ == "scaled" and Model.step.__doc__ == "Doc."


def test_threads_do_not_take_each_others_results():
    meeting = threading.Barrier(2, timeout=20)

    @tg.primitive
    def f(x):
        meeting.wait()  # both have run before either result is used
        return x * 2

    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: f(np.full(3, float(i))).numpy()})) for i in (1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    np.testing.assert_array_equal(found[1], np.full(3, 2.0))
    np.testing.assert_array_equal(found[5], np.full(3, 10.0))


def test_nothing_is_left_to_the_collector():
    with no_garbage():
        weights = np.ones(3)
        own = tg.primitive(lambda x: x * weights).defvjp(lambda ct: ct)
        tg.grad(lambda x, own=own: tg.sum(own(x)))(X[0, :3])
        tg.block([[np.ones(2)], [np.zeros(2)]])
        del own


def test_a_dry_run_tells_static_arguments_apart():
    @tg.primitive
    def repeated(x, n):
        return np.stack([x] * n)

    repeated.defvjp(lambda ct: tg.sum(ct, axis=0))
    repeated(X, 2)
    assert tg.memory.predict_peak(lambda x: repeated(x, 2), X).peak_bytes > 0
    with pytest.raises(DryRunError, match="run it once"):
        tg.memory.predict_peak(lambda x: repeated(x, 100), X)


def test_what_has_only_a_shape_or_only_a_dtype_is_a_parameter():
    @tg.primitive
    def times(x, like):
        return x * getattr(like, "shape", (2,))[0]

    times.defvjp(lambda ct, like: ct * getattr(like, "shape", (2,))[0])
    for like in (SimpleNamespace(shape=(3,)), SimpleNamespace(dtype="float32")):
        factor = 3.0 if hasattr(like, "shape") else 2.0
        assert np.array_equal(tg.grad(lambda x: tg.sum(times(x, like)))(X).numpy(), np.full(X.shape, factor))  # noqa: B023


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_batch_inside_a_rule_runs_a_call_once_also_where_a_budget_listens(budget):
    """Nobody differentiates the batch: what the call has computed for all examples is all there is to know."""
    counted = Counted(lambda a: (tg.sin(a), lambda ct: ct * tg.cos(a)))

    @tg.primitive
    def own(x):
        return np.sin(x)

    own.defjvp(lambda t, x: t * tg.vmap(tg.custom_gradient(counted))(x + np.pi / 2))
    x = tg.asarray(X)
    with tg.memory_budget(budget) if budget else nullcontext():
        _, tangent = tg.jvp(own, (x,), (x * 0 + 1,))
    assert counted.take() == 1
    same(tangent, np.cos(X))


def test_tangents_of_several_results_are_one_for_each() -> None:
    @tg.primitive
    def own(x):
        return [np.sin(x), np.cos(x).sum(axis=-1)]

    own.defjvp(lambda t, x: [t * tg.cos(x), -tg.sum(t * tg.sin(x), axis=-1)])
    (y, z), (ty, tz) = tg.jvp(own, (X,), (Y,))
    same([y, z], [np.sin(X), np.cos(X).sum(axis=-1)])
    same([ty, tz], [Y * np.cos(X), -(Y * np.sin(X)).sum(axis=-1)])
    many = tg.vmap(lambda x, t: tg.jvp(own, (x,), (t,))[1])(np.stack([X, Y]), np.stack([Y, X]))
    same([m[0] for m in many], [Y * np.cos(X), -(Y * np.sin(X)).sum(axis=-1)])
    same([m[1] for m in many], [X * np.cos(Y), -(X * np.sin(Y)).sum(axis=-1)])


@pytest.mark.parametrize("batched", [False, True])
def test_rows_of_several_results_are_pulled_as_one_by_one_or_all_together(batched: bool) -> None:
    @tg.primitive(batched=batched)
    def own(x):
        return [np.sin(x), np.cos(x).sum(axis=-1)]

    own.defvjp(lambda ct, x: ct[0] * tg.cos(x) - tg.expand_dims(ct[1], axis=-1) * tg.sin(x))
    many = np.stack([X, Y])
    for x, (first, second) in zip(many, zip(*tg.vmap(tg.jacobian(own))(many), strict=True), strict=True):
        wanted = [np.zeros((3, 4, 3, 4)), np.zeros((3, 3, 4))]
        for i, j in np.ndindex(3, 4):
            wanted[0][i, j, i, j], wanted[1][i, i, j] = np.cos(x[i, j]), -np.sin(x[i, j])
        same([first, second], wanted)
    same(list(tg.jacobian(own)(Y)), wanted)


def test_results_of_one_primitive_are_of_one_kind() -> None:
    @tg.primitive
    def own(x):
        return [x, x > 0]

    with pytest.raises(DTypeError, match="own: returned dtypes float64, bool: results of one primitive must be of one"):
        own(X)

    @tg.primitive
    def wider(x):
        return [x.astype("float32"), x]

    assert [y.dtype.name for y in wider(X)] == ["float64", "float64"]


def test_its_arrays_are_on_one_device_and_those_of_numpy_are_operands() -> None:
    with tg.GradientTape() as tape:
        tape.watch(x := tg.asarray(X))
        y = scaled(Y, x)
    assert np.array_equal(tape.gradient(y, x).numpy(), Y * 2)
    with installed(), pytest.raises(DeviceError, match="scaled"):
        scaled(tg.asarray(X), tg.asarray(Y, device="cuda"))
