"""Training and measuring for the demo; nothing is printed here."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tapegrad as tg
from tapegrad.profile.demo_model import CharTransformer, loss_and_gradients, loss_of
from tapegrad.profile.demo_text import Text

if TYPE_CHECKING:
    from tapegrad.memory.ledger.figures import Measure


@dataclass(frozen=True)
class Settings:
    """What one demo does: ``steps`` of plain training, of which the first ``compared`` are done in all three ways.

    Afterwards each way is timed for one step in each of ``rounds``.
    """

    steps: int
    compared: int
    rounds: int
    batch: int
    context: int = 128
    width: int = 128
    heads: int = 4
    blocks: int = 6
    learning_rate: float = 3e-3
    seed: int = 0


FULL = Settings(steps=250, compared=5, rounds=15, batch=16)
QUICK = Settings(steps=60, compared=3, rounds=9, batch=8)


@dataclass
class Run:
    """What was seen of one way to train.

    Of the ``peak_bytes`` of one step, ``activation_bytes`` were kept for the gradient and ``remade_bytes`` were made
    again by a rerun.  ``samples``: (seconds, live bytes, bytes of both kinds) over that step.
    """

    checkpoint: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradients: list[bytes] = field(default_factory=list)
    peak_bytes: int = 0
    activation_bytes: int = 0
    remade_bytes: int = 0
    reruns: int = 0
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The seconds of one step: the median over the rounds."""
        return statistics.median(self.seconds)

    def count(self, m: Measure) -> None:
        """Keep what ``tg.measure()`` saw of one step."""
        self.peak_bytes, self.reruns = m.peak_bytes, m.reruns
        self.activation_bytes = m.peak_by_category.get("activation", 0)
        self.remade_bytes = m.peak_by_category.get("rematerialized", 0)
        self.samples = list(m.samples)


class Demo:
    """One model, one text, one sequence of batches; every run starts from the same weights."""

    def __init__(self, text: Text, settings: Settings) -> None:
        self.text, self.settings = text, settings
        tg.random.seed(settings.seed)
        s = settings
        self.model = CharTransformer(len(text.vocabulary), s.context, s.width, s.heads, s.blocks)
        loss_of(self.model, *self.batch(0))  # makes the weights
        self._start = [v.numpy() for v in self.model.variables]

    def batch(self, step: int) -> tuple[tg.Tensor, tg.Tensor]:
        """The tokens and labels of a step, each (batch, context): the labels are the tokens, shifted by one."""
        return self._windows(self.text.train, f"{self.settings.seed}/{step}", self.settings.batch)

    def _windows(self, numbers: tg.Tensor, seed: str, count: int) -> tuple[tg.Tensor, tg.Tensor]:
        chance = random.Random(seed)
        length = self.settings.context
        starts = [[chance.randrange(numbers.size - length)] for _ in range(count)]
        places = tg.asarray(starts) + tg.arange(length + 1)
        windows = tg.astype(tg.take(numbers, places, axis=0), "int32")
        return windows[:, :-1], windows[:, 1:]

    def train(self, checkpoint: str, steps: int, on_step: Callable[[int, float], None]) -> Run:
        """Train from the start in one of the ways; ``on_step`` gets the number of steps done and the loss.

        Of the first and of the last compared step the gradients are kept, and of the latter the bytes are counted.
        """
        for variable, value in zip(self.model.variables, self._start, strict=True):
            variable.assign(value)
        tg.random.seed(self.settings.seed)
        self.model.checkpoint = checkpoint
        optimizer = self.optimizer()
        run = Run(checkpoint)
        counted = min(self.settings.compared, steps) - 1
        for step in range(steps):
            batch = self.batch(step)
            if step == counted:
                with tg.measure(timeline=True) as m:
                    loss = self._step(optimizer, batch, run.gradients)
                run.count(m)
            else:
                loss = self._step(optimizer, batch, run.gradients if step == 0 else None)
            run.losses.append(loss)
            on_step(step + 1, loss)
        return run

    def race(self, runs: list[Run], on_round: Callable[[int], None]) -> None:
        """Time one step of each run in each round, so that what else the machine does slows all of them alike."""
        optimizer = self.optimizer()
        for number in range(self.settings.rounds):
            batch = self.batch(number)
            for run in runs:
                self.model.checkpoint = run.checkpoint
                begin = time.perf_counter()
                self._step(optimizer, batch, None)
                run.seconds.append(time.perf_counter() - begin)
            on_round(number + 1)

    def optimizer(self) -> tg.optim.Optimizer:
        """A new optimizer, with the demo's rates."""
        return tg.optim.AdamW(self._rate, weight_decay=0.01, beta_2=0.95, global_clipnorm=1.0)

    def _step(
        self, optimizer: tg.optim.Optimizer, batch: tuple[tg.Tensor, tg.Tensor], kept: list[bytes] | None
    ) -> float:
        loss, gradients, variables = loss_and_gradients(self.model, *batch)
        if kept is not None:
            kept.extend(g.numpy().tobytes() for g in gradients)
        optimizer.apply(gradients, variables)
        return float(loss)

    def held_out_loss(self, batches: int = 4) -> float:
        """Mean loss on text that is never trained on."""
        windows = (self._windows(self.text.held_out, f"held out {i}", self.settings.batch) for i in range(batches))
        return statistics.fmean(float(loss_of(self.model, *window)) for window in windows)

    def _rate(self, done: int) -> float:
        """A short linear warm-up, then half a cosine down to a tenth."""
        s = self.settings
        warm = max(1, min(20, s.steps // 10))
        if done < warm:
            return s.learning_rate * (done + 1) / warm
        progress = min(1.0, (done - warm) / max(1, s.steps - warm))
        return s.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def identical(runs: list[Run], compared: int) -> bool:
    """Whether all runs have the same gradients, bit for bit, and the same losses over the compared steps."""
    first = runs[0]
    return bool(first.gradients) and all(
        run.gradients == first.gradients and run.losses[:compared] == first.losses[:compared] for run in runs
    )
