"""The crane's gradient (10,000 steps, 200 ropes, float64), beside PyTorch and JAX.

    python docs/gallery/optimal_control/peers.py [--rounds 7]

PyTorch keeps everything, or the states of 100 segments (``torch.utils.checkpoint``); JAX scans 100 segments of 100
steps under ``jax.checkpoint``, or keeps everything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison

N, ROPES, KNOTS, SEGMENT = 10_000, 200, 33, 100


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import optimal_control as ours

    crane, usual = ours.Crane(N, ROPES), ours.smooth_move(KNOTS)
    gradient_of = tg.value_and_grad(crane.cost)
    dt, lengths = crane.dt, crane.lengths.numpy()
    at = np.arange(N) * ((KNOTS - 1) / N)
    left, share = np.floor(at).astype("int64"), at - np.floor(at)

    def step(lib: Any, state: Any, a: Any, lengths: Any) -> Any:
        place, speed, angle, turning = state
        turning = turning - dt * (ours.GRAVITY * lib.sin(angle) + a * lib.cos(angle)) / lengths
        speed = speed + dt * a
        return place + dt * speed, speed, angle + dt * turning, turning

    def cost(lib: Any, state: Any, lengths: Any, knots: Any) -> Any:
        place, speed, angle, turning = state
        sway = (0.5 * (lengths * turning) ** 2 + ours.GRAVITY * lengths * (1 - lib.cos(angle))).mean()
        return sway + 100.0 * (place - ours.WAY) ** 2 + 100.0 * speed**2 + 1e-4 * (knots**2).mean()

    def in_torch(segment: int) -> Any:
        from torch.utils.checkpoint import checkpoint

        knots = torch.tensor(usual, requires_grad=True)
        ropes = torch.tensor(lengths)
        indices, shares = torch.tensor(left), torch.tensor(share)
        accelerations = knots[indices] * (1 - shares) + knots[indices + 1] * shares

        def steps(part: Any, *state: Any) -> Any:
            for a in part.unbind():
                state = step(torch, state, a, ropes)
            return state

        zero = torch.zeros((), dtype=torch.float64)
        state = (zero, zero, torch.zeros_like(ropes), torch.zeros_like(ropes))
        for part in accelerations.split(segment):
            state = steps(part, *state) if segment == N else checkpoint(steps, part, *state, use_reentrant=False)
        value = cost(torch, state, ropes, knots)
        value.backward()
        return value.item(), knots.grad.numpy()

    def in_jax(segment: int) -> Any:
        jnp = jax.numpy

        def steps(state: Any, part: Any) -> Any:
            return jax.lax.scan(lambda s, a: (step(jnp, s, a, lengths), None), state, part)

        def whole(knots: Any) -> Any:
            accelerations = (knots[left] * (1 - share) + knots[left + 1] * share).reshape(-1, segment)
            zero, still = jnp.zeros(()), jnp.zeros(ROPES)
            body = steps if segment == N else jax.checkpoint(steps)
            return cost(jnp, jax.lax.scan(body, (zero, zero, still, still), accelerations)[0], lengths, knots)

        compiled = jax.jit(jax.value_and_grad(whole)).lower(usual).compile()
        return lambda: [np.asarray(x) for x in compiled(usual)]

    found: comparison.Works = {"tapegrad, 50 states": lambda: [x.numpy() for x in gradient_of(usual)]}
    if torch is not None:
        found["PyTorch, everything kept"] = lambda: in_torch(N)
        found["PyTorch, 100 checkpoints"] = lambda: in_torch(SEGMENT)
    if jax is not None:
        found["JAX, everything kept"] = in_jax(N)
        found["JAX, 100 checkpoints"] = in_jax(SEGMENT)
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-9, rounds=5, warm_up=1)
