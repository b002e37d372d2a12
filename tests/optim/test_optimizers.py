"""Optimizers against their papers' formulas in a few lines of NumPy, to the bit, and against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim
from tapegrad.errors import DTypeError, GradientError, NotATensorError, TapegradError

STEPS = 5


def gradients(shape: tuple[int, ...], dtype: Any, steps: int = STEPS) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape).astype(dtype) for _ in range(steps)]


def start(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.random.default_rng(8).normal(size=shape).astype(dtype)


def numpy_sgd(x: Any, grads: list[Any], rate: float, decay: float, momentum: float, nesterov: bool) -> Any:
    velocity = np.zeros_like(x)
    for g in grads:
        x = x * (1 - rate * decay) if decay else x
        if not momentum:
            x = x - rate * g
            continue
        velocity = momentum * velocity - rate * g
        x = x + momentum * velocity - rate * g if nesterov else x + velocity
    return x


def numpy_adam(x: Any, grads: list[Any], rate: float, decay: float, b1: float, b2: float, epsilon: float) -> Any:
    """The order of computation at the end of section 2 of arXiv 1412.6980, with decoupled decay (arXiv 1711.05101)."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        x = x * (1 - rate * decay) if decay else x
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g * g)
        x = x - rate * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + epsilon)
    return x


def numpy_rmsprop(
    x: Any, grads: list[Any], rate: float, rho: float, momentum: float, epsilon: float, centered: bool, decay: float
) -> Any:
    """Equations 38 to 45 of arXiv 1308.0850."""
    s, a, v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for g in grads:
        x = x * (1 - rate * decay) if decay else x
        s = rho * s + (1 - rho) * (g * g)
        a = rho * a + (1 - rho) * g
        v = momentum * v + rate * g / np.sqrt((np.maximum(s - a * a, 0) if centered else s) + epsilon)
        x = x - v
    return x


def numpy_adagrad(x: Any, grads: list[Any], rate: float, start: float, epsilon: float) -> Any:
    s = np.full_like(x, start)
    for g in grads:
        s = s + g * g
        x = x - rate * g / np.sqrt(s + epsilon)
    return x


def numpy_lion(x: Any, grads: list[Any], rate: float, b1: float, b2: float, decay: float) -> Any:
    """Program 1 of arXiv 2302.06675."""
    m = np.zeros_like(x)
    for g in grads:
        x = x * (1 - rate * decay) if decay else x
        x = x - rate * np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
    return x


CASES: dict[str, tuple[Callable[[], optim.Optimizer], Callable[[Any, list[Any]], Any]]] = {
    "sgd": (optim.SGD, lambda x, gs: numpy_sgd(x, gs, 0.01, 0, 0, False)),
    "momentum": (lambda: optim.SGD(0.1, 0.9), lambda x, gs: numpy_sgd(x, gs, 0.1, 0, 0.9, False)),
    "nesterov": (lambda: optim.SGD(0.1, 0.9, True), lambda x, gs: numpy_sgd(x, gs, 0.1, 0, 0.9, True)),
    "decay": (
        lambda: optim.SGD(0.1, 0.9, weight_decay=0.2),
        lambda x, gs: numpy_sgd(x, gs, 0.1, 0.2, 0.9, False),
    ),
    "adam": (optim.Adam, lambda x, gs: numpy_adam(x, gs, 1e-3, 0, 0.9, 0.999, 1e-7)),
    "adam options": (
        lambda: optim.Adam(0.1, 0.8, 0.9, 1e-3, weight_decay=0.1),
        lambda x, gs: numpy_adam(x, gs, 0.1, 0.1, 0.8, 0.9, 1e-3),
    ),
    "adamw": (optim.AdamW, lambda x, gs: numpy_adam(x, gs, 1e-3, 0.004, 0.9, 0.999, 1e-7)),
    "rmsprop": (optim.RMSprop, lambda x, gs: numpy_rmsprop(x, gs, 1e-3, 0.9, 0, 1e-7, False, 0)),
    "rmsprop, momentum": (
        lambda: optim.RMSprop(0.1, 0.8, 0.5, 1e-3),
        lambda x, gs: numpy_rmsprop(x, gs, 0.1, 0.8, 0.5, 1e-3, False, 0),
    ),
    "rmsprop, centered": (
        lambda: optim.RMSprop(0.1, 0.8, centered=True),
        lambda x, gs: numpy_rmsprop(x, gs, 0.1, 0.8, 0, 1e-7, True, 0),
    ),
    "rmsprop, all": (
        lambda: optim.RMSprop(0.1, 0.8, 0.5, 1e-3, True, 0.1),
        lambda x, gs: numpy_rmsprop(x, gs, 0.1, 0.8, 0.5, 1e-3, True, 0.1),
    ),
    "adagrad": (optim.Adagrad, lambda x, gs: numpy_adagrad(x, gs, 1e-3, 0.1, 1e-7)),
    "adagrad, options": (lambda: optim.Adagrad(0.1, 0.0, 1e-2), lambda x, gs: numpy_adagrad(x, gs, 0.1, 0, 1e-2)),
    "lion": (optim.Lion, lambda x, gs: numpy_lion(x, gs, 1e-3, 0.9, 0.99, 0)),
    "lion, options": (lambda: optim.Lion(0.1, 0.8, 0.9, 0.3), lambda x, gs: numpy_lion(x, gs, 0.1, 0.8, 0.9, 0.3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (300, 400)])  # at once, and as a fused kernel in tiles
def test_every_bit_is_the_formula_s(name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    make, reference = CASES[name]
    x, grads = start(shape, dtype), gradients(shape, dtype)
    v, optimizer = tg.Variable(x), make()
    for g in grads:
        optimizer.apply_gradients(zip([g], [v], strict=True))
    assert v.dtype == dtype
    assert np.array_equal(v.numpy(), reference(x, grads))
    assert int(optimizer.iterations) == STEPS


def numpy_lamb(x: Any, grads: list[Any], rate: float, b1: float, b2: float, epsilon: float, decay: float) -> Any:
    """Algorithm 2 of arXiv 1904.00962."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon) + decay * x
        of_x, of_u = np.sqrt((x**2).sum()), np.sqrt((u**2).sum())
        x = x - rate * (of_x / of_u if of_x > 0 and of_u > 0 else 1.0) * u
    return x


@pytest.mark.parametrize("options", [{}, {"learning_rate": 0.1, "beta_1": 0.8, "epsilon": 1e-3, "weight_decay": 0.2}])
@pytest.mark.parametrize("shape", [(), (3,), (300, 40)])
def test_lamb_is_the_formula(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """The norms' sums have an order of their own."""
    x, grads = start(shape, np.float64), gradients(shape, np.float64)
    v, w = tg.Variable(x), tg.Variable(np.zeros((2, 2)))
    optimizer = optim.LAMB(**options)
    for g in grads:
        optimizer.apply([g, np.ones((2, 2))], [v, w])
    given = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6, "weight_decay": 0.0, **options}
    np.testing.assert_allclose(v.numpy(), numpy_lamb(x, grads, *given.values()), rtol=1e-12)
    ones = [np.ones((2, 2))] * STEPS  # the first time |x| is 0
    np.testing.assert_allclose(w.numpy(), numpy_lamb(np.zeros((2, 2)), ones, *given.values()), rtol=1e-12)


def test_lamb_at_zeros_and_at_what_is_not_finite() -> None:
    v, w, e = tg.Variable([1.0, 2.0]), tg.Variable([1.0, 2.0]), tg.Variable(np.zeros((0, 2), np.float32))
    optim.LAMB(0.1).apply([[0.0, 0.0], [np.nan, 1.0], np.zeros((0, 2))], [v, w, e])
    assert v.numpy().tolist() == [1, 2] and np.isnan(w.numpy()).all() and e.shape == (0, 2)
    half = tg.Variable(np.full(300, 300.0, np.float16))  # the sum of squares is beyond float16
    optim.LAMB(0.1).apply([np.full(300, 0.5)], [half])
    np.testing.assert_allclose(half.numpy(), np.full(300, 270.0), rtol=1e-3)


def test_a_centered_variance_does_not_become_negative() -> None:
    """Of equal gradients it is 0, and rounding makes it less where squares are large."""
    v, optimizer = tg.Variable(np.zeros(50, np.float32)), optim.RMSprop(0.1, centered=True, epsilon=1e-7)
    g = np.linspace(1, 1e4, 50, dtype=np.float32)
    for _ in range(300):
        optimizer.apply([g], [v])
    assert np.isfinite(v.numpy()).all()


LIKE_TORCH: list[tuple[optim.Optimizer, str, dict[str, Any]]] = [
    (optim.SGD(0.1), "SGD", {"lr": 0.1}),
    (optim.SGD(0.1, 0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD(0.1, 0.9, True), "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam(0.1, epsilon=1e-14), "Adam", {"lr": 0.1, "eps": 1e-14}),
    (
        optim.AdamW(0.1, 0.3, 0.8, 0.99, epsilon=1e-14),
        "AdamW",
        {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-14, "weight_decay": 0.3},
    ),
    (optim.RMSprop(0.1, 0.95, epsilon=1e-20), "RMSprop", {"lr": 0.1, "alpha": 0.95, "eps": 1e-14}),
    (
        optim.RMSprop(0.1, 0.95, 0.5, 1e-20, True),
        "RMSprop",
        {"lr": 0.1, "alpha": 0.95, "eps": 1e-14, "momentum": 0.5, "centered": True},
    ),
    (
        optim.Adagrad(0.1, 0.3, 1e-20),
        "Adagrad",
        {"lr": 0.1, "eps": 1e-14, "initial_accumulator_value": 0.3},
    ),
]


def test_like_torch() -> None:
    """With an epsilon that does not matter, since ours is the paper's epsilon hat."""
    torch = pytest.importorskip("torch")
    x, grads = start((4, 5), np.float64), gradients((4, 5), np.float64, steps=20)
    for ours, name, options in LIKE_TORCH:
        v, p = tg.Variable(x), torch.tensor(x, requires_grad=True)
        theirs = getattr(torch.optim, name)([p], **options)
        for g in grads:
            ours.apply([g], [v])
            p.grad = torch.tensor(g)
            theirs.step()
        np.testing.assert_allclose(v.numpy(), p.detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=f"{name} {options}")


def test_state_lives_in_variables_of_its_own() -> None:
    v, w = tg.Variable([1.0, 2.0], name="v"), tg.Variable(3.0, name="w")
    optimizer = optim.Adam(name="adam")
    assert [s.name for s in optimizer.variables] == ["adam/iterations"]
    optimizer.apply([tg.ones((2,)), 1.0], [v, w])
    assert [s.name for s in optimizer.variables] == [
        "adam/iterations", "adam/m/v", "adam/v/v", "adam/m/w", "adam/v/w",
    ]  # fmt: skip
    assert not any(s.trainable for s in optimizer.variables)
    assert all(s.category == "optimizer" for s in optimizer.variables)
    assert [s.shape for s in optimizer.variables] == [(), (2,), (2,), (), ()]
    assert set(optimizer.slots_of(v)) == {"m", "v"} and optimizer.slots_of(tg.Variable(1.0)) == {}
    assert [s.name for s in optim.SGD().variables] == ["SGD/iterations"]


def test_the_rate_may_be_set_and_may_be_a_schedule() -> None:
    v = tg.Variable([0.0], dtype="float64")
    optimizer = optim.SGD(1.0)
    optimizer.apply([[1.0]], [v])
    optimizer.learning_rate = 0.25
    optimizer.apply([[1.0]], [v])
    assert v.numpy().tolist() == [-1.25]
    seen = []
    scheduled = optim.SGD(lambda step: seen.append(step) or 1.0 / (step + 1))
    for _ in range(3):
        scheduled.apply([[1.0]], [v])
    assert seen == [0, 1, 2]
    assert v.numpy()[0] == pytest.approx(-1.25 - 1 - 1 / 2 - 1 / 3, rel=1e-15)


def test_a_bad_schedule_is_refused_before_anything_changes() -> None:
    v = tg.Variable([1.0])
    for bad in (-1.0, float("nan")):
        optimizer = optim.SGD(lambda step, bad=bad: bad)
        with pytest.raises(TapegradError, match="wanted learning_rate of at least"):
            optimizer.apply([[1.0]], [v])
    assert v.numpy().tolist() == [1.0]


def test_none_is_an_error_that_names_the_variables_unless_told_otherwise() -> None:
    v, w = tg.Variable([1.0], name="v"), tg.Variable([2.0, 3.0], name="w")
    optimizer = optim.SGD(1.0)
    with pytest.raises(GradientError, match=r'no gradient \(None\) for variable "w" \(2,\): the target does not'):
        optimizer.apply([tg.ones((1,)), None], [v, w])
    assert v.numpy().tolist() == [1.0] and int(optimizer.iterations) == 0
    optimizer.apply([tg.ones((1,)), None], [v, w], skip_none=True)
    assert v.numpy().tolist() == [0.0] and w.numpy().tolist() == [2.0, 3.0]
    optimizer.apply_gradients([(None, w), ([1.0], v)], skip_none=True)
    assert v.numpy().tolist() == [-1.0]
    with pytest.raises(GradientError, match="there is no gradient to apply"):
        optimizer.apply([None], [v], skip_none=True)


def test_what_does_not_fit_changes_nothing() -> None:
    v, w = tg.Variable([1.0, 2.0], name="v"), tg.Variable([3.0], name="w")
    optimizer = optim.Adam()
    good = tg.ones((2,))
    with pytest.raises(GradientError, match="wanted one gradient per variable, got 1 for 2"):
        optimizer.apply([good], [v, w])
    with pytest.raises(GradientError, match=r'wanted a gradient \(1,\) for variable "w" \(1,\), got \(2,\)'):
        optimizer.apply([good, good], [v, w])
    with pytest.raises(GradientError, match='variable "v" .* appears more than once'):
        optimizer.apply([good, good], [v, v])
    with pytest.raises(GradientError, match="there is no gradient to apply"):
        optimizer.apply([], [])
    with pytest.raises(GradientError, match=r"wanted pairs \(gradient, variable\), got Variable"):
        optimizer.apply_gradients([v, w])  # type: ignore[list-item]
    with pytest.raises(NotATensorError, match="wanted Variables, got Tensor"):
        optimizer.apply([good], [good])  # type: ignore[list-item]
    with pytest.raises(DTypeError, match=r'cannot train variable "i" \(\) of dtype int64'):
        optimizer.apply([1], [tg.Variable(1, name="i")])
    with pytest.raises(DTypeError, match='wanted a real gradient for variable "v" .*, got complex64'):
        optimizer.apply([np.ones(2, np.complex64)], [v])
    with pytest.raises(NotATensorError):
        optimizer.apply(["one"], [w])
    assert v.numpy().tolist() == [1.0, 2.0] and w.numpy().tolist() == [3.0]
    assert int(optimizer.iterations) == 0
    optimizer.apply([good], [v])
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(-1.0),
        lambda: optim.SGD(float("nan")),
        lambda: optim.SGD(momentum=1.0),
        lambda: optim.Adam(beta_1=-0.1),
        lambda: optim.Adam(beta_2=1.0),
        lambda: optim.Adam(epsilon=-1e-7),
        lambda: optim.AdamW(weight_decay=-1.0),
        lambda: optim.AdamW(global_clipnorm=0.0),
        lambda: optim.SGD(clipnorm=-1.0),
        lambda: optim.SGD(clipvalue=0.0),
        lambda: optim.SGD(clipvalue=1.0, clipnorm=1.0),
        lambda: optim.SGD(gradient_accumulation_steps=-1),
        lambda: optim.SGD(gradient_accumulation_steps=2.0),
        lambda: optim.RMSprop(rho=1.0),
        lambda: optim.RMSprop(epsilon=-1.0),
        lambda: optim.Adagrad(initial_accumulator_value=-1.0),
        lambda: optim.Lion(beta_1=2.0),
        lambda: optim.LAMB(beta_2=1.0),
    ],
)
def test_bad_hyperparameters_are_refused(make: Callable[[], optim.Optimizer]) -> None:
    with pytest.raises(TapegradError, match="wanted"):
        make()


def test_gradients_of_another_dtype_are_converted() -> None:
    v = tg.Variable(np.ones(2, np.float32))
    optim.SGD(1.0).apply([np.array([0.5, 0.25])], [v])
    assert v.dtype == np.float32 and v.numpy().tolist() == [0.5, 0.75]


def test_a_step_inside_a_tape_is_not_recorded() -> None:
    v = tg.Variable([1.0])
    with tg.GradientTape(persistent=True) as tape:
        y = v * v
        optim.SGD(0.5).apply([[1.0]], [v])
        z = v * v
    assert tape.gradient(y, v).tolist() == [2.0]
    assert tape.gradient(z, v).tolist() == [1.0]


def test_training_reaches_the_least_squares_solution() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3)), rng.normal(size=(50, 1))
    w, optimizer = tg.Variable(np.zeros((3, 1))), optim.Adam(lambda step: 0.1 * 0.98**step)
    for _ in range(500):
        with tg.GradientTape() as tape:
            loss = tg.mean((tg.asarray(x) @ w - y) ** 2)
        optimizer.apply([tape.gradient(loss, w)], [w])
    np.testing.assert_allclose(w.numpy(), np.linalg.lstsq(x, y, rcond=None)[0], atol=1e-3)


def test_state_does_not_grow_from_step_to_step() -> None:
    v, optimizer = tg.Variable(np.ones((400, 400), np.float32)), optim.Adam()
    g = tg.ones((400, 400))
    optimizer.apply([g], [v])
    with tg.measure() as m:
        optimizer.apply([g], [v])
        first = m.live_bytes
        for _ in range(5):
            optimizer.apply([g], [v])
        assert m.live_bytes == first


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("make", [lambda: tg.optim.SGD(0.1), lambda: tg.optim.SGD(0.1, 0.9, True, weight_decay=0.2),
                                  lambda: tg.optim.AdamW(0.1), lambda: tg.optim.Lion(0.1, weight_decay=0.2),
                                  lambda: tg.optim.RMSprop(0.1, 0.9, 0.5, centered=True),
                                  tg.optim.Adagrad, tg.optim.LAMB])  # fmt: skip
def test_several_updates_have_the_bits_of_those_one_by_one(make, dtype) -> None:
    chance = np.random.default_rng(0)
    shapes = [(), (0, 3), (3, 5), (257,), (5, 3), (1, 1, 4)]
    starts = [chance.normal(size=shape).astype(dtype) for shape in shapes]
    steps = [[chance.normal(size=shape).astype(dtype) for shape in shapes] for _ in range(3)]
    steps[0][2].flat[0], steps[1][3].flat[-1] = np.inf, 1e-7

    def trained(*which: int) -> list[list[bytes]]:
        variables, optimizer = [tg.Variable(starts[i]) for i in which], make()
        for gs in steps:
            # The fifth does not lie in order.
            optimizer.apply([tg.asarray(gs[i].T.copy()).mT if i == 4 else tg.asarray(gs[i]) for i in which], variables)
        each = len(optimizer.variables) // len(which)  # states, which follow the counter
        states = [optimizer.variables[1 + each * i : 1 + each * (i + 1)] for i in range(len(which))]
        return [[x.numpy().tobytes() for x in (v, *own)] for v, own in zip(variables, states, strict=True)]

    with np.errstate(all="ignore"):
        assert trained(*range(6)) == [one for i in range(6) for one in trained(i)]
