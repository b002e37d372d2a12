"""Schedules: learning rates as functions of the number of steps done, under Keras' names, with optax' joining.

A schedule is a callable of one number that gives a float; ``learning_rate=`` takes it.  It is a plain value: what
changes, the number of steps, is the optimizer's ``iterations``, so it goes on where a saved optimizer is loaded, and a
captured step (``tg.function``) asks it anew in each replay.  Where steps are divided, the quotient is a float64.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tapegrad.errors import TapegradError
from tapegrad.optim.optimizers import checks
from tapegrad.spellings import open_to_users

__all__ = [
    "Constant", "CosineDecay", "CosineDecayRestarts", "ExponentialDecay", "InverseTimeDecay", "JoinedSchedules",
    "LinearWarmup", "PiecewiseConstantDecay", "PolynomialDecay", "Schedule",
]  # fmt: skip

Schedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """``value`` at every step.  Raises TapegradError for a negative one."""

    value: float

    def __post_init__(self) -> None:
        _not_negative(self, value=self.value)

    def __call__(self, step: int) -> float:
        return float(self.value)


@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """``values[0]`` for the steps up to ``boundaries[0]``, then ``values[1]`` up to ``boundaries[1]``, and so on.

    As in Keras a boundary belongs to the piece before it.  Raises TapegradError unless there is one value more than
    boundaries, and these increase.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        _increasing(self, self.boundaries)
        if len(self.values) != len(self.boundaries) + 1:
            raise TapegradError(
                f"{_name(self)}: wanted one value more than the {len(self.boundaries)} boundaries, "
                f"got {len(self.values)}"
            )
        for value in self.values:
            _not_negative(self, values=value)

    def __call__(self, step: int) -> float:
        return float(self.values[bisect.bisect_left(self.boundaries, _steps(step))])


@dataclass(frozen=True)
class ExponentialDecay:
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``; with ``staircase`` the quotient is rounded down.

    With ``staircase`` it is what PyTorch calls StepLR.  Raises TapegradError for a negative rate, and unless
    ``decay_steps`` is positive.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _not_negative(self, initial_learning_rate=self.initial_learning_rate, decay_rate=self.decay_rate)
        _positive(self, decay_steps=self.decay_steps)

    def __call__(self, step: int) -> float:
        exponent = _steps(step) / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (math.floor(exponent) if self.staircase else exponent)


@dataclass(frozen=True)
class InverseTimeDecay:
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``; ``staircase`` rounds the quotient down.

    Raises TapegradError for a negative rate, and unless ``decay_steps`` is positive.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _not_negative(self, initial_learning_rate=self.initial_learning_rate, decay_rate=self.decay_rate)
        _positive(self, decay_steps=self.decay_steps)

    def __call__(self, step: int) -> float:
        quotient = _steps(step) / self.decay_steps
        return self.initial_learning_rate / (
            1 + self.decay_rate * (math.floor(quotient) if self.staircase else quotient)
        )


@dataclass(frozen=True)
class PolynomialDecay:
    """From ``initial_learning_rate`` to ``end_learning_rate`` within ``decay_steps`` steps, which stays afterwards.

    ``(initial - end) * (1 - step / decay_steps) ** power + end``: with power 1 a straight line.  ``cycle`` begins
    anew, over twice, three times ... as many steps, whenever the end is reached.  Raises TapegradError for a negative
    rate, and unless ``decay_steps`` and ``power`` are positive.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _not_negative(self, initial_learning_rate=self.initial_learning_rate, end_learning_rate=self.end_learning_rate)
        _positive(self, decay_steps=self.decay_steps, power=self.power)

    def __call__(self, step: int) -> float:
        step, length = _steps(step), self.decay_steps
        if self.cycle:
            length *= max(1, math.ceil(step / length))
        left = 1 - min(step, length) / length
        return (self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from ``initial_learning_rate`` to ``alpha`` times it within ``decay_steps``, where it stays.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", arXiv 1608.03983.  With
    ``warmup_target`` the rate first goes in a straight line from ``initial_learning_rate`` to it, within
    ``warmup_steps``, and the cosine begins there.  Raises TapegradError for a negative rate, and unless ``decay_steps``
    is positive.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _not_negative(self, initial_learning_rate=self.initial_learning_rate, alpha=self.alpha,
                      warmup_target=self.warmup_target or 0.0, warmup_steps=self.warmup_steps)  # fmt: skip
        _positive(self, decay_steps=self.decay_steps)

    def __call__(self, step: int) -> float:
        step, peak = _steps(step), self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return peak + (self.warmup_target - peak) * step / self.warmup_steps
            step, peak = step - self.warmup_steps, self.warmup_target
        return peak * _cosine(min(step, self.decay_steps) / self.decay_steps, self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts:
    """``CosineDecay`` again and again (arXiv 1608.03983): the first time over ``first_decay_steps``.

    Each period is ``t_mul`` times as long as the one before, and begins with ``m_mul`` times its rate.  Raises
    TapegradError for a negative rate, and unless ``first_decay_steps`` is positive and ``t_mul`` at least 1.
    """

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, initial_learning_rate=self.initial_learning_rate, m_mul=self.m_mul, alpha=self.alpha)
        _positive(self, first_decay_steps=self.first_decay_steps)
        if not self.t_mul >= 1:
            raise TapegradError(f"{_name(self)}: wanted t_mul of at least 1, got {self.t_mul!r}")

    def __call__(self, step: int) -> float:
        done = _steps(step) / self.first_decay_steps
        if self.t_mul == 1:
            period = math.floor(done)
            part = done - period
        else:
            period = math.floor(math.log1p(done * (self.t_mul - 1)) / math.log(self.t_mul))
            # A boundary may be rounded to the wrong side of a step.
            within = done * (1 + 1e-12)
            period += (self._begin(period + 1) <= within) - (self._begin(period) > within)
            part = max(0.0, done - self._begin(period)) / self.t_mul**period
        return self.initial_learning_rate * self.m_mul**period * _cosine(part, self.alpha)

    def _begin(self, period: int) -> float:
        """When a period begins, in lengths of the first."""
        return (self.t_mul**period - 1) / (self.t_mul - 1)


@dataclass(frozen=True)
class LinearWarmup:
    """In a straight line from ``start`` to ``target`` within ``steps`` steps, which stays afterwards.

    ``target`` may be a schedule: from step ``steps`` on it is asked for the steps beyond.  Raises TapegradError for a
    negative rate, and unless ``steps`` is positive.
    """

    target: float | Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, start=self.start)
        if not callable(self.target):
            _not_negative(self, target=self.target)
        _positive(self, steps=self.steps)

    def __call__(self, step: int) -> float:
        step = _steps(step)
        if step >= self.steps:
            return float(self.target(step - self.steps) if callable(self.target) else self.target)
        end = self.target(0) if callable(self.target) else self.target
        return self.start + (end - self.start) * step / self.steps


@dataclass(frozen=True)
class JoinedSchedules:
    """``schedules[0]`` before step ``boundaries[0]``, then ``schedules[1]``, which counts from there, and so on.

    As in optax' ``join_schedules`` a boundary belongs to the schedule after it.  Raises TapegradError unless there is
    one schedule more than boundaries, and these increase.
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        _increasing(self, self.boundaries)
        if len(self.schedules) != len(self.boundaries) + 1:
            raise TapegradError(
                f"{_name(self)}: wanted one schedule more than the {len(self.boundaries)} boundaries, "
                f"got {len(self.schedules)}"
            )
        for schedule in self.schedules:
            if not callable(schedule):
                raise TapegradError(f"{_name(self)}: wanted schedules, got {schedule!r}; use Constant({schedule!r})")

    def __call__(self, step: int) -> float:
        step = _steps(step)
        i = bisect.bisect_right(self.boundaries, step)
        return float(self.schedules[i](step - self.boundaries[i - 1] if i else step))


def _cosine(part: float, alpha: float) -> float:
    """From 1 to ``alpha`` while ``part`` goes from 0 to 1."""
    return (1 - alpha) * 0.5 * (1 + math.cos(math.pi * part)) + alpha


def _steps(step: object) -> int:
    """A number of steps.  Raises TapegradError for what is none, FunctionError for one that a captured step counts."""
    number = step if isinstance(step, int) else int(step)  # type: ignore[call-overload]
    if number < 0:
        raise TapegradError(f"a schedule is asked for step {number}; the first is 0")
    return number


def _name(who: object) -> str:
    return type(who).__name__


def _not_negative(who: object, **values: float) -> None:
    for name, value in values.items():
        checks.at_least(_name(who), name, value, 0)


def _positive(who: object, **values: float) -> None:
    for name, value in values.items():
        if not checks.number(_name(who), name, value) > 0:
            raise TapegradError(f"{_name(who)}: wanted a positive {name}, got {value!r}")


def _increasing(who: object, boundaries: Sequence[int]) -> None:
    if any(b <= a for a, b in zip(boundaries, boundaries[1:])) or any(b < 0 for b in boundaries):
        raise TapegradError(f"{_name(who)}: wanted boundaries that increase from 0 on, got {list(boundaries)}")


open_to_users(globals(), __name__)
