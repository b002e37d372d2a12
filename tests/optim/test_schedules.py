"""Schedules against their formulas, in optimizers, in captured steps and through files."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim
from tapegrad.errors import TapegradError
from tapegrad.optim import schedules as s

PI = math.pi
SCHEDULES: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "constant": (s.Constant(0.1), lambda t: 0.1),
    "pieces": (
        s.PiecewiseConstantDecay([3, 7], [1.0, 0.5, 0.1]),
        lambda t: 1.0 if t <= 3 else 0.5 if t <= 7 else 0.1,
    ),
    "exponential": (s.ExponentialDecay(0.1, 5, 0.5), lambda t: 0.1 * 0.5 ** (t / 5)),
    "steps": (s.ExponentialDecay(0.1, 5, 0.5, staircase=True), lambda t: 0.1 * 0.5 ** (t // 5)),
    "inverse": (s.InverseTimeDecay(0.1, 5, 0.5), lambda t: 0.1 / (1 + 0.5 * t / 5)),
    "inverse steps": (s.InverseTimeDecay(0.1, 5, 0.5, True), lambda t: 0.1 / (1 + 0.5 * (t // 5))),
    "line": (s.PolynomialDecay(0.1, 8), lambda t: 0.1 + (1e-4 - 0.1) * min(t, 8) / 8),
    "rising line": (s.PolynomialDecay(0.0, 8, 0.5), lambda t: 0.5 * min(t, 8) / 8),
    "square": (s.PolynomialDecay(0.1, 8, 0.02, 2.0), lambda t: 0.02 + 0.08 * (1 - min(t, 8) / 8) ** 2),
    "cycles": (
        s.PolynomialDecay(0.1, 4, 0.02, 2.0, cycle=True),
        lambda t: 0.02 + 0.08 * (1 - t / (4 * max(1, -(-t // 4)))) ** 2,
    ),
    "cosine": (s.CosineDecay(0.1, 9, 0.1), lambda t: 0.1 * (0.9 * (1 + math.cos(PI * min(t, 9) / 9)) / 2 + 0.1)),
    "warm cosine": (
        s.CosineDecay(0.01, 9, 0.0, warmup_target=0.1, warmup_steps=3),
        lambda t: 0.01 + 0.03 * t if t < 3 else 0.1 * (1 + math.cos(PI * min(t - 3, 9) / 9)) / 2,
    ),
    "restarts": (
        s.CosineDecayRestarts(0.1, 3, 2.0, 0.5, 0.1),
        lambda t: next(  # periods of 3, 6, 12 ... steps
            0.1 * 0.5**i * (0.9 * (1 + math.cos(PI * (t - 3 * (2**i - 1)) / (3 * 2**i))) / 2 + 0.1)
            for i in range(9)
            if t < 3 * (2 ** (i + 1) - 1)
        ),
    ),
    "equal restarts": (
        s.CosineDecayRestarts(0.1, 4, 1.0, 0.5),
        lambda t: 0.1 * 0.5 ** (t // 4) * (1 + math.cos(PI * (t % 4) / 4)) / 2,
    ),
    "warm-up": (s.LinearWarmup(0.5, 4, 0.1), lambda t: 0.1 + 0.4 * min(t, 4) / 4),
    "warm-up, then": (
        s.LinearWarmup(s.ExponentialDecay(0.5, 2, 0.5), 4),
        lambda t: 0.5 * t / 4 if t < 4 else 0.5 * 0.5 ** ((t - 4) / 2),
    ),
    "joined": (
        s.JoinedSchedules([s.LinearWarmup(1.0, 3), s.Constant(1.0), s.PolynomialDecay(1.0, 4, 0.0)], [3, 6]),
        lambda t: t / 3 if t < 3 else 1.0 if t < 6 else 1 - min(t - 6, 4) / 4,
    ),
}
by_name = pytest.mark.parametrize("name", SCHEDULES)


@by_name
def test_the_formula(name: str) -> None:
    schedule, formula = SCHEDULES[name]
    for t in range(40):
        assert schedule(t) == pytest.approx(formula(t), rel=1e-12, abs=1e-15), t
        assert type(schedule(t)) is float
    assert schedule(tg.Variable(5)) == schedule(np.int64(5)) == schedule(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("t_mul", [1.1, 1.5, 2.0, 3.0])
def test_restarts_begin_when_a_period_is_over(t_mul: float) -> None:
    """The logarithm of a boundary may be rounded to either side."""
    schedule, begin = s.CosineDecayRestarts(1.0, 1000, t_mul, 1.0), 0.0
    for i in range(9):
        assert schedule(math.ceil(begin)) > 0.99 and (i == 0 or schedule(math.ceil(begin) - 1) < 0.01)
        begin += 1000 * t_mul**i
    thirds = s.CosineDecayRestarts(1.0, 3, 3.0, 1.0)
    assert [thirds(3 * (3**i - 1) // 2) for i in range(12)] == [1.0] * 12


def test_like_torch() -> None:
    torch = pytest.importorskip("torch")
    of = torch.optim.lr_scheduler
    p = torch.nn.Parameter(torch.zeros(1))
    for ours, theirs in [
        (s.ExponentialDecay(0.1, 5, 0.5, True), lambda o: of.StepLR(o, 5, 0.5)),
        (s.ExponentialDecay(0.1, 1, 0.9), lambda o: of.ExponentialLR(o, 0.9)),
        (s.CosineDecay(0.1, 9), lambda o: of.CosineAnnealingLR(o, 9)),
        (s.CosineDecayRestarts(0.1, 3), lambda o: of.CosineAnnealingWarmRestarts(o, 3, 2)),
        (s.PolynomialDecay(0.1, 8, 0.0, 2.0), lambda o: of.PolynomialLR(o, 8, 2.0)),
        (s.LinearWarmup(0.1, 4, 0.025), lambda o: of.LinearLR(o, 0.25, 1.0, 4)),
    ]:
        optimizer = torch.optim.SGD([p], 0.1)
        schedule = theirs(optimizer)
        for t in range(9):
            assert ours(t) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), (ours, t)
            optimizer.step()
            schedule.step()


@by_name
def test_a_captured_step_asks_anew_and_is_captured_once(name: str) -> None:
    def run(captured: bool) -> tuple[list[bytes], Any]:
        v, optimizer = tg.Variable(np.arange(1.0, 5.0)), optim.SGD(SCHEDULES[name][0], momentum=0.5)
        step = lambda x: optimizer.apply([v * x], [v])
        f = tg.function(step) if captured else step
        found = []
        for i in range(12):
            f(tg.asarray(np.full(4, 0.1 * i)))
            found.append(v.numpy().tobytes())
        return found, f.stats if captured else None

    (eager, _), (replayed, stats) = run(False), run(True)
    assert eager == replayed
    assert stats.traces == 1 and stats.replays == 10 and not stats.fallbacks


def test_a_schedule_that_a_captured_step_asks_itself_is_not_frozen() -> None:
    """The number that it is asked with becomes a constant of the program, which is found and given up."""

    def run(function: Callable[..., Any]) -> list[Any]:
        numbers = list[int]()
        v, optimizer = tg.Variable([1.0]), optim.SGD(lambda step: (numbers.append(step), 0.1)[1])

        @function
        def step(x: Any) -> Any:
            optimizer.apply([x], [v])
            return x * s.ExponentialDecay(0.1, 5, 0.5)(numbers[-1])

        return [step(tg.asarray([1.0])).item() for _ in range(4)]

    with pytest.warns(UserWarning, match="runs eagerly"):
        found = run(tg.function)
    assert found == run(lambda f: f) and len(set(found)) == 4


@by_name
def test_values_that_are_copied_pickled_and_saved_with_an_optimizer(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name][0]
    for other in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert other == schedule and [other(t) for t in range(9)] == [schedule(t) for t in range(9)]
    assert repr(schedule).startswith(type(schedule).__name__ + "(")
    tg.random.seed(0)
    x = np.ones((1, 2), np.float32)
    layer, optimizer = tg.nn.Dense(1), optim.SGD(schedule)
    layer(x)

    def step(layer: Any, optimizer: Any) -> None:
        vs = layer.trainable_variables
        optimizer.apply([tg.ones(v.shape) for v in vs], vs)

    for _ in range(5):
        step(layer, optimizer)
    layer.save(tmp_path / "m.safetensors", optimizer)
    again, resumed = tg.nn.Dense(1), optim.SGD(schedule)
    again(x)
    again.load(tmp_path / "m.safetensors", resumed)
    together = pickle.loads(pickle.dumps((layer, optimizer)))
    for pair in ((layer, optimizer), (again, resumed), together):
        assert pair[1].current_learning_rate() == schedule(5)
        step(*pair)
    assert layer.kernel.numpy().tobytes() == again.kernel.numpy().tobytes() == together[0].kernel.numpy().tobytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: s.Constant(-1.0), "Constant: wanted value of at least 0, got -1.0"),
        (lambda: s.Constant(math.nan), "wanted value of at least 0"),
        (lambda: s.PiecewiseConstantDecay([3, 3], [1, 2, 3]), r"boundaries that increase from 0 on, got \[3, 3\]"),
        (lambda: s.PiecewiseConstantDecay([3], [1]), "one value more than the 1 boundaries, got 1"),
        (lambda: s.PiecewiseConstantDecay([3], [1, -1]), "wanted values of at least 0"),
        (lambda: s.ExponentialDecay(0.1, 0, 0.5), "ExponentialDecay: wanted a positive decay_steps, got 0"),
        (lambda: s.InverseTimeDecay(0.1, 1, -0.5), "wanted decay_rate of at least 0"),
        (lambda: s.PolynomialDecay(0.1, 1, power=0), "wanted a positive power"),
        (lambda: s.CosineDecay(-0.1, 1), "wanted initial_learning_rate of at least 0"),
        (lambda: s.CosineDecayRestarts(0.1, 1, 0.5), "wanted t_mul of at least 1, got 0.5"),
        (lambda: s.LinearWarmup(-0.1, 1), "wanted target of at least 0"),
        (lambda: s.LinearWarmup(0.1, 0), "wanted a positive steps"),
        (lambda: s.JoinedSchedules([s.Constant(1.0)], [1]), "one schedule more than the 1 boundaries, got 1"),
        (lambda: s.JoinedSchedules([0.1], []), r"wanted schedules, got 0.1; use Constant\(0.1\)"),  # type: ignore
        (lambda: s.Constant(1.0) and s.CosineDecay(0.1, 3)(-1), "asked for step -1; the first is 0"),
    ],
)
def test_what_makes_no_schedule_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TapegradError, match=message):
        make()
