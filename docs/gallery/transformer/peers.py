"""A training step of the transformer (4 blocks of 128, batch 8, context 128, float32), beside PyTorch and JAX.

    python docs/gallery/transformer/peers.py [--rounds 9]

Loss, gradients and Adam's update, as ``bench/train_step.py`` has them: PyTorch eager with its fused attention, JAX with
the whole step jitted.  tapegrad's step is captured, plainly and within half of its arena.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import train_step
    import train_step_jax

    sizes = argparse.Namespace(batch=8, context=128, width=128, heads=4, blocks=4, vocabulary=80)
    text = np.random.default_rng(0).integers(0, 80, (8, 129))
    tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()

    def captured(budget: int | None) -> Any:
        training = train_step.Ours(tg, sizes, tokens, labels)

        def step(tokens: Any, labels: Any) -> Any:
            loss, gradients, variables = training.demo_model.loss_and_gradients(training.model, tokens, labels)
            training.optimizer.apply(gradients, variables)
            return loss

        function = tg.function(step, budget=budget)
        return training, function, lambda: [function(training.tokens, training.labels).numpy()]

    training, function, _ = captured(None)
    weights = train_step.weights_of(training.model)
    function(training.tokens, training.labels)
    plan = function.plan(training.tokens, training.labels)
    function.release()
    del training, function
    _, _, plain = captured(None)  # from the same weights as the others
    _, _, half = captured(plan.peak_bytes - plan.arena_bytes // 2)
    found: comparison.Works = {"tapegrad, captured in half": half, "tapegrad, captured": plain}
    if torch is not None:
        in_torch = train_step.Theirs(torch, sizes, weights, tokens, labels, fused=True)
        found["PyTorch, fused attention"] = lambda: [in_torch.step()]
    if jax is not None:
        in_jax = train_step_jax.TheirsInJax(jax, sizes, weights, tokens, labels, train_step.LEARNING_RATE)
        found["JAX, jitted"] = lambda: [in_jax.step()]
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-5, rounds=9, warm_up=3)
