"""Values that leave a checkpoint other than through its result: the right gradient, or an error with a remedy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import RecomputeError

WEIGHT = np.array([1.0, 2.0])
INPUT = np.array([0.5, -1.0])


class Holder:
    """An object that is no structure."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def by_list(door: Any, value: Any) -> None:
    door.setdefault("list", []).append(value)


def by_attribute(door: Any, value: Any) -> None:
    door.setdefault("object", Holder()).value = value


def by_dict(door: Any, value: Any) -> None:
    door["value"] = value


DOORS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "list": (by_list, lambda door: door["list"][0]),
    "attribute": (by_attribute, lambda door: door["object"].value),
    "dict": (by_dict, lambda door: door["value"]),
}


def plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def nested(f: Callable[..., Any]) -> Callable[..., Any]:
    inner = tg.recompute_grad(f)
    return tg.recompute_grad(lambda x: tg.sin(inner(x)) * x)


def nested_plainly(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: tg.sin(f(x)) * x


def saving(f: Callable[..., Any]) -> Callable[..., Any]:
    return tg.recompute_grad(f, policy=tg.memory.policies.save_everything)


def looped(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: tg.checkpointed_loop(f, x, 1)


def chained(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: tg.checkpoint_sequential([f], x)


RIGHT = {"recompute_grad": (tg.recompute_grad, plain), "nested": (nested, nested_plainly)}
RIGHT_OR_REFUSED = {"policy": (saving, plain), "loop": (looped, plain), "chain": (chained, plain)}
USES: dict[str, Callable[[Any, Any], Any]] = {
    "added": lambda y, kept: tg.sum(y) + 0.1 * tg.sum(kept**2),
    "alone": lambda y, kept: tg.sum(kept**2),
    "checkpointed": lambda y, kept: tg.sum(tg.recompute_grad(lambda a, b: a * tg.exp(b))(y, kept)),
    "captured": lambda y, kept: tg.sum(tg.recompute_grad(lambda a: a * tg.exp(kept))(y)),
    "target": lambda y, kept: kept,
}


def gradients(
    wrap: Callable[..., Any], door: str, use: str, returned: bool = False, budget: str | None = None
) -> list[np.ndarray]:
    """The gradients of a program in which a value leaves the function that ``wrap`` wraps."""
    put, get = DOORS[door]
    w, x, opened = tg.Variable(WEIGHT), tg.asarray(INPUT), dict[str, Any]()

    def f(x: Any) -> Any:
        h = tg.exp(w * x)
        put(opened, h)
        return h if returned else tg.sin(h) * w

    with tg.memory_budget(budget) if budget else nullcontext(), tg.GradientTape() as tape:
        tape.watch(x)
        y = wrap(f)(x)
        target = USES[use](y, get(opened))
        del y
        opened.clear()
    return [np.asarray(g) for g in tape.gradient(target, [w, x])]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", RIGHT)
def test_gradients_are_right(kind: str, door: str, use: str) -> None:
    wrap, bare = RIGHT[kind]
    for ours, expected in zip(gradients(wrap, door, use), gradients(bare, door, use), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-14)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", RIGHT_OR_REFUSED)
def test_gradients_are_right_or_refused(kind: str, use: str) -> None:
    wrap, bare = RIGHT_OR_REFUSED[kind]
    try:
        actual = gradients(wrap, "list", use)
    except RecomputeError as error:
        assert "side door" in str(error) and "eturn it from the function" in str(error)
        assert kind == "policy" or "test_escaping.py:" in str(error)
    else:
        for ours, expected in zip(actual, gradients(bare, "list", use), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-14)


@pytest.mark.parametrize("use", USES)
def test_a_result_that_is_kept_as_well(use: str) -> None:
    for ours, expected in zip(
        gradients(tg.recompute_grad, "list", use, True), gradients(plain, "list", use, True), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-14)
    within = gradients(tg.recompute_grad, "list", use, True, "1MiB")
    np.testing.assert_array_equal(within, gradients(tg.recompute_grad, "list", use, True))


def test_inside_an_object_that_is_no_structure() -> None:
    assert np.allclose(
        tg.grad(lambda x: tg.sum(tg.recompute_grad(lambda x: Holder(x**3))(x).value))(INPUT), 3 * INPUT**2
    )


def test_of_an_inner_checkpoint_within_the_outer_one() -> None:
    opened: list[Any] = []

    def inner(x: Any) -> Any:
        opened.append(tg.sin(x * 2))
        return tg.exp(opened[-1])

    def outer(x: Any, wrap: Any) -> Any:
        opened.clear()
        return wrap(inner)(x) * opened[-1]

    expected = tg.grad(lambda x: tg.sum(outer(x, plain)))(INPUT)
    actual = tg.grad(lambda x: tg.sum(tg.recompute_grad(lambda x: outer(x, tg.recompute_grad))(x)))(INPUT)
    np.testing.assert_allclose(actual, expected, rtol=1e-14)


def test_the_result_of_an_inner_checkpoint_that_sees_intermediates_alone() -> None:
    opened: list[Any] = []
    w = tg.Variable(WEIGHT)

    def outer(x: Any, wrap: Any) -> Any:
        h = w * x
        opened[:] = [wrap(tg.sin)(h)]
        return h

    with tg.GradientTape() as tape:
        y = tg.recompute_grad(lambda x: outer(x, tg.recompute_grad))(tg.asarray(INPUT))
        loss = tg.sum(y + opened[0])
    gradient = tape.gradient(loss, w)
    with tg.GradientTape() as tape:
        loss = tg.sum(outer(tg.asarray(INPUT), plain) + opened[0])
    np.testing.assert_allclose(gradient, tape.gradient(loss, w), rtol=1e-14)


@pytest.mark.parametrize("kind", ["recompute_grad", "loop"])
def test_as_a_source(kind: str) -> None:
    """A target that depends on it unseen is an error; one that does not has its gradient."""
    kept: list[Any] = []

    def block(x: Any) -> Any:
        kept[:] = [x * 2]
        return kept[0] ** 2

    wrap = tg.recompute_grad(block) if kind == "recompute_grad" else lambda x: tg.checkpointed_loop(block, x, 2)
    x = tg.asarray(INPUT)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = wrap(x) * 1.0
        other = kept[0] * 3.0
    with pytest.raises(RecomputeError, match="a source was made inside .*block.*return the source, too"):
        tape.gradient(y, kept[0])
    np.testing.assert_array_equal(tape.gradient(other, kept[0]), [3, 3])
    assert tape.gradient(y, x) is not None and tape.gradient(y, tg.ones(2)) is None


def test_second_order_and_forward_mode() -> None:
    opened: list[Any] = []

    def f(x: Any) -> Any:
        opened[:] = [x**3]
        return x * 2

    def total(x: Any) -> Any:
        y = tg.recompute_grad(f)(x)
        return tg.sum(y) + tg.sum(opened[0])

    x = tg.asarray(INPUT)
    np.testing.assert_allclose(tg.grad(total)(x), 2 + 3 * INPUT**2)
    np.testing.assert_allclose(tg.grad(lambda x: tg.sum(tg.grad(total)(x)))(x), 6 * INPUT)
    np.testing.assert_allclose(tg.jvp(total, (x,), (tg.ones(2, dtype="float64"),))[1], np.sum(2 + 3 * INPUT**2))


def test_numbers_without_a_derivative_are_no_error() -> None:
    seen: list[Any] = []

    def step(x: Any) -> Any:
        h = tg.sin(x)
        seen.append((tg.argmax(h), tg.stop_gradient(h), h))
        return h

    with tg.GradientTape() as tape:
        x = tg.asarray(INPUT)
        tape.watch(x)
        y = tg.checkpointed_loop(step, x, 4)
        loss = tg.sum(y) + tg.sum(seen[1][1]) * seen[1][0]
        assert len(f"{seen[2][2]}") > 5 and tg.max(seen[2][2]).item() < 1
    assert np.all(np.isfinite(tape.gradient(loss, x)))


def test_a_rerun_that_does_something_else_is_refused() -> None:
    seen: list[Any] = []

    def f(x: Any) -> Any:
        if not seen:
            x = x + 0 * x
        seen.append(tg.exp(x))
        return tg.sin(x)

    with tg.GradientTape() as tape:
        x = tg.asarray(INPUT)
        tape.watch(x)
        loss = tg.sum(tg.recompute_grad(f)(x)) + tg.sum(seen[0])
    with pytest.raises(RecomputeError, match=r"recompute_grad\(f\).*result of exp.*side door.*return it"):
        tape.gradient(loss, x)


def test_nothing_is_kept_for_values_that_stay_inside() -> None:
    with tg.measure() as m, tg.GradientTape() as tape:
        x = tg.asarray(np.ones(10_000))
        tape.watch(x)
        for _ in range(5):
            x = tg.recompute_grad(lambda x: tg.exp(-tg.tanh(x)))(x)
        gc.collect()
        base = m.live_bytes
        dropped = [tg.recompute_grad(lambda x: tg.exp(-tg.tanh(x)))(x) for _ in range(70)]
        del dropped
        gc.collect()
        assert m.live_bytes - base < 80_512


def wrapped(depth: int) -> Callable[[Any], Any]:
    f: Callable[[Any], Any] = lambda x: x * 1.01
    for _ in range(depth):
        f = tg.recompute_grad(lambda x, f=f: tg.sin(f(x)))
    return f


def test_many_nested_checkpoints_need_no_other_limit_of_recursion() -> None:
    limit = sys.getrecursionlimit()
    x = tg.asarray(INPUT)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = wrapped(150)(x)
    value, slope = INPUT * 1.01, np.full(2, 1.01)
    for _ in range(150):
        slope, value = slope * np.cos(value), np.sin(value)
    np.testing.assert_allclose(tape.gradient(y, x), slope, rtol=1e-12)
    with tg.GradientTape() as tape:
        tape.watch(x)
        wrapped(800)(x)
    assert sys.getrecursionlimit() == limit


def test_a_checkpoint_that_calls_itself_for_ever_is_a_recursion_error() -> None:
    limit = sys.getrecursionlimit()

    @tg.recompute_grad
    def f(x: Any) -> Any:
        return f(x)

    x = tg.asarray(INPUT)
    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(RecursionError):
            f(x)
    assert sys.getrecursionlimit() == limit


# Names that are bound to something else by the time of a rerun -------------------------------------------------------


def test_late_binding_is_refused() -> None:
    ws = [tg.Variable(np.full(2, k)) for k in (1.0, 2.0, 3.0)]

    def gradients(bound: bool) -> list[Any]:
        with tg.GradientTape() as tape:
            h = tg.asarray(INPUT)
            for k in range(3):
                f = (lambda h, k=k: h * ws[k]) if bound else (lambda h: h * ws[k])  # noqa: B023
                h = tg.recompute_grad(f)(h)
            y = tg.sum(h)
        return tape.gradient(y, ws)

    for g, w in zip(gradients(True), ws, strict=True):
        np.testing.assert_allclose(g, INPUT * 6 / np.asarray(w))
    with pytest.raises(RecomputeError, match=r"recompute_grad.*closure variable k was 1 and is 2 now.*lambda x, k=k"):
        gradients(False)


@pytest.mark.parametrize("kind", ["recompute_grad", "loop", "chain", "method"])
def test_a_number_that_changes_before_the_backward_pass(kind: str) -> None:
    scale, calls = 2.0, 0

    class Model:
        factor = 1.0

        def __init__(self) -> None:
            self.factor = 2.0

        def call(self, x: Any) -> Any:
            return x * self.factor

    model = Model()

    def f(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x * scale

    wrap = {
        "recompute_grad": lambda: tg.recompute_grad(f),
        "loop": lambda: lambda x: tg.checkpointed_loop(f, x, 3),
        "chain": lambda: lambda x: tg.checkpoint_sequential([f, tg.sin], x),
        "method": lambda: tg.recompute_grad(model.call),
    }[kind]()
    for change in (False, True):
        with tg.GradientTape() as tape:
            x = tg.asarray(INPUT)
            tape.watch(x)
            y = wrap(x)
        if not change:
            tape.gradient(y, x)
            continue
        scale = model.factor = 5.0
        with pytest.raises(RecomputeError, match=r"(closure variable scale|self.factor) was 2.0 and is 5.0 now"):
            tape.gradient(y, x)


def by_sequential(f: Any) -> Any:
    return lambda x: tg.checkpoint_sequential([f, tg.sin], x)


def by_loop(f: Any) -> Any:
    return lambda x: tg.checkpointed_loop(f, x, 2)


@pytest.mark.parametrize("wrap", [tg.recompute_grad, by_sequential, by_loop])
def test_a_value_that_leaves_by_an_exception_is_refused(wrap: Any) -> None:
    w = tg.Variable(INPUT)

    def block(x: tg.Tensor) -> tg.Tensor:
        raise ValueError(w**2 * x)

    with tg.GradientTape() as tape:
        with pytest.raises(ValueError) as error:
            wrap(block)(tg.asarray(INPUT))
        loss = tg.sum(error.value.args[0])
    with pytest.raises(RecomputeError, match="side door"):
        tape.gradient(loss, w)
