"""A character transformer under a budget: the training step captured, planned ahead to stay within half its arena.

    python docs/gallery/transformer/transformer.py [--small] [--picture transformer.svg]

The demo's decoder (``tapegrad.profile.demo_model``: pre-LN blocks, causal attention, GELU) learns the source of
Python's standard library.  ``tg.function(step, budget=...)`` writes the step down once and plans which values are
dropped and recomputed; from then on it is replayed in one allocation.  Every loss has the bits of the step without a
budget.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad.profile import demo_text
from tapegrad.profile.demo_model import CharTransformer, loss_and_gradients

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example


class Training:
    """A model that starts from the same weights each time, and its step."""

    def __init__(self, vocabulary: int, context: int, width: int, blocks: int) -> None:
        tg.random.seed(0)
        self.model = CharTransformer(vocabulary, context, width, heads=4, blocks=blocks)
        self.model(tg.zeros((1, context), dtype="int64"))  # makes the weights
        self.optimizer = tg.optim.AdamW(3e-3, weight_decay=0.01)

    def step(self, tokens: Any, labels: Any) -> Any:
        loss, gradients, variables = loss_and_gradients(self.model, tokens, labels)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss


def batches(text: Any, count: int, batch: int, context: int) -> list[tuple[Any, Any]]:
    """Tokens and labels (batch, context), the labels being the next characters."""
    numbers, draw = text.train.numpy(), np.random.default_rng(0)
    found = []
    for _ in range(count):
        at = draw.integers(0, numbers.size - context, (batch, 1)) + np.arange(context + 1)
        found.append((tg.asarray(numbers[at[:, :-1]]), tg.asarray(numbers[at[:, 1:]])))
    return found


def main() -> None:
    options = example.parser(__doc__).parse_args()
    context, width, blocks, batch, steps = (48, 32, 4, 8, 30) if options.small else (128, 128, 4, 8, 200)
    text = demo_text.load()
    size = len(text.vocabulary)
    data = batches(text, steps, batch, context)
    plain = Training(size, context, width, blocks)
    captured = tg.function(plain.step)
    compared = [float(captured(*data[k])) for k in range(4)]
    whole = captured.plan(*data[0])

    training = Training(size, context, width, blocks)
    step = tg.function(training.step, budget=whole.peak_bytes - whole.arena_bytes // 2)
    losses = [float(step(*data[k])) for k in example.steps("steps", steps)]
    half = step.plan(*data[0])
    print(str(half).splitlines()[0])
    what = f"the step's arena, {example.mib(whole.arena_bytes)} plainly, in half"
    example.check_memory(what, half.arena_bytes, whole.arena_bytes / 2)
    example.check(losses[:4] == compared, "four losses have the bits of the step without a budget")
    example.check(not step.stats.fallbacks and step.stats.replays >= steps - 2, "steps were replayed")

    last = float(np.mean(losses[-10:]))
    counts = np.bincount(text.train.numpy(), minlength=size)
    shares = counts[counts > 0] / counts.sum()
    single = float(-(shares * np.log(shares)).sum())
    print(
        f"loss {losses[0]:.3f} -> {last:.3f} nats a character "
        f"(uniform {math.log(size):.3f}, single characters {single:.3f})"
    )
    example.check(last < (losses[0] if options.small else single - 0.5), "the model has learned more than frequencies")
    if options.picture:
        draw(options.picture, captured.pareto(*data[0]), losses, single)


def draw(path: str, costs: Any, losses: list[float], single: float) -> None:
    figure, axes = example.panels(2)
    axes[0].plot([nbytes / 2**20 for nbytes, _ in costs], [100 * extra for _, extra in costs], "o-")
    axes[0].set(xlabel="arena of a step, MiB", ylabel="more work, %")
    axes[1].plot(losses)
    axes[1].axhline(single, color="C1", linestyle=":", label="frequencies of characters")
    axes[1].set(xlabel="step", ylabel="loss, nats a character")
    axes[1].legend()
    example.save(figure, path)


if __name__ == "__main__":
    main()
