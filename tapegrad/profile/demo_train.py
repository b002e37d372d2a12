"""Train the demo's transformer in several ways, and measure each; nothing is printed here."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tapegrad as tg
from tapegrad.profile.demo_model import CharTransformer, loss_and_gradients, loss_of
from tapegrad.profile.demo_text import Text

Step = Callable[[tg.Tensor, tg.Tensor], tg.Tensor]
"""One training step: tokens and labels to the loss."""

UNTIMED = 4
"""Steps before the timed ones: a captured function runs eagerly at first, and the bytes of the last are counted."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, and of ``steps`` of training the first ``compared``, which are done in every way."""

    steps: int
    compared: int
    batch: int
    context: int = 128
    width: int = 128
    heads: int = 4
    blocks: int = 6
    learning_rate: float = 3e-3


FULL = Settings(steps=250, compared=19, batch=16)
QUICK = Settings(steps=60, compared=13, batch=8)


def windows(numbers: tg.Tensor, seed: str, settings: Settings) -> tuple[tg.Tensor, tg.Tensor]:
    """Return random tokens and labels, each (batch, context): the labels are the tokens, shifted by one."""
    chance = random.Random(seed)
    starts = [[chance.randrange(numbers.size - settings.context)] for _ in range(settings.batch)]
    indices = tg.asarray(starts) + tg.arange(settings.context + 1)
    characters = tg.astype(tg.take(numbers, indices, axis=0), "int32")
    return characters[:, :-1], characters[:, 1:]


class Training:
    """A model and an optimizer of its own, trained in one way; all ways have the same weights and batches.

    ``step``: what ``wrap`` makes of a plain step, which changes the variables and returns the loss before it.
    ``model_bytes``: of the variables, the optimizer's included; ``peak_bytes``: at the peak of a step, without those
    of other trainings.
    """

    def __init__(
        self,
        title: str,
        text: Text,
        settings: Settings,
        *,
        recompute_blocks: bool = False,
        wrap: Callable[[Step], Step] = lambda step: step,
    ) -> None:
        self.title, self.text, self.settings = title, text, settings
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._others_bytes = live_bytes()
        tg.random.seed(0)
        s = settings
        self.model = model = CharTransformer(len(text.vocabulary), s.context, s.width, s.heads, s.blocks)
        model.recompute_blocks = recompute_blocks
        loss_of(model, *self._batch(0))  # makes the weights
        rate = partial(learning_rate, settings)
        self.optimizer = optimizer = tg.optim.AdamW(rate, weight_decay=0.01, beta_2=0.95, global_clipnorm=1.0)

        def step(tokens: tg.Tensor, labels: tg.Tensor) -> tg.Tensor:
            loss, gradients, variables = loss_and_gradients(model, tokens, labels)
            optimizer.apply(gradients, variables)
            return loss

        self.step = wrap(step)

    def warm_up(self) -> Training:
        """Do the steps that are not timed, and count the bytes of the last."""
        for _ in range(UNTIMED - 1):
            self._advance()
        with tg.measure() as m:
            self._advance()
        self.peak_bytes = m.peak_bytes - self._others_bytes
        self.model_bytes = sum(v.numpy().nbytes for v in self._variables())
        return self

    def advance(self) -> None:
        """Train on the next batch, timed."""
        begin = time.perf_counter()
        self._advance()
        self.seconds.append(time.perf_counter() - begin)

    def _advance(self) -> None:
        self.losses.append(float(self.step(*self._batch(len(self.losses)))))

    def _batch(self, step: int) -> tuple[tg.Tensor, tg.Tensor]:
        return windows(self.text.train, str(step), self.settings)

    def _variables(self) -> list[tg.Variable]:
        return [*self.model.variables, *self.optimizer.variables]

    @property
    def step_seconds(self) -> float:
        """The median of the timed steps."""
        return statistics.median(self.seconds)

    def state(self) -> tuple[list[float], list[bytes]]:
        """The losses so far, and the bits of all variables."""
        return self.losses, [v.numpy().tobytes() for v in self._variables()]

    def held_out_loss(self, batches: int = 4) -> float:
        """Return the mean loss on text that is never trained on."""
        parts = (windows(self.text.held_out, f"held out {i}", self.settings) for i in range(batches))
        return statistics.fmean(float(loss_of(self.model, *part)) for part in parts)


def learning_rate(settings: Settings, done: int) -> float:
    """Return the rate after ``done`` steps: a short linear warm-up, then half a cosine down to a tenth."""
    warm = max(1, min(20, settings.steps // 10))
    if done < warm:
        return settings.learning_rate * (done + 1) / warm
    progress = min(1.0, (done - warm) / max(1, settings.steps - warm))
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def live_bytes() -> int:
    """Return the bytes of all tensors and variables alive."""
    with tg.measure() as m:
        return m.live_bytes


def compare(text: Text, settings: Settings) -> list[Training]:
    """Do the compared steps in every way, the plain one first.

    Steps are timed in turns, so that what else the machine does slows all alike.  The budgets are those of half of the
    bytes that a plain step takes besides the model.
    """
    plain = Training("plain", text, settings).warm_up()
    half = (plain.peak_bytes - plain.model_bytes) // 2

    def within(step: Step) -> Step:
        def budgeted(tokens: tg.Tensor, labels: tg.Tensor) -> tg.Tensor:
            with tg.memory_budget(live_bytes() + half):
                return step(tokens, labels)

        return budgeted

    def captured_within(step: Step) -> Step:
        return tg.function(step, budget=plain.model_bytes + half)

    trainings = [
        plain,
        Training("tg.recompute_grad(block)", text, settings, recompute_blocks=True).warm_up(),
        Training("tg.memory_budget(half)", text, settings, wrap=within).warm_up(),
        Training("tg.function", text, settings, wrap=tg.function).warm_up(),
        Training("tg.function(budget=half)", text, settings, wrap=captured_within).warm_up(),
    ]
    for _ in range(settings.compared - UNTIMED):
        for training in trainings:
            training.advance()
    return trainings
