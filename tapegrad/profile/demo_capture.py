"""The demo's training step, run eagerly and captured by ``tg.function``: time, bytes, bits; nothing is printed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import tapegrad as tg
from tapegrad.errors import BudgetError
from tapegrad.profile.demo_model import loss_and_gradients
from tapegrad.profile.demo_text import Text
from tapegrad.profile.demo_train import Demo, Run, Settings
from tapegrad.profile.report.units import iec

if TYPE_CHECKING:
    from tapegrad.program.tables import Plan

UNTIMED = 2
"""Steps that are not timed: a captured step's first two calls run eagerly, too."""


class Training:
    """A model of its own, which starts from the demo's weights and is trained step by step; what was seen of it.

    ``captured``: whether replays of ``function`` do the steps, within ``budget`` bytes; ``run``: losses, seconds from
    the third step on, and the peak of an eager step, beside what was alive before it.
    """

    def __init__(
        self, title: str, text: Text, settings: Settings, captured: bool = True, budget: int | None = None
    ) -> None:
        demo = Demo(text, settings)
        model, optimizer = demo.model, demo.optimizer()

        def step(tokens: tg.Tensor, labels: tg.Tensor) -> tg.Tensor:
            loss, gradients, variables = loss_and_gradients(model, tokens, labels)
            optimizer.apply(gradients, variables)
            return loss

        self.title, self.captured = title, captured
        self.function = tg.function(step, budget=budget)
        self.run = Run("plain")
        self._step = self.function if captured else step
        self._batch = demo.batch
        self._model, self._optimizer = model, optimizer

    def advance(self) -> None:
        """Train on the next batch.  Raises BudgetError, before anything is changed, if no plan keeps the budget."""
        number = len(self.run.losses)
        batch = self._batch(number)
        if not self.captured and number == UNTIMED - 1:
            with tg.measure() as m:
                before = m.live_bytes
                self.run.losses.append(float(self._step(*batch)))
            self.run.peak_bytes = m.peak_bytes - before
            return
        begin = time.perf_counter()
        self.run.losses.append(float(self._step(*batch)))
        if number >= UNTIMED:
            self.run.seconds.append(time.perf_counter() - begin)

    def plan(self) -> Plan:
        """What a replay takes.  Raises FunctionError, with the reason, if the step runs eagerly."""
        return self.function.plan(*self._batch(0))

    def state(self) -> list[bytes]:
        """The values of all variables, the optimizer's included."""
        return [v.numpy().tobytes() for v in (*self._model.variables, *self._optimizer.variables)]


def compare(text: Text, settings: Settings, on_step: Callable[[int], None]) -> list[Training]:
    """The same steps in turns: eagerly, captured, and captured with half the arena, or as little as can be kept.

    Raises FunctionError if a step cannot be captured.
    """
    trainings = [Training("eager", text, settings, captured=False), Training("captured", text, settings)]
    for number in range(UNTIMED + settings.compared):
        for training in trainings:
            training.advance()
        if number == 0:
            plan = trainings[1].plan()
            trainings.append(_within(plan.peak_bytes - plan.arena_bytes // 2, text, settings))
        on_step(number + 1)
    return trainings


def _within(budget: int, text: Text, settings: Settings) -> Training:
    """Captured training that has done one step, within a budget, or the least that can be kept if that is more."""
    training = Training(f"budget {iec(budget)}", text, settings, budget=budget)
    try:
        training.advance()
    except BudgetError as error:
        budget = error.needed_bytes
        training = Training(f"budget {iec(budget)}", text, settings, budget=budget)
        training.advance()
    return training


def identical(trainings: list[Training]) -> bool:
    """Whether all had the same losses, and have the same variables, bit for bit."""
    first, *others = trainings
    state = first.state()
    return all(other.run.losses == first.run.losses and other.state() == state for other in others)
