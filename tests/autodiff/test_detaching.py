"""Leaving a derivative: each way in which a value becomes a number is an error, in each transform, and names the line.

Tapes read values as TensorFlow's do, and control flow may depend on values anywhere.
"""

from __future__ import annotations

import array
import cmath
import ctypes
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import same

import tapegrad as tg
from tapegrad.errors import DetachedError, DryRunError, DTypeError, TapegradError

X = np.array([0.5, 1.5, 2.5])
R = tg.recompute_grad


def filled(x: Any, into: Any) -> Any:
    for i in range(3):
        into[i] = x[i]
    return into


def at_flat(x: Any) -> Any:
    out = np.zeros(3)
    out.flat[0] = x[0]
    return out


def called(f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "complex": lambda x: complex(x[0]),
    "item": lambda x: x[0].item(),
    "numpy": lambda x: x[0].numpy(),
    "tolist of an element": lambda x: x[0].tolist(),
    "math": lambda x: math.sin(x[0]),
    "floor": lambda x: math.floor(x[0]),
    "fsum": lambda x: math.fsum(x),
    "cmath": lambda x: cmath.exp(x[0]),
    "float64": lambda x: np.float64(x[0]),
    "float32": lambda x: np.float32(x[0]),
    "percent": lambda x: "%f".__mod__(x[0]),
    "filled": lambda x: filled(x, np.zeros(3)),
    "filled, float32": lambda x: filled(x, np.zeros(3, np.float32)),
    "filled, complex": lambda x: filled(x, np.zeros(3, complex)),
    "filled, integers": lambda x: filled(x, np.zeros(3, int)),
    "filled, longdouble": lambda x: filled(x, np.zeros(3, np.longdouble)),
    "filled, masked": lambda x: filled(x, np.ma.zeros(3)),
    "filled, array.array": lambda x: filled(x, array.array("d", [0.0] * 3)),
    "filled, ctypes": lambda x: filled(x, (ctypes.c_double * 3)()),
    "flat": at_flat,
    "fill": lambda x: np.zeros(3).fill(x[0]),
    "full": lambda x: np.full(3, x[0]),
    "list": lambda x: np.array([x[0], x[1]]),
    "list of dtype": lambda x: np.array([x[0], x[1]], float),
    "fromiter": lambda x: np.fromiter(x, float),
    "put": lambda x: np.zeros(3).put(0, x[0]),
    "linspace": lambda x: np.linspace(0.0, [x[0]], 3),
}
WHOLE: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x),
    "numpy of all": lambda x: x.numpy(),
    "to_numpy": lambda x: x.to_numpy(),
    "tolist": lambda x: x.tolist(),
    "slice": lambda x: called(np.zeros(3).__setitem__, slice(None), x),
    "mask": lambda x: called(np.zeros(3).__setitem__, np.ones(3, bool), x),
    "dlpack": lambda x: x.__dlpack__(),
    "memoryview": lambda x: memoryview(np.asarray(x)),
    "pickle": lambda x: pickle.dumps(x),
}
WAYS = {**ELEMENTS, **WHOLE}


def scalar(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of one float in which ``f`` makes numbers of a value computed from the argument."""

    def objective(x: Any) -> Any:
        y = x * x
        f(y)
        return tg.sum(y)

    return objective


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "grad": lambda f: tg.grad(f)(X),
    "value_and_grad": lambda f: tg.value_and_grad(f)(X),
    "vjp": lambda f: tg.vjp(f, X),
    "jvp": lambda f: tg.jvp(f, (X,), (X,)),
    "linearize": lambda f: tg.linearize(f, X),
    "jacobian": lambda f: tg.jacobian(f)(X),
    "jacfwd": lambda f: tg.jacfwd(f)(X),
    "hessian": lambda f: tg.hessian(f)(X),
    "hvp": lambda f: tg.hvp(f, X, X),
    "grad of grad": lambda f: tg.grad(lambda x: tg.sum(tg.grad(f)(x)))(X),
    "grad of a checkpoint": lambda f: tg.grad(R(f))(X),
    "grad of nested checkpoints": lambda f: tg.grad(R(lambda x: R(f)(x) * 1.0))(X),
    "jvp of a checkpoint": lambda f: tg.jvp(R(f), (X,), (X,)),
    "grad of a chain": lambda f: tg.grad(tg.checkpoint_sequential([tg.sin, f]))(X),
    "grad of a loop": lambda f: tg.grad(lambda x: tg.sum(tg.checkpointed_loop(lambda s, i: s + f(s), x, 3)))(X),
    "grad in a tape": lambda f: in_a_tape(lambda x: tg.grad(f)(x)),
    "minimize": lambda f: tg.optim.minimize(f, X),
    "scipy_objective": lambda f: called(tg.optim.scipy_objective(f, X)[0], X),
}


def in_a_tape(f: Callable[[Any], Any]) -> Any:
    with tg.GradientTape() as tape:
        x = tg.asarray(X)
        tape.watch(x)
        return f(x)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_no_value_leaves_a_transform(way: str, transform: str) -> None:
    with pytest.raises(DetachedError, match=r"tg\.stack.*\.at\[i\]\.set.*tg\.stop_gradient\(x\)") as e:
        TRANSFORMS[transform](scalar(WAYS[way]))
    assert re.match(rf"{re.escape(__file__)}:\d+: ", str(e.value))


@pytest.mark.parametrize("way", WAYS)
def test_the_remedy_is_one(way: str) -> None:
    """A constant may be made of any value, the derivative of the rest is right."""
    f = lambda x: WAYS[way](tg.stop_gradient(x))
    same(tg.grad(scalar(f))(X), 2 * X)
    same(tg.jvp(scalar(f), (X,), (X,))[1], np.sum(2 * X * X))
    same(tg.hvp(scalar(f), X, X), 2 * X)
    same(tg.grad(R(scalar(f)))(X), 2 * X)


def test_the_message_names_the_line_of_the_conversion() -> None:
    def f(x: Any) -> Any:
        out = np.zeros(3)
        for i in range(3):
            out[i] = (x[i] - 1.0) ** 2
        return tg.sum(out) + 0.0 * tg.sum(x)

    line = f.__code__.co_firstlineno + 3
    with pytest.raises(DetachedError, match=rf"{re.escape(__file__)}:{line}: float\(\) takes the value of float64"):
        tg.grad(f)(X)
    with pytest.raises(DetachedError, match=r"tg\.stop_gradient\(x\)\.item\(\)"):
        tg.grad(lambda x: x * float(x))(3.0)


def test_another_error_on_that_line_or_elsewhere_is_itself() -> None:
    def f(x: Any) -> Any:
        try:
            float(tg.sum(x))
        except DetachedError:
            pass
        raise ValueError("another")

    with pytest.raises(ValueError, match="another") as e:
        tg.grad(f)(X)
    assert not isinstance(e.value, TapegradError)


def test_control_flow_text_and_tests_may_depend_on_values() -> None:
    def f(x: Any) -> Any:
        assert x[0] > 0 and bool(x[1]) and max(x[0], x[2]) is not None and (x > 0).numpy().all()
        assert int(tg.argmax(x)) == 2 and range(tg.argmax(x)) and np.allclose(x, x) and np.shape(x) == (3,)
        text = f"{x[0]} {x[0]:.3f} {x} {x!r} {x}" + str(x)
        assert "0.5" in text and len(list(x)) == 3 and np.asarray(x > 1).sum() == 2
        return tg.sum(x * x) if tg.sum(x) > 0 else tg.sum(x)

    for g in (f, R(f)):
        same(tg.grad(g)(X), 2 * X)
        same(tg.jvp(g, (X,), (X,))[1], np.sum(2 * X * X))
        same(tg.hvp(g, X, X), 2 * X)


@pytest.mark.parametrize("way", WAYS)
def test_a_tape_reads_values_as_tensorflows_does(way: str) -> None:
    for make in (lambda f: f, R):
        with tg.GradientTape() as tape:
            x = tg.asarray(X)
            tape.watch(x)
            y = make(scalar(WAYS[way]))(x)
        same(tape.gradient(y, x), 2 * X)
    with tg.ForwardAccumulator(x, X) as accumulator:
        y = scalar(WAYS[way])(x)
    same(accumulator.jvp(y), np.sum(2 * X * X))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_has_no_single_value(way: str) -> None:
    with pytest.raises(DryRunError, match="differs from example to example"):
        tg.vmap(scalar(WAYS[way]))(np.stack([X, X]))
    with pytest.raises(DryRunError, match="differs from example to example"):
        tg.grad(lambda xs: tg.sum(tg.vmap(scalar(WAYS[way]))(xs)))(np.stack([X, X]))
    with pytest.raises((DryRunError, DetachedError)):
        tg.vmap(tg.grad(scalar(WAYS[way])))(np.stack([X, X]))


# Functions with rules of their own


def by_numpy(inside: bool) -> Any:
    @tg.custom_gradient
    def sin(x: Any) -> Any:
        slope = np.cos(x.numpy()) if not inside else None
        return tg.asarray(np.sin(np.asarray(x))), lambda ct: ct * (np.cos(x.numpy()) if inside else slope)

    return sin


@pytest.mark.parametrize("inside", [False, True], ids=["value", "rule"])
def test_a_rule_stands_for_the_derivative_of_a_body_that_reads_values(inside: bool) -> None:
    sin = by_numpy(inside)
    f = lambda x: tg.sum(sin(2.0 * x))
    for g in (f, R(f)):
        same(tg.grad(g)(X), 2 * np.cos(2 * X))
    same(tg.jvp(f, (X,), (X,))[1], np.sum(2 * X * np.cos(2 * X)))
    same(tg.jacobian(lambda x: sin(2.0 * x))(X), np.diag(2 * np.cos(2 * X)))
    for second in (
        lambda: tg.hvp(f, X, X),
        lambda: tg.hessian(f)(X),
        lambda: tg.grad(lambda x: tg.sum(tg.grad(f)(x)))(X),
    ):
        with pytest.raises(DetachedError):  # it would be zero
            second()


def test_a_body_of_a_rule_inside_another_reads_values_for_both() -> None:
    inner = by_numpy(False)
    outer = tg.custom_gradient(lambda x: (inner(x), lambda ct: ct * tg.cos(x)))
    same(tg.grad(lambda x: tg.sum(outer(x)))(X), np.cos(X))
    same(tg.hvp(lambda x: tg.sum(outer(x)), X, X), -np.sin(X) * X)


def test_own_primitives_get_arrays_in_every_order() -> None:
    sin = tg.primitive(lambda x: np.sin(x)).defvjp(lambda ct, x: ct * tg.cos(x))
    same(tg.grad(lambda x: tg.sum(sin(x)))(X), np.cos(X))
    same(tg.hvp(lambda x: tg.sum(sin(x)), X, X), -np.sin(X) * X)
    reading = tg.primitive(lambda x: np.sin(x)).defvjp(lambda ct, x: ct * np.cos(x.numpy()))
    same(tg.grad(lambda x: tg.sum(reading(x)))(X), np.cos(X))
    with pytest.raises(DetachedError):
        tg.hvp(lambda x: tg.sum(reading(x)), X, X)


# Masked arrays

MASKED = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
USES: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda x: tg.asarray(MASKED),
    "dtype": lambda x: tg.asarray(MASKED, dtype="float32"),
    "list": lambda x: tg.asarray([MASKED, MASKED]),
    "numbers": lambda x: tg.asarray([1.0, np.ma.masked]),
    "constant": lambda x: tg.constant(MASKED),
    "variable": lambda x: tg.Variable(MASKED),
    "x * masked": lambda x: x * MASKED,
    "x + one": lambda x: x + MASKED[1],
    "multiply": lambda x: np.multiply(MASKED, x),
    "matmul": lambda x: MASKED @ x,
    "where": lambda x: tg.where(MASKED > 1, x, 0.0),
    "stack": lambda x: tg.stack([MASKED, x]),
    "set": lambda x: x.at[0].set(MASKED[1]),
    "sum": lambda x: tg.sum(MASKED),
    "dlpack": lambda x: tg.from_dlpack(MASKED),
    "grad": lambda x: tg.grad(tg.sum)(MASKED),
    "predict": lambda x: tg.memory.predict_peak(lambda: x * MASKED),
}


@pytest.mark.parametrize("use", USES)
def test_a_mask_is_not_dropped(use: str) -> None:
    with pytest.raises(DTypeError, match=r"mask.*filled.*tg\.where"):
        USES[use](tg.asarray(X))


def test_masked_arrays_are_honoured_by_numpy_and_refused_in_a_derivative() -> None:
    assert (MASKED * tg.asarray(X)).mask.tolist() == [False, True, False]
    with pytest.raises(DetachedError):
        tg.grad(lambda x: tg.sum(MASKED * x))(X)
    same(tg.asarray(np.ma.masked_array([1.0, 2.0])), [1.0, 2.0])  # nothing is masked
