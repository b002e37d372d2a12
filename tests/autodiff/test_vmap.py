"""vmap equals a loop over the examples, wherever it stands among the other transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DomainError, DryRunError, DTypeError, FunctionError, LinAlgError, ShapeError
from tapegrad.testing import check_grads

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(4, 5)), RNG.normal(size=(6, 4))
PLACES = np.array([0, -1, 2, 1, 3, 0])


def model(x: Any) -> tg.Tensor:
    return tg.sum(tg.tanh(x @ W) ** 2) + tg.max(x)


def loop(f: Callable, xs: Any = X) -> np.ndarray:
    return np.stack([f(tg.asarray(x)).numpy() for x in xs])


@tg.custom_gradient
def odd(x: Any) -> Any:
    return tg.sin(x), lambda ct: ct * 7 * x


def custom(x: Any) -> tg.Tensor:
    return tg.sum(odd(x) * x)


def checkpointed(x: Any) -> tg.Tensor:
    return tg.sum(tg.recompute_grad(lambda z: tg.sin(z) * tg.exp(z))(x) * x)


def taped(x: Any) -> tg.Tensor:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    return tape.gradient(y, x)


@pytest.mark.parametrize("f", [model, custom, checkpointed, taped], ids=lambda f: f.__name__)
def test_values(f):
    np.testing.assert_allclose(tg.vmap(f)(X).numpy(), loop(f), rtol=1e-12)


@pytest.mark.parametrize("f", [model, custom, checkpointed], ids=lambda f: f.__name__)
def test_derivatives_inside_and_outside(f):
    np.testing.assert_allclose(tg.vmap(tg.grad(f))(X).numpy(), loop(tg.grad(f)), rtol=1e-12)
    whole = tg.grad(lambda x: tg.sum(tg.vmap(f)(x)))(X)
    np.testing.assert_allclose(whole.numpy(), loop(tg.grad(f)), rtol=1e-12)
    np.testing.assert_allclose(tg.vmap(tg.jacobian(f))(X).numpy(), loop(tg.grad(f)), rtol=1e-12)


def test_second_order_and_forward_mode():
    np.testing.assert_allclose(tg.vmap(tg.hessian(model))(X).numpy(), loop(tg.hessian(model)), rtol=1e-11)
    t = np.ones(4)
    got = tg.jvp(tg.vmap(model), (X,), (np.ones_like(X),))[1]
    np.testing.assert_allclose(got.numpy(), loop(lambda x: tg.jvp(model, (x,), (t,))[1]), rtol=1e-12)
    check_grads(tg.vmap(model), (X,), order=2)
    check_grads(tg.vmap(tg.grad(model)), (X,), order=1)


def test_a_custom_rule_is_the_one_that_counts_outside_too():
    found = tg.grad(lambda x: tg.sum(tg.vmap(odd)(x)))(X)
    np.testing.assert_allclose(found.numpy(), 7 * X)


def test_stop_gradient_is_that_of_each_example():
    np.testing.assert_array_equal(tg.vmap(tg.stop_gradient)(X).numpy(), X)
    f = lambda x: tg.sum((tg.stop_gradient(tg.sum(x**2)) * x) ** 2)
    np.testing.assert_allclose(tg.vmap(tg.grad(f))(X).numpy(), loop(tg.grad(f)), rtol=1e-12)
    np.testing.assert_allclose(tg.grad(lambda x: tg.sum(tg.vmap(f)(x)))(X).numpy(), loop(tg.grad(f)), rtol=1e-12)
    y = tg.vmap(tg.linalg.inv, failures="nan")(np.stack([np.zeros((2, 2))] * 25 + [np.eye(2)]))
    assert np.isnan(y.numpy()[:25]).all() and (y.numpy()[25] == np.eye(2)).all()
    nested = tg.vmap(tg.vmap(tg.stop_gradient))(np.stack([X, 2 * X]))
    np.testing.assert_array_equal(nested.numpy(), np.stack([X, 2 * X]))


def test_what_tapes_do_not_see_is_batched_too():
    knots = np.arange(5.0) - 2
    for f in (lambda x: tg.interp(x, knots, knots**2), lambda x: tg.mode(tg.round(x))[0], tg.unwrap, tg.logsumexp):
        np.testing.assert_allclose(tg.vmap(f)(3 * X).numpy(), loop(f, 3 * X), rtol=1e-12)


def test_checks_look_at_every_example():
    w = np.abs(X) + 0.1
    got = tg.vmap(lambda x, w: tg.average(x, weights=w))(X, w)
    np.testing.assert_allclose(got.numpy(), [np.average(x, weights=v) for x, v in zip(X, w, strict=True)])
    np.testing.assert_array_equal(tg.vmap(tg.nanargmax)(X).numpy(), X.argmax(1))
    w[4] = 0  # not the first example
    with pytest.raises(ZeroDivisionError, match="average"):
        tg.vmap(lambda x, w: tg.average(x, weights=w))(X, w)


def test_a_variable_holds_one_value():
    v = tg.Variable(np.zeros(4))
    for f in (tg.Variable, v.assign, v.assign_add):
        with pytest.raises(DryRunError, match="differs from example to example"):
            tg.vmap(lambda x, f=f: (f(x), x)[1])(X)
    np.testing.assert_array_equal(v.numpy(), np.zeros(4))


def test_nested_and_axes():
    outer = tg.vmap(tg.vmap(lambda a, b: a * tg.exp(b), in_axes=(None, 0)), in_axes=(0, None))(X[0], X[1])
    np.testing.assert_allclose(outer.numpy(), X[0][:, None] * np.exp(X[1]), rtol=1e-14)
    np.testing.assert_allclose(tg.vmap(lambda c: c * 2, in_axes=1, out_axes=1)(X).numpy(), X * 2)
    np.testing.assert_allclose(tg.vmap(lambda c: c * 2, in_axes=-1)(X).numpy(), X.T * 2)
    tree = tg.vmap(lambda d, s: {"y": d["a"] + d["b"] * s}, in_axes=({"a": 0, "b": None}, None))
    np.testing.assert_allclose(tree({"a": X, "b": X[0]}, 2.0)["y"].numpy(), X + 2 * X[0], rtol=1e-6)


def test_what_does_not_depend_on_the_batch_is_repeated():
    y, z = tg.vmap(lambda x: (tg.asarray(W), 3.0))(X)
    assert y.shape == (6, 4, 5) and z.shape == (6,)
    assert tg.vmap(lambda x: tg.asarray(W), out_axes=None)(X).shape == (4, 5)


def test_no_examples():
    assert tg.vmap(model)(X[:0]).shape == (0,)
    assert tg.vmap(tg.grad(model))(X[:0]).shape == (0, 4)


def test_places_that_differ_from_example_to_example():
    rows = np.arange(6)
    np.testing.assert_array_equal(tg.vmap(lambda x, i: x[i])(X, PLACES).numpy(), X[rows, PLACES])
    np.testing.assert_array_equal(tg.vmap(lambda i: tg.take(W, i, axis=1))(PLACES).numpy(), W[:, PLACES].T)
    pairs = np.stack([PLACES, PLACES[::-1]], axis=1)
    got = tg.vmap(lambda x, i: tg.take(x, i, axis=1))(np.stack([W.T, W.T * 2]), pairs[:2])
    np.testing.assert_array_equal(got.numpy(), np.stack([W.T[:, pairs[0]], W.T[:, pairs[1]] * 2]))
    pulled = tg.vmap(tg.grad(lambda x, i: tg.sum(x[i] ** 2)))(X, pairs)
    wanted = np.zeros_like(X)
    for row, two in zip(rows, pairs, strict=True):
        for k in two:
            wanted[row, k] += 2 * X[row, k]
    np.testing.assert_allclose(pulled.numpy(), wanted)


def test_pools_of_examples_whose_largest_values_lie_elsewhere():
    """A tangent is taken from the places of its own example, be it of each example or of all."""
    xs, ts = RNG.normal(size=(2, 5, 2, 3, 8))
    pushed = lambda x, t: tg.jvp(lambda y: tg.nn.functional.max_pool1d(y, 2), (x,), (t,))[1]
    windows = xs.reshape(5, 2, 3, 4, 2).argmax(-1)[..., None]
    for axes, t in ((0, ts), (None, ts[0])):
        every = np.broadcast_to(t, xs.shape).reshape(5, 2, 3, 4, 2)
        got = tg.vmap(pushed, in_axes=(0, axes))(xs, t)
        np.testing.assert_array_equal(got.numpy(), np.take_along_axis(every, windows, -1)[..., 0])


def test_a_place_out_of_range_in_any_example_is_an_error():
    with pytest.raises(IndexError, match="9"):
        tg.vmap(lambda x, i: tg.take_along_axis(x, tg.reshape(i, (1,)), axis=0))(X, np.array([0, 1, 2, 9, 0, 0]))


def test_values_are_not_to_be_looked_at():
    for f in (lambda x: x if x[0] > 0 else -x, lambda x: x * float(x[1]), lambda x: x[x > 0]):
        with pytest.raises(DryRunError, match="differs from example to example"):
            tg.vmap(f)(X)
    assert tg.vmap(lambda x: x * float(tg.asarray(2.0)))(X).shape == X.shape  # the same for all: may be


def test_bad_arguments():
    with pytest.raises(ShapeError, match="lengths"):
        tg.vmap(lambda a, b: a + b)(X, X[:3])
    with pytest.raises(ShapeError, match="no batch axis"):
        tg.vmap(lambda a: a)(1.0)
    with pytest.raises(ShapeError, match="no argument with a batch axis"):
        tg.vmap(lambda a: a, in_axes=None)(X)
    with pytest.raises(ShapeError, match="in_axes"):
        tg.vmap(lambda a: a, in_axes=(0, 0))(X)
    with pytest.raises(ShapeError, match="out_axes"):
        tg.vmap(lambda a: a, out_axes=None)(X)


GOOD, BAD = np.eye(3), {"cholesky": -np.eye(3), "inv": np.zeros((3, 3)), "solve": np.zeros((3, 3)), "eigh": np.eye(3)}
BAD |= {"svd": np.full((3, 3), np.nan), "solve_triangular": np.zeros((3, 3)), "slogdet's gradient": np.zeros((3, 3))}
BAD["eigh"] = np.full((3, 3), np.nan)
CAN_FAIL = {
    "cholesky": lambda a: tg.linalg.cholesky(a * 1.0),
    "inv": tg.linalg.inv,
    "solve": lambda a: tg.linalg.solve(a, np.ones(3)),
    "eigh": lambda a: tg.linalg.eigh(a)[1],
    "svd": lambda a: tg.linalg.svd(a)[1],
    "solve_triangular": lambda a: tg.linalg.solve_triangular(a, np.ones((3, 1))),
    "slogdet's gradient": tg.grad(lambda a: tg.linalg.slogdet(a)[1]),
}


@pytest.mark.parametrize("name", CAN_FAIL)
@pytest.mark.parametrize("places", [(2, 4), (0,), (0, 5), (5,)])
def test_the_examples_on_which_a_matrix_operation_fails_are_named(name: str, places: tuple[int, ...]) -> None:
    stack = np.stack([BAD[name] if i in places else GOOD for i in range(6)])
    told = ", ".join(map(str, places))
    what = "example" if len(places) == 1 else "examples"
    f = CAN_FAIL[name]
    with pytest.raises(LinAlgError, match=rf"vmap\(.*\): {what} {told} of 6: \w+: .* \(of shape \(3, 3\)") as e:
        tg.vmap(f)(stack)
    assert e.value.failed == tuple((i,) for i in places) and e.value.stack is None
    with pytest.raises(LinAlgError, match=rf"vmap\(.*\): {what} {told} of 6: "):
        tg.vmap(f, in_axes=-1)(np.moveaxis(stack, 0, -1))
    pairs = [divmod(i, 2) for i in places]
    with pytest.raises(LinAlgError) as e:
        tg.vmap(tg.vmap(f))(stack.reshape(3, 2, 3, 3))
    assert e.value.failed == tuple(pairs) and "of (3, 2): " in str(e.value)
    for pair in pairs:
        assert str(pair) in str(e.value)
    assert np.isfinite(np.asarray(tg.vmap(f)(np.stack([GOOD] * 2)))).all()


def test_what_fails_without_a_batch_is_told_as_it_is() -> None:
    with pytest.raises(LinAlgError, match=r"^cholesky: Matrix is not positive definite \(of shape \(3, 3\)\)$") as e:
        tg.vmap(lambda x: x + tg.linalg.cholesky(-np.eye(3)))(np.ones(4))
    assert e.value.failed == ()
    with pytest.raises(LinAlgError, match=r"of the stack \(2, 2\) these fail: \(0, 1\), \(1, 0\)$") as e:
        tg.linalg.cholesky(np.stack([GOOD, -GOOD, -GOOD, GOOD]).reshape(2, 2, 3, 3))
    assert e.value.failed == ((0, 1), (1, 0))
    with pytest.raises(LinAlgError, match=r"fail: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and perhaps more$"):
        tg.linalg.inv(np.zeros((50, 2, 2)))
    with pytest.raises(LinAlgError, match="examples 0, 1 of 2: solve"):
        tg.vmap(lambda b: tg.linalg.solve(np.zeros((3, 3)), b))(np.ones((2, 3)))


@pytest.mark.parametrize("name", CAN_FAIL)
@pytest.mark.parametrize("places", [(), (2, 4), (0,), (0, 5), (0, 1, 2, 3, 4, 5)])
def test_examples_that_fail_are_nan_on_request(name: str, places: tuple[int, ...]) -> None:
    stack = np.stack([BAD[name] if i in places else GOOD * (i + 1) for i in range(6)])
    others = set(range(6)) - set(places)
    y = tg.vmap(CAN_FAIL[name], failures="nan")(stack).numpy()
    assert np.isnan(y[list(places)]).all()
    for i in others:
        np.testing.assert_array_equal(y[i], CAN_FAIL[name](stack[i]).numpy())
    moved = tg.vmap(CAN_FAIL[name], in_axes=-1, out_axes=-1, failures="nan")(np.moveaxis(stack, 0, -1))
    np.testing.assert_array_equal(np.moveaxis(moved.numpy(), -1, 0), y)


def test_more_examples_fail_than_a_message_names() -> None:
    stack = np.stack([np.eye(2) * (i % 2) for i in range(60)])
    y = tg.vmap(lambda a: tg.sum(tg.linalg.inv(a)), failures="nan")(stack)
    np.testing.assert_array_equal(y.numpy(), np.tile([np.nan, 2.0], 30))
    y = tg.vmap(tg.linalg.inv, failures="nan")(np.stack([np.zeros((2, 2))] * 25 + [np.eye(2)]))
    assert np.isnan(y.numpy()[:25]).all() and (y.numpy()[25] == np.eye(2)).all()
    nested = tg.vmap(tg.vmap(tg.linalg.inv), failures="nan")(stack.reshape(20, 3, 2, 2))
    assert np.isnan(nested.numpy()).all()  # each example of the outer one has a matrix that fails


def test_vectors_all_of_which_fail_are_nan_however_many_they_are() -> None:
    """In their place are ones, also where there are as many of them as each has numbers."""
    f = lambda v: tg.linalg.inv(tg.diag(v))
    for n in (1, 2, 3):
        assert np.isnan(tg.vmap(f, failures="nan")(np.zeros((n, 2))).numpy()).all()


def test_what_runs_example_by_example_is_nan_on_request() -> None:
    def solve(diagonal: Any) -> tg.Tensor:
        return tg.linalg.solve_banded((0, 0), tg.expand_dims(diagonal, 0), np.ones(2))

    diagonals = np.ones((2, 13, 2))
    diagonals[1, :12] = 0.0
    np.testing.assert_array_equal(
        tg.vmap(solve, failures="nan")(diagonals[1]).numpy(),
        np.concatenate([np.full((12, 2), np.nan), np.ones((1, 2))]),
    )
    with pytest.raises(LinAlgError, match="so fail examples 0, 1, 2"):  # which of the inner one's: that is not known
        tg.vmap(tg.vmap(solve), failures="nan")(diagonals)


def test_the_gradient_of_examples_that_fail_is_zero() -> None:
    stack, f = np.stack([GOOD, -GOOD, 4 * GOOD]), lambda a: tg.sum(tg.linalg.cholesky(a))
    g = tg.grad(lambda a: tg.nansum(tg.vmap(f, failures="nan")(a)))(stack).numpy()
    assert not g[1].any()
    np.testing.assert_array_equal(g[[0, 2]], np.stack([tg.grad(f)(stack[i]).numpy() for i in (0, 2)]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_examples_draw_what_they_draw_where_none_fails(randomness: Any) -> None:
    def f(a: Any) -> tg.Tensor:
        return tg.linalg.cholesky(a)[0, 0] + tg.random.normal(())

    def drawn(stack: np.ndarray) -> tuple[list[float], float]:
        tg.random.seed(3)
        return tg.vmap(f, randomness=randomness, failures="nan")(stack).tolist(), tg.random.normal(()).item()

    (good, after), (spared, then) = drawn(np.stack([GOOD] * 3)), drawn(np.stack([GOOD, -GOOD, GOOD]))
    assert np.isnan(spared[1]) and [good[0], good[2]] == [spared[0], spared[2]] and after == then


def test_failures_that_cannot_be_nan() -> None:
    captured = tg.function(tg.vmap(tg.linalg.inv, failures="nan"))
    stack = np.stack([GOOD, np.zeros((3, 3))])
    with pytest.raises(DomainError, match="failures='NaN'; it is one of 'raise', 'nan'"):
        tg.vmap(tg.sin, failures="NaN")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="a result is of int64, which has no NaN"):
        tg.vmap(lambda a: tg.argmax(tg.linalg.inv(a)), failures="nan")(stack)
    with pytest.raises(DomainError, match="for the outermost vmap to say"):
        tg.vmap(tg.vmap(tg.linalg.inv, failures="nan"))(stack[None])
    for _ in range(3):
        with pytest.raises(FunctionError, match="leave the vmap outside, or leave out tg.function"):
            captured(stack)
    with pytest.raises(LinAlgError, match=r"of the stack \(2,\) these fail: 1"):  # no example's, but all examples'
        tg.vmap(lambda x: x + tg.linalg.inv(stack), failures="nan")(np.ones(4))


def test_the_example_of_an_empty_batch_is_in_the_domain_of_most_functions():
    """Warnings are errors."""
    assert tg.vmap(lambda x: tg.log(x) + tg.sqrt(x) + 1 / x)(tg.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("wrap", [tg.recompute_grad, tg.custom_gradient])
def test_a_call_for_no_examples_gives_none(wrap: Any) -> None:
    f = wrap(lambda x: (tg.sin(x) @ W, lambda ct: ct @ W.T) if wrap is tg.custom_gradient else tg.sin(x) @ W)
    g = tg.vmap(tg.grad(lambda x: tg.sum(f(x))))
    assert tg.vmap(f)(np.zeros((0, 4))).shape == (0, 5) and g(np.zeros((0, 4))).shape == (0, 4)
    assert tg.vmap(f)(X).shape == (6, 5)


def test_a_function_that_runs_again_of_no_examples() -> None:
    x = tg.asarray(np.zeros((0, 3)))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.vmap(tg.recompute_grad(tg.sin))(x)
    g = tape.gradient(y, x)
    assert (y.shape, y.dtype, g.shape, g.dtype) == ((0, 3), x.dtype, (0, 3), x.dtype)


def test_a_function_with_a_derivative_of_its_own_of_no_examples_has_no_numbers_and_its_shape() -> None:
    f = tg.custom_gradient(lambda q: (tg.sum(q) * 2.0, lambda ct: ct * 2.0))
    x = tg.asarray(np.zeros((0, 3), np.float32))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.vmap(f)(x)
    assert (y.shape, y.dtype) == ((0,), x.dtype)
