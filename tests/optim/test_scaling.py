"""LossScaler: steps that overflow are left out on the device, and the scale follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import errors, optim

MAKERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optim.SGD(0.1),
    "momentum": lambda: optim.SGD(0.1, 0.9, weight_decay=0.1),
    "Adam": lambda: optim.Adam(0.1),
    "AdamW, clipped": lambda: optim.AdamW(0.1, global_clipnorm=1.0),
    "RMSprop": lambda: optim.RMSprop(0.1),
    "Lion": lambda: optim.Lion(0.1),
    "LAMB": lambda: optim.LAMB(0.1),
    "scheduled": lambda: optim.Adam(optim.schedules.ExponentialDecay(0.1, 2, 0.9)),
}
INF = float("inf")


def apply(scaler: Any, v: Any, g: Any) -> None:
    """A step by the gradient ``g`` of a loss that was not scaled yet."""
    scaled = None if g is None else tg.asarray(g) * scaler.current_scale
    scaler.apply_gradients([(scaled, v)])


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_the_optimizer_without_the_steps_left_out(name: str) -> None:
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(4, 3)).astype("f4") for _ in range(6)]
    bad = np.full((4, 3), np.nan, "f4")
    v, w = tg.Variable(tg.ones((4, 3))), tg.Variable(tg.ones((4, 3)))
    scaler, plain = optim.LossScaler(MAKERS[name](), 256.0), MAKERS[name]()
    for k, g in enumerate(grads):
        if k in (0, 3) and name != "scheduled":
            before = v.numpy().copy(), [s.numpy().copy() for s in scaler.optimizer.slots_of(v).values()]
            apply(scaler, v, bad)
            np.testing.assert_array_equal(v.numpy(), before[0])
            for s, old in zip(scaler.optimizer.slots_of(v).values(), before[1]):
                np.testing.assert_array_equal(s.numpy(), old)
        apply(scaler, v, g)
        plain.apply([g], [w])
    np.testing.assert_allclose(v.numpy(), w.numpy(), rtol=2e-6)
    for s, t in zip(scaler.optimizer.slots_of(v).values(), plain.slots_of(w).values()):
        np.testing.assert_allclose(s.numpy(), t.numpy(), rtol=2e-6)
    left_out = 0 if name == "scheduled" else 2
    assert scaler.skipped.item() == left_out and int(scaler.optimizer.iterations) == 6 + left_out


def test_the_scale_shrinks_and_grows() -> None:
    v = tg.Variable(tg.ones(2))
    scaler = optim.LossScaler(optim.SGD(0.0), 8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    seen = []
    for g in ([1, 1], [1, INF], [np.nan, 1], [1, 1], [1, 1], [1, 1], [-INF, 1], [1, 1], [1, 1]):
        apply(scaler, v, np.asarray(g, "f4"))
        seen.append(scaler.current_scale.item())
    assert seen == [8, 2, 0.5, 0.5, 2, 2, 0.5, 0.5, 2]
    assert scaler.skipped.item() == 3


def test_the_scale_stays_within_limits() -> None:
    v = tg.Variable(tg.ones(2))
    scaler = optim.LossScaler(optim.SGD(0.0), 2.0**-13, growth_interval=1)
    for _ in range(4):
        apply(scaler, v, [INF, 1.0])
    assert scaler.current_scale.item() == 2.0**-14
    scaler = optim.LossScaler(optim.SGD(0.0), 2.0**127, growth_interval=1)
    scaler.apply_gradients([(tg.ones(2), v)])
    assert scaler.current_scale.item() == 2.0**127  # twice as much is no float32


def float16_run(wrap: Callable[[Any], Any], make: Callable[[], Any] = optim.Adam, steps: int = 16) -> Any:
    """What a training in float16 leaves, whose scale is too large at first, step by step, as bytes."""
    v = tg.Variable((np.random.default_rng(0).normal(size=(6, 6)) / 3).astype("f4"))
    scaler = optim.LossScaler(make(), 2.0**20, growth_interval=4)

    @wrap
    def step(x: tg.Tensor) -> tg.Tensor:
        with tg.GradientTape() as tape:
            with tg.autocast("float16"):
                loss = tg.mean(tg.square(tg.tanh(x @ v) - 0.5))
            scaled = scaler.scale(loss)
        scaler.apply_gradients([(tape.gradient(scaled, v), v)])
        return loss

    x, seen = tg.asarray(np.random.default_rng(1).normal(size=(64, 6)).astype("f4") * 8), []
    for _ in range(steps):
        loss = step(x)
        state = [v, *scaler.variables, *scaler.optimizer.variables]
        seen.append((loss.numpy().tobytes(), *(s.numpy().tobytes() for s in state)))
    return seen, scaler, step


@pytest.mark.parametrize("make", [optim.Adam, optim.LAMB, lambda: optim.SGD(0.1, 0.9)])
def test_float16_overflows_are_left_out_eager_and_captured_to_the_same_bits(make: Callable[[], Any]) -> None:
    eager, scaler, _ = float16_run(lambda f: f, make)
    captured, other, step = float16_run(tg.function, make)
    assert eager == captured
    assert step.stats.replays > 10 and not step.stats.fallbacks
    assert 0 < scaler.skipped.item() < 16 and scaler.skipped.item() == other.skipped.item()
    first, values = eager[0], {row[1] for row in eager}
    assert eager[1][1] == first[1] and len(values) > 8  # left out at first, then not


def test_a_captured_step_does_not_look_at_values() -> None:
    """The host is asked for nothing: a look at a value inside a captured function is an error."""
    _, scaler, step = float16_run(tg.function, steps=3)
    assert step.stats.traces == 1
    with pytest.raises(errors.FunctionError):
        tg.function(lambda: float(scaler.current_scale))()


def test_accumulated_gradients_that_are_not_finite_count_as_zeros() -> None:
    for wrap in (lambda f: f, tg.function):
        v = tg.Variable(tg.ones(2))
        scaler = optim.LossScaler(optim.SGD(1.0, gradient_accumulation_steps=2), 4.0)
        step = wrap(lambda g, scaler=scaler, v=v: apply(scaler, v, g))
        for g in ([1, 2], [INF, 1], [1, 1], [1, 3], [np.nan, 1], [INF, 1]):
            step(tg.asarray(np.asarray(g, "f4")))
        assert v.numpy().tolist() == [1 - 0.5 - 1, 1 - 1 - 2]
        assert scaler.skipped.item() == 3 and scaler.current_scale.item() == 0.5


def test_parts_for_those_who_apply_gradients_themselves() -> None:
    scaler, v = optim.LossScaler(optim.SGD(1.0), 1024.0), tg.Variable([1.0, 2.0])
    with tg.GradientTape() as tape:
        scaled = scaler.scale(tg.sum(v * v))
    scaled_gradient = tape.gradient(scaled, v)
    assert scaled.item() == 5 * 1024 and scaled_gradient.numpy().tolist() == [2048.0, 4096.0]
    (g, nothing) = scaler.unscale([tg.astype(scaled_gradient, "float16"), None])
    assert g.dtype == "float32" and g.numpy().tolist() == [2.0, 4.0] and nothing is None
    scaler.update(False)
    scaler.update(tg.all(tg.isfinite(g)))
    assert scaler.current_scale.item() == 512.0 and scaler.skipped.item() == 1


def test_half_variables_and_no_gradients() -> None:
    v, w = tg.Variable(tg.ones(3, dtype="float16")), tg.Variable(tg.ones(3))
    scaler = optim.LossScaler(optim.SGD(2.0**-12), 64.0)
    for bad in (False, True):
        g = tg.full(3, INF if bad else 64.0, dtype="float16")
        scaler.apply_gradients([(g, v), (None, w)], skip_none=True)
    assert scaler.optimizer.slots_of(v)["master"].numpy().tolist() == [1 - 2.0**-12] * 3
    with pytest.raises(errors.GradientError, match="no gradient"):
        scaler.apply_gradients([(None, w)])
    with pytest.raises(errors.GradientError, match="wanted pairs"):
        scaler.apply_gradients([w])


def test_state_is_saved_and_comes_back(tmp_path: Any) -> None:
    _, scaler, _ = float16_run(lambda f: f)
    state = scaler.state_dict()
    assert sorted(state) == ["good_steps", "scale", "skipped"]
    other = optim.LossScaler(optim.Adam())
    assert other.current_scale.item() == 2.0**15
    other.load_state_dict(state)
    third = optim.LossScaler(optim.Adam())
    tg.distributed.save(tmp_path / "tree", {"scaler": scaler})
    tg.distributed.load(tmp_path / "tree", {"scaler": third})
    for one in (other, third):
        assert [s.item() for s in one.variables] == [s.item() for s in scaler.variables]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"initial_scale": 0.0}, "initial_scale"), ({"growth_factor": 0.5}, "growth_factor"),
     ({"backoff_factor": 1.0}, "backoff_factor"), ({"backoff_factor": 0.0}, "backoff_factor"),
     ({"growth_interval": 0}, "growth_interval")],
)  # fmt: skip
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.TapegradError, match=message):
        optim.LossScaler(optim.SGD(), **options)


def test_what_it_cannot_scale_for() -> None:
    for other in (optim.LBFGS(), None):
        with pytest.raises(errors.TapegradError, match="wanted an optimizer other than LBFGS"):
            optim.LossScaler(other)
    assert repr(optim.LossScaler(optim.SGD(0.5))) == "LossScaler(SGD(learning_rate=0.5), growth_interval=2000)"


@pytest.mark.parametrize("wrap", [lambda f: f, tg.function])
@pytest.mark.parametrize("make", [optim.Adam, optim.LazyAdam])
def test_slices_are_left_out_as_well(make: Callable[[], Any], wrap: Any) -> None:
    v, w = tg.Variable(tg.ones((5, 2))), tg.Variable(tg.ones((5, 2)))
    scaler, plain = optim.LossScaler(make(), 16.0), make()

    @wrap
    def step(values: tg.Tensor) -> None:
        g = tg.IndexedSlices(values * scaler.current_scale, tg.asarray([1, 3]), (5, 2))
        scaler.apply_gradients([(g, v)])

    for k in range(5):
        values = np.full((2, 2), k + 1.0, "f4")
        if k in (0, 2):
            before = v.numpy().copy()
            step(tg.asarray(np.asarray([[1, np.inf], [1, 1]], "f4")))
            np.testing.assert_array_equal(v.numpy(), before)
        step(tg.asarray(values))
        plain.apply([tg.IndexedSlices(values, [1, 3], (5, 2))], [w])
    np.testing.assert_allclose(v.numpy(), w.numpy(), rtol=1e-6)
    assert scaler.skipped.item() == 2
    (g,) = scaler.unscale([tg.IndexedSlices(tg.ones((1, 2)), [0], (5, 2))])
    assert g.values.numpy().tolist() == [[0.25, 0.25]]
